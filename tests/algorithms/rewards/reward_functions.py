"""Reward functions of files that a test writes, called as a run calls them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from realrl.algorithms.base.method import FunctionInput
from realrl.algorithms.rewards.config import RewardTerm
from realrl.algorithms.rewards.reward_methods import RewardFunction, ScoreOptions
from realrl.data.batch import Batch, Ragged


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def make_input(
    completions: Sequence[str], *, samples: int = 1, first: int = 0, **fields: Sequence[Any]
) -> FunctionInput:
    """The items of a rank from `first` on, each with the prompt "?"; records are those of data.jsonl."""
    rows = [torch.tensor([ord("?"), *map(ord, text)]) for text in completions]
    ids = tuple(range(first, first + len(rows)))
    lengths = Ragged.scalars(torch.ones(len(rows), dtype=torch.int64))
    batch = Batch(ids, {"sequences": Ragged.of(rows), "prompt_length": lengths})
    origins = [f"data.jsonl:{10 + i // samples}" for i in ids]
    return FunctionInput(batch, dict(fields), Letters(), origins, samples)


def write_function(directory: Path, code: str) -> str:
    """Write a file with a function `score`; its reference."""
    file = directory / f"rewards_{abs(hash(code))}.py"
    file.write_text(code)
    return f"{file}:score"


def load_method(term: dict[str, Any], **options: Any) -> RewardFunction:
    """The loaded method of a term."""
    method = RewardFunction("reward", RewardTerm.model_validate(term), ScoreOptions(**options))
    method.load()
    return method


def scores_of(method: RewardFunction, inputs: FunctionInput) -> list[float]:
    outputs, _ = method.call(inputs)
    (score,) = outputs.values()
    return score.values.tolist()
