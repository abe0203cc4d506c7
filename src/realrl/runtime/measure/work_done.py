"""Work that one rank has done in a call: tokens passed, sampled and padded."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.engine.pass_counts import PassCounts


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """Work of one data-parallel replica in a call, as one of its ranks knows it."""

    tokens: int
    """Tokens passed through the layers forward, without padding: of every epoch in training, and in generation
    prompts, once for all their samples, and sampled tokens."""
    scored: int
    """Tokens of those for which the head computes outputs: sampled ones in generation, else all."""
    squares: int
    """Sum of squared sequence lengths, for attention; samples of one prompt count its own only once."""
    micro_batches: int = 0
    padded_tokens: int = 0
    """`tokens` of training and inference with attention's padding; 0 where it pads nothing."""
    decode_steps: int = 0
    """Decode steps of all decode batches, each of which reads all weights."""
    decode_rows: int = 0
    """Rows of those steps, finished ones included."""
    decoded: int = 0
    """Rows of those steps that were not finished."""
    cached: int = 0
    """Tokens whose keys and values decode steps read, a prompt's once for all its samples."""
    prefill_seconds: float = 0.0


def read_passes(counts: PassCounts) -> WorkDone:
    """Read what a train or inference call has passed through the model."""
    return WorkDone(
        tokens=counts.tokens,
        scored=counts.tokens,
        squares=counts.squares,
        micro_batches=counts.micro_batches,
        padded_tokens=counts.padded_tokens,
    )


def count_generation(
    counts: PassCounts, groups: Sequence[Sequence[int]], prompts: Sequence[int], sequences: Sequence[int]
) -> WorkDone:
    """Count the work of a generate call, given the tokens of prompts and of whole sequences by row.

    `groups` are the rows that are samples of one prompt. The last token of a row's prompt is passed on by a decode
    step, and its own last one is not, so that n tokens take n decode steps.
    """
    answers = [whole - prompt for whole, prompt in zip(sequences, prompts, strict=True)]
    distinct = [prompts[rows[0]] for rows in groups]
    repeated = sum(n * n for n in prompts) - sum(n * n for n in distinct)
    own = sum(answer * (answer - 1) // 2 for answer in answers)
    shared = sum(
        prompt * max(answers[row] for row in rows) for prompt, rows in zip(distinct, groups, strict=True)
    )
    return WorkDone(
        tokens=sum(distinct) + sum(answers),
        scored=sum(answers),
        squares=sum(n * n for n in sequences) - repeated,
        decode_steps=counts.decode_steps,
        decode_rows=counts.decode_rows,
        decoded=sum(answers),
        cached=own + shared,
        prefill_seconds=counts.prefill_seconds,
    )
