"""Rows of a decode batch that share a prompt: samples of one prompt stay together as far as memory allows."""

_PIECES_PER_STAGE = 2
"""Pieces of prompts per pipeline stage below which prompts are cut: decode batches get more equal."""


def count_rows_per_piece(
    samples: int, *, longest: int, room: int, budget: int, prompts: int, stages: int
) -> int:
    """Count the rows of one prompt that are decoded together, at most `samples` of them.

    As many as the KV cache of `budget` tokens holds beside a prompt of `longest` tokens, with `room` tokens for
    each; fewer in a pipeline of several `stages` where `prompts` are too few to keep it busy. Prompts are cut into
    pieces of nearly equal size.
    """
    most = min(samples, max(1, (budget - longest) // room))
    pieces = -(-samples // most)
    if stages > 1:
        pieces = max(pieces, min(samples, -(-_PIECES_PER_STAGE * stages // prompts)))
    return -(-samples // pieces)
