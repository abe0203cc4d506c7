"""Counts of the work in a call, such as tokens in passes, sampled tokens and padding."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.engine.pass_counts import PassCounts


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """Work of one data-parallel replica in a call, counted by one of its ranks."""

    tokens: int
    """Number of tokens in forward passes, without padding.

    Training counts every epoch. Tokens that several sequences begin with count once if they are computed once.
    Generation counts each prompt once for all its samples, and adds the sampled tokens.
    """
    scored: int
    """Number of tokens for which the head computes outputs: in generation the sampled tokens, otherwise all
    tokens."""
    squares: int
    """Sum of squared sequence lengths, which determines the work of attention. Tokens that are computed once for
    several sequences count once."""
    micro_batches: float = 0
    spared: int = 0
    """Number of tokens that the sequences of train and inference calls have in addition to `tokens`."""
    padded_tokens: int = 0
    """Like `tokens` for training and inference, but including attention's padding; 0 if there is no padding."""
    decode_steps: int = 0
    """Number of decode steps in all decode batches. Each step reads all weights."""
    decode_rows: int = 0
    """Sum of the rows of all decode steps, including finished rows."""
    decoded: int = 0
    """Sum of the unfinished rows of all decode steps."""
    cached: int = 0
    """Number of tokens whose keys and values decode steps read. A prompt counts once for all its samples."""
    prefill_seconds: float = 0.0


def read_passes(counts: PassCounts) -> WorkDone:
    """Return the work of a train or inference call."""
    return WorkDone(
        tokens=counts.tokens,
        scored=counts.tokens,
        squares=counts.squares,
        micro_batches=counts.micro_batches,
        spared=counts.spared,
        padded_tokens=counts.padded_tokens,
    )


def count_generation(
    counts: PassCounts,
    groups: Sequence[Sequence[int]],
    prompts: Sequence[int],
    sequences: Sequence[int],
    known: Sequence[int] | None = None,
) -> WorkDone:
    """Count the work of a generate call.

    `prompts` and `sequences`: number of tokens in the prompt and in the whole sequence of each row. `groups`: the
    rows of each prompt. `known`: number of tokens of each row's answer that earlier parts have sampled, and that
    are prefilled again. None if there are no earlier parts.

    The first decode step of a row processes the last token of the prompt. The
    last token of the row is never processed, so n new tokens take n decode steps.
    """
    known = [0] * len(prompts) if known is None else known
    answers = [whole - prompt - old for whole, prompt, old in zip(sequences, prompts, known, strict=True)]
    distinct = [prompts[rows[0]] for rows in groups]
    repeated = sum(n * n for n in prompts) - sum(n * n for n in distinct)
    own = sum(answer * old + answer * (answer - 1) // 2 for answer, old in zip(answers, known, strict=True))
    shared = sum(
        prompt * max(answers[row] for row in rows) for prompt, rows in zip(distinct, groups, strict=True)
    )
    return WorkDone(
        tokens=sum(distinct) + sum(known) + sum(answers),
        scored=sum(answers),
        squares=sum(n * n for n in sequences) - repeated,
        decode_steps=counts.decode_steps,
        decode_rows=counts.decode_rows,
        decoded=sum(answers),
        cached=own + shared,
        prefill_seconds=counts.prefill_seconds,
    )
