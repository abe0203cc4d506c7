"""Log-probabilities of the answers of preference pairs, and scores made of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.method import ModelOutput
from realrl.algorithms.packed import Responses, row_sums
from realrl.algorithms.pairs import pair_rows
from realrl.algorithms.preference.config import PreferenceConfig
from realrl.data.batch import Batch, Ragged, copy_numbers


class Sides(NamedTuple):
    """A number of each pair's chosen and of its rejected answer, [N] each."""

    chosen: Tensor
    rejected: Tensor


def sum_logprobs(batch: Batch, output: ModelOutput) -> Sides:
    """Sum the log-probabilities of each answer's tokens. [N] float64 each"""
    assert output.logprobs is not None
    starts = torch.stack((batch["chosen_prompt_length"].values, batch["rejected_prompt_length"].values), 1)
    answers = Responses.of(pair_rows(batch), Ragged.scalars(starts.flatten()))
    sums = answers.row_sums(output.logprobs[answers.index])
    return Sides(sums[0::2], sums[1::2])


def count_tokens(batch: Batch) -> Sides:
    """Count the tokens of each answer. [N] int64 each"""
    return Sides(*(_count(batch[key], batch[f"{key}_prompt_length"]) for key in ("chosen", "rejected")))


def _count(rows: Ragged, prompt_length: Ragged) -> Tensor:
    starts = prompt_length.values.clamp(min=1)
    return (copy_numbers(rows.lengths, starts.device) - starts).clamp(min=0)


def compute_scores(config: PreferenceConfig, batch: Batch, logps: Sides) -> Sides:
    """Compute the scores of answers, see `PreferenceConfig`. logps: [N] each -> [N] each"""
    scores = []
    for side, of, count in zip(Sides._fields, logps, count_tokens(batch), strict=True):
        if config.reference != "none":
            of = of - batch[f"ref_{side}_logps"].values.double()
        scores.append(of / count.clamp(min=1) if config.per_token else of)
    return Sides(*scores)


def sum_nll(config: PreferenceConfig, batch: Batch, output: ModelOutput) -> Tensor:
    """Sum the negative log-likelihoods of the tokens of each chosen sequence that count. [N] float64"""
    assert output.logprobs is not None
    starts = batch["chosen_prompt_length"].values
    if config.nll_prompts:
        starts = torch.ones_like(starts)
    # Rejected sequences have no tokens that count.
    ends = copy_numbers(batch["rejected"].lengths, starts.device)
    rows = pair_rows(batch)
    found = Responses.of(rows, Ragged.scalars(torch.stack((starts, ends), 1).flatten()))
    return -row_sums(output.logprobs[found.index], found.row, len(rows))[0::2]


def count_nll_tokens(config: PreferenceConfig, batch: Batch) -> Tensor:
    """Count the tokens that `sum_nll` sums over. [N] int64"""
    if not config.nll_prompts:
        return count_tokens(batch).chosen
    device = batch["chosen_prompt_length"].values.device
    return copy_numbers(batch["chosen"].lengths, device) - 1
