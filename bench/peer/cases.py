"""What both sides of the comparison with TRL share: cases, files, reward, and the protocol of taking turns."""

import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from realrl.engine.model import make_unsharded_model
from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import SHAPES as PUBLISHED
from realrl.huggingface import model_files
from realrl.huggingface.initial_weights import initialise

SHAPES = {
    "5M": ModelShape(
        vocab_size=4096, hidden_size=256, intermediate_size=704, layers=4, heads=8, kv_heads=4, head_dim=32
    ),
    "50M": ModelShape(
        vocab_size=8192, hidden_size=640, intermediate_size=1728, layers=8, heads=10, kv_heads=5, head_dim=64
    ),
    "0.5B": PUBLISHED["qwen2.5-0.5b"],
    "1.5B": PUBLISHED["qwen2.5-1.5b"],
}
PAD, EOS = "<pad>", "<eos>"
EOS_ID = 1
GROUP = 8
PROMPT = {"grpo": 64, "dpo": 32, "reward": 32}
"""Tokens of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths with a cut: most are short, a few long. With `sigma` 0 every length is `most`."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        if self.sigma == 0:
            return self.most
        return max(4, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


FIXED = Lengths(median=128, sigma=0, most=128)
TAILED = Lengths(median=40, sigma=1.0, most=256)
ANSWERS = Lengths(median=64, sigma=0.7, most=256)
TEXTS = Lengths(median=64, sigma=0.8, most=512)
LONG = Lengths(median=200, sigma=0.8, most=1024)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    algorithm: str
    size: str
    items: int
    """Prompts, pairs or texts of a step."""
    lengths: Lengths
    trl_batch: int
    """TRL's `per_device_train_batch_size`; the rest of a step is accumulated."""
    trl: Mapping[str, Any]
    """More settings of TRL."""
    micro_batch_tokens: int = 4096
    """realrl's budget of a micro-batch."""
    cache_tokens: int = 20480
    """realrl's KV cache: it holds every answer of a step at once, as TRL does."""
    dtype: str = "float32"
    """Type of parameters."""

    @property
    def rows(self) -> int:
        """Rows that TRL takes per step, before it packs them. A pair counts as one row."""
        return self.items * (GROUP if self.algorithm == "grpo" else 1)


def grpo(size: str, items: int, lengths: Lengths, trl_batch: int) -> Case:
    """Groups of 8, no reference, one optimizer step."""
    return Case(algorithm="grpo", size=size, items=items, lengths=lengths, trl_batch=trl_batch, trl={})


def pairs(algorithm: str, size: str, items: int) -> Case:
    """Preference pairs."""
    return Case(algorithm=algorithm, size=size, items=items, lengths=ANSWERS, trl_batch=8, trl={})


def sft(size: str, items: int, trl_batch: int, **trl: Any) -> Case:
    """Texts; the loss covers every token."""
    return Case(algorithm="sft", size=size, items=items, lengths=TEXTS, trl_batch=trl_batch, trl=trl)


PACKED = {"packing": True, "packing_strategy": "bfd", "max_length": 1024}
WRAPPED = {"packing": True, "packing_strategy": "wrapped", "max_length": 1024}

CASES = {
    "grpo-5M-fixed": grpo("5M", 8, FIXED, 16),
    "grpo-5M-tailed": grpo("5M", 8, TAILED, 16),
    "grpo-50M-fixed": grpo("50M", 4, FIXED, 8),
    "grpo-50M-tailed": grpo("50M", 4, TAILED, 8),
    "dpo-5M": pairs("dpo", "5M", 32),
    "dpo-50M": pairs("dpo", "50M", 8),
    "reward-5M": pairs("reward", "5M", 32),
    "reward-50M": pairs("reward", "50M", 8),
    "sft-5M-padded": sft("5M", 64, 8),
    "sft-5M-packed": sft("5M", 64, 1, **PACKED),
    "sft-5M-wrapped": sft("5M", 64, 4, **WRAPPED),
    "sft-50M-padded": sft("50M", 32, 8),
    "sft-50M-packed": sft("50M", 32, 1, **PACKED),
    "sft-50M-wrapped": sft("50M", 32, 2, **WRAPPED),
}
GPU_CASES = {
    "grpo-5M-smoke": replace(
        grpo("5M", 2, Lengths(median=8, sigma=0.5, most=16), 16), micro_batch_tokens=2048, dtype="bfloat16"
    ),
    "grpo-0.5B-tailed": replace(
        grpo("0.5B", 32, LONG, 32), micro_batch_tokens=32768, cache_tokens=300_000, dtype="bfloat16"
    ),
    "grpo-1.5B-tailed": replace(
        grpo("1.5B", 32, LONG, 16), micro_batch_tokens=16384, cache_tokens=300_000, dtype="bfloat16"
    ),
}
"""Cases for a GPU. The first one is a dry run for a CPU."""
EVERY_CASE = {**CASES, **GPU_CASES}
DEVICE_VARIABLE = "REALRL_BENCH_DEVICE"
"""Environment variable with the device of both sides."""


def read_device() -> str:
    """Read the device of this side."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


class World:
    """Files of a case, equal for both sides: a model with fresh weights, and records."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> tuple["World", int]:
        """Make the world that a side's command line names. Returns it and the number of steps."""
        name, root, steps, *batch = arguments
        case = replace(EVERY_CASE[name], trl_batch=int(batch[0])) if batch else EVERY_CASE[name]
        return cls(Path(root), case, int(steps)), int(steps)

    def __init__(self, root: Path, case: Case, steps: int) -> None:
        """Write a model and records below `root`, enough for a number of steps."""
        self.case = case
        self.root = root
        self.shape = SHAPES[self.case.size]
        head: Head = "scalar" if self.case.algorithm == "reward" else "lm"
        self.model = root / "model"
        make_model(self.model, self.shape, head)
        self.records = root / "records.jsonl"
        rng = random.Random(1)
        rows = [self._record(rng) for _ in range(steps * self.case.items)]
        self.records.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answer_lengths(self, step: int) -> list[int]:
        """Lengths of the answers of a GRPO step, end of sequence included, in the order of its samples.

        An answer of the greatest length does not end.
        """
        rng = random.Random(1000 + step)
        return [self.case.lengths.draw(rng) for _ in range(self.case.rows)]

    def count_tokens(self, step: int) -> int:
        """Count the tokens of a step without padding."""
        case = self.case
        if case.algorithm == "grpo":
            return case.rows * PROMPT["grpo"] + sum(self.answer_lengths(step))
        lines = self.records.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[step * case.items : (step + 1) * case.items]]
        if case.algorithm == "sft":
            return sum(len(row["text"].split()) + 1 for row in rows)
        return sum(
            len(row["prompt"].split()) + len(row[key].split()) + 1
            for row in rows
            for key in ("chosen", "rejected")
        )

    def _record(self, rng: random.Random) -> dict[str, str]:
        algorithm = self.case.algorithm
        if algorithm == "sft":
            # Leave room for the end of sequence.
            return {"text": self._words(rng, self.case.lengths.draw(rng) - 1)}
        record = {"prompt": self._words(rng, PROMPT[algorithm])}
        if algorithm != "grpo":
            for key in ("chosen", "rejected"):
                # The space separates prompt and answer if a side joins them as text.
                record[key] = " " + self._words(rng, self.case.lengths.draw(rng) - 1)
        return record

    def _words(self, rng: random.Random, count: int) -> str:
        return " ".join(f"w{rng.randrange(2, self.shape.vocab_size)}" for _ in range(count))


def make_model(directory: Path, shape: ModelShape, head: Head) -> None:
    """Save a model with fresh weights, and a tokenizer for which each word is one token."""
    vocabulary = {PAD: 0, EOS: EOS_ID, **{f"w{i}": i for i in range(2, shape.vocab_size)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=EOS)
    model = make_unsharded_model(shape, head, dtype=torch.float32, device=torch.device("cpu"))
    initialise(model.parameters, model.layout.specs, shape, 1)
    model_files.save(directory, shape, head, model.parameters, tokenizer, torch.float32)


def reward(completions: list[str], completion_ids: list[list[int]], **fields: Any) -> list[float]:
    """Share of even tokens: cheap, and different for the samples of a prompt."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Turns:
    """A side's end of the protocol: it waits for its turn before each step and reports the costs of the step."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        # Whatever libraries print to stdout goes to the log, since stdout carries the reports.
        os.dup2(2, 1)
        self._imported = read_memory("VmRSS")
        self._begin = self._processor = 0.0
        self.step = 0
        """Number of the step that runs or comes next."""

    def ready(self) -> None:
        """Report that the first step may begin, and wait for it."""
        self._say({})

    def done(self, tokens: int) -> None:
        """Report the costs of the step, and wait for the next turn. `tokens` counts no padding."""
        seconds = time.perf_counter() - self._begin
        processor = time.process_time() - self._processor
        self.step += 1
        memory = {"peak": read_memory("VmHWM"), "imported": self._imported}
        self._say({"seconds": seconds, "processor": processor, "tokens": tokens, **memory})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._begin = time.perf_counter()
        self._processor = time.process_time()


def read_memory(field: str) -> int:
    """Read a figure of this process's memory from /proc, in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))
