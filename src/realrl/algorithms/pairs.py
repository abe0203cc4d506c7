"""Preference pairs: rows of both answers, and weights of pairs."""

from torch import Tensor

from realrl.data.batch import Batch, Ragged


def pair_rows(batch: Batch) -> Ragged:
    """Order rows as chosen 0, rejected 0, chosen 1, ... so that both of a pair stay in one micro-batch."""
    pairs = zip(batch["chosen"].rows(), batch["rejected"].rows(), strict=True)
    return Ragged.of((row for pair in pairs for row in pair), dtype=batch["chosen"].values.dtype)


def pair_weights(batch: Batch) -> Tensor:
    """Compute the weight of each pair: [N] float64."""
    return 1 / batch["pairs_of_prompt"].values.double()
