"""Prompts with completions that belong to other prompts of the same step, from which KTO estimates a divergence."""

from realrl.data.batch import Ragged


def mismatch_completions(tokens: Ragged, prompt_length: Ragged, longest: int) -> Ragged:
    """Join each prompt with the completion of the item before it; the first one takes that of the last.

    So the mismatched completions of a step are the matched ones in another order (Ethayarajh et al. 2024, section
    4.1), and depend on the step alone, not on how its items are placed. Rows are cut off at `longest` tokens.
    """
    starts = prompt_length.values.tolist()
    prompts = [row[:start] for row, start in zip(tokens.rows(), starts, strict=True)]
    completions = [row[start:] for row, start in zip(tokens.rows(), starts, strict=True)]
    before = [completions[-1], *completions[:-1]] if completions else []
    rows = ([*prompt, *completion][:longest] for prompt, completion in zip(prompts, before, strict=True))
    return Ragged.of(rows, dtype=tokens.values.dtype)
