"""Make the data of the examples: prompts, a tokenizer, and a sentiment classifier with its own tokenizer.

Usage: python examples/prepare.py

It writes to data/examples, takes seconds, and needs no network.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

PLACE = Path("data/examples")
KINDS = {
    "fruit": ("apple", "pear", "plum", "cherry", "melon"),
    "colour": ("red", "green", "blue", "white", "grey"),
    "animal": ("horse", "cow", "cat", "dog", "sheep"),
    "tool": ("hammer", "saw", "drill", "file", "axe"),
}
QUESTIONS = ("name a {}:", "one {}:", "think of a {}:", "which {}?", "say a {}:", "a {} please:")
FILMS = ("the film is", "the story is", "this cast is", "a plot so", "the music was", "I found the ending")
MOODS = {1: ("great", "lovely", "moving", "clever", "warm"), 0: ("dull", "awful", "tired", "weak", "clumsy")}


def write_records(name: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines."""
    (PLACE / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def make_classifier(directory: Path) -> None:
    """Train a tiny BERT, which reads letters, to distinguish words of praise from words of blame."""
    opinions = [(f"{film} {word}", mood) for film in FILMS for mood, words in MOODS.items() for word in words]
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", " ", *ascii_lowercase])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # one token per letter
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
    )
    classifier = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3)
    inputs = tokenizer([text.lower() for text, _ in opinions], padding=True, return_tensors="pt")
    labels = torch.tensor([mood for _, mood in opinions])
    for _ in range(60):
        loss = classifier(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    classifier.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Write records, tokenizer and classifier."""
    PLACE.mkdir(parents=True, exist_ok=True)
    questions = [
        {"prompt": question.format(kind), "accepted": words}
        for kind, words in KINDS.items()
        for question in QUESTIONS
    ]
    write_records("questions.jsonl", questions)
    write_records("films.jsonl", [{"prompt": film} for film in FILMS] * 4)
    answers = [{"prompt": q["prompt"], "answer": f" {word}"} for q in questions for word in q["accepted"]]
    praise = [{"prompt": f, "answer": f" {w}"} for f in FILMS for words in MOODS.values() for w in words]
    write_records("texts.jsonl", [*answers, *praise])
    texts, tokenizer = str(PLACE / "texts.jsonl"), str(PLACE / "tokenizer")
    options = ["--out", tokenizer, "--vocab-size", "360", "--overwrite"]
    subprocess.run([sys.executable, "-m", "realrl", "tokenizer", texts, *options], check=True)
    make_classifier(PLACE / "classifier")
    print(f"{PLACE}: questions.jsonl, films.jsonl, tokenizer, classifier")


if __name__ == "__main__":
    main()
