"""Choose the sizes to measure: a grid around the sizes of a run. Does not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from realrl.layout.kv_blocks import CPU_PREFILL_TOKENS, MAX_DECODE_ROWS
from realrl.recipe.experiment import Experiment

LEAST_TOKENS = 64
"""Number of tokens in the smallest micro-batch. Smaller ones take nearly the same time."""
LEAST_LENGTH = 32
STEP = 4
"""Ratio of consecutive sizes. Times of sizes between them are interpolated linearly."""


@dataclass(frozen=True)
class Sizes:
    """The largest sizes in a run, in tokens. `prompt` and `answer` are 0 without generation."""

    micro_batch: int
    length: int
    prompt: int
    answer: int
    rows: int
    """Maximum number of sequences that are generated at once."""
    thin: bool = False
    """Whether to measure only the largest and a few smaller sizes."""

    @classmethod
    def of(cls, experiment: Experiment, *, thin: bool = False) -> "Sizes":
        """Find the sizes of a recipe."""
        data, spec = experiment.data, experiment.spec
        per_item = max(len(call.work) for call in experiment.graph.calls)
        items = data.batch * spec.samples_per_prompt(experiment)
        most = min(experiment.micro_batch_tokens, per_item * items * data.max_tokens)
        most = max(per_item * data.max_tokens, most)
        if spec.generation is None:
            return cls(most, data.max_tokens, 0, 0, 0, thin)
        answer = spec.generation(experiment).max_new_tokens
        rows = min(items, max(1, most // (answer + 1)), MAX_DECODE_ROWS)
        return cls(most, data.max_prompt_tokens + answer, data.max_prompt_tokens, answer, rows, thin)

    @classmethod
    def usual(cls, *, thin: bool = False) -> "Sizes":
        """Return usual sizes, for measurements without a recipe."""
        return cls(8192, 1024, 512, 512, 64, thin)

    def passes(self) -> Iterator[tuple[int, int]]:
        """Yield sizes of training and inference: (tokens of a micro-batch, tokens of each sequence)."""
        for length in self._lengths(LEAST_LENGTH, self.length):
            yield from self._batches(length, self.micro_batch)

    def few_passes(self) -> Iterator[tuple[int, int]]:
        """Yield those sizes of `passes` that have the shortest sequences."""
        yield from self._batches(self._lengths(LEAST_LENGTH, self.length)[0], self.micro_batch)

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield sizes of prefill: (tokens of a batch, tokens of each prompt)."""
        if self.prompt:
            most = max(self.prompt, min(self.micro_batch, self.rows * self.prompt, CPU_PREFILL_TOKENS))
            for length in self._lengths(LEAST_LENGTH // 2, self.prompt):
                yield from self._batches(length, most)

    def turns(self) -> Iterator[tuple[int, int]]:
        """Yield sizes of decode steps: (sequences, cached tokens of each)."""
        contexts = self._lengths(LEAST_LENGTH, self.prompt + self.answer) if self.answer else []
        for context in contexts:
            for rows in self._spread(1, self.rows, 8 if self.thin else 2):
                if rows == 1 or rows * context <= 2 * self.micro_batch:
                    yield rows, context

    def preparations(self) -> Iterator[tuple[int, int]]:
        """Yield sizes of the preparation in train calls: (sequences, tokens of each answer)."""
        for answer in self._lengths(8, self.answer) if self.answer else []:
            for rows in self._spread(1, self.rows):
                yield rows, answer

    def layers(self, most: int) -> list[int]:
        """List the numbers of layers in measured optimizer updates."""
        return self._spread(1, most)

    def _batches(self, length: int, most: int) -> Iterator[tuple[int, int]]:
        found = {tokens // length * length for tokens in self._spread(max(LEAST_TOKENS, length), most)}
        yield from ((tokens, length) for tokens in sorted(found - {0}))

    def _lengths(self, low: int, high: int) -> list[int]:
        """List the lengths of sequences. A thin grid has only two, because times grow linearly with length."""
        found = self._spread(low, high)
        return sorted({found[0], found[-1]}) if self.thin else found

    def _spread(self, low: int, high: int, step: int = STEP) -> list[int]:
        """List sizes from min(low, high) to high, with the ratio `step`."""
        found = {min(low, high), high}
        while high > low:
            found.add(high)
            high = ceil(high / step)
        ordered = sorted(found)
        return sorted({ordered[0], ordered[-1], ordered[-2]}) if self.thin and len(ordered) > 2 else ordered


SMALLEST_BYTES, LARGEST_BYTES = 64, 1 << 26
MAPPED_BYTES = 1 << 25
"""Size from which each allocation maps new memory, because of the malloc settings in `steady_memory`."""


def transfer_sizes(*, thin: bool = False) -> list[int]:
    """List the sizes of collectives and messages in bytes."""
    step, largest = (64, LARGEST_BYTES // 4) if thin else (8, LARGEST_BYTES)
    found = [largest]
    while found[-1] > SMALLEST_BYTES:
        found.append(max(SMALLEST_BYTES, found[-1] // step))
    # Also list sizes of the buckets in which gradients are sent. Half of the second size, which is the part of one
    # of two ranks, is less than MAPPED_BYTES.
    return sorted({*found, *(() if thin else (LARGEST_BYTES // 2, LARGEST_BYTES - (LARGEST_BYTES >> 4)))})


def copy_sizes(*, thin: bool = False) -> list[int]:
    """List the sizes of copies in bytes."""
    around = MAPPED_BYTES >> 5
    return sorted({*transfer_sizes(thin=thin), MAPPED_BYTES - around, MAPPED_BYTES + around})
