"""Synthetic records to measure with."""

from collections.abc import Sequence

import torch

from realrl.data.batch import Batch, Ragged


def make_records(lengths: Sequence[int], vocabulary: int, device: torch.device) -> Batch:
    """Make a batch as the calls of a PPO step find it, with sequences of these lengths.

    The first half of a sequence is the prompt; a single token is both.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
    sequences = Ragged(drawn, tuple(lengths))
    prompts = [max(1, length // 2) for length in lengths]
    zeros = Ragged(torch.zeros(sum(lengths)), sequences.lengths)
    once = Ragged.scalars(torch.ones(len(lengths)))
    fields = {
        "prompts": Ragged.of([row[:n] for row, n in zip(sequences.rows(), prompts, strict=True)]),
        "sequences": sequences,
        "prompt_length": Ragged.scalars(torch.tensor(prompts)),
        "finished": once,
        "score": once,
        **dict.fromkeys(("logprobs", "ref_logprobs", "values", "advantages", "returns"), zeros),
    }
    return Batch(tuple(range(len(lengths))), fields).to(device)
