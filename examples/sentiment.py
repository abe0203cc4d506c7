"""A reward from a classifier of another model family: the log-probability that a text is positive.

The classifier has its own tokenizer and reads texts. It runs in a thread on the CPU of each rank that calls the
reward, while the rank continues with other calls.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = os.environ.get("SENTIMENT_MODEL", "lvwerra/distilbert-imdb")
"""Hugging Face directory or hub name of a classifier with a label POSITIVE."""


@cache
def load_classifier() -> tuple[Any, Any, int]:
    """Load tokenizer and model once per process, and look up the index of the label POSITIVE."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL).eval()
    labels = {name.upper(): number for number, name in model.config.id2label.items()}
    return tokenizer, model, int(labels["POSITIVE"])


@torch.no_grad()
def positive(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Score each prompt with its completion by log p(positive)."""
    tokenizer, model, label = load_classifier()
    texts = [f"{prompt} {text}".lower() for prompt, text in zip(prompts, completions, strict=True)]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    scores: list[float] = logits.log_softmax(-1)[:, label].tolist()
    return scores
