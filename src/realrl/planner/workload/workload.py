"""Workload of a step: the number of items, and the distribution of their lengths."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self, TypeVar

import numpy as np

from realrl.dataflow.call import Call, Kind, can_share_prompts
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.families.sizes import count_block_weights, count_matrix_weights
from realrl.layout.kv_blocks import BLOCK_TOKENS, count_blocks, count_prompt_blocks
from realrl.planner.workload.environment import EnvironmentTimes, EnvironmentWork
from realrl.program.arrays import Real
from realrl.recipe.environment import CALLS_AT_ONCE
from realrl.recipe.experiment import Experiment
from realrl.recipe.forms import FORMS
from realrl.recipe.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Restrictions on the tokens that generation samples."""

    top_k: bool = False
    """Whether only the k likeliest tokens may be sampled (`top_k`)."""
    top_p: bool = False
    """Whether only the likeliest tokens with a given total probability may be sampled (`top_p`)."""
    minimum: bool = False
    """Whether sequences have a minimum length (`min_new_tokens`)."""

    @classmethod
    def of(cls, generation: GenerationConfig) -> Self:
        """Return the restrictions of a recipe."""
        return cls(
            top_k=generation.top_k > 0,
            top_p=generation.top_p < 1,
            minimum=generation.min_new_tokens > 0,
        )


UNRESTRICTED = Sampling()


def count_visited_experts(shape: ModelShape, tokens: Real) -> Real:
    """Compute the mean number of a layer's experts that at least one of `tokens` tokens chooses.

    The model assumes that all experts are equally likely. The result is 0 for a model without experts.
    """
    mixture = shape.mixture
    if mixture is None:
        return 0.0
    return mixture.experts * (1 - (1 - mixture.per_token / mixture.experts) ** tokens)


def compute_imbalance(experts: int, ep: int, spread: float) -> float:
    """Compute the expected load of the busiest of `ep` ranks that divide `experts` experts, divided by the mean.

    The loads of experts are normal and independent, with a standard deviation of `spread` times their mean. The
    expected maximum of n standard normal numbers is about sqrt(2 ln n). The result is 1 for layers without experts.
    """
    if ep == 1 or not experts:
        return 1.0
    return 1 + spread * math.sqrt(2 * math.log(ep) * ep / experts)


def count_read_weights(shape: ModelShape, tokens: Real) -> Real:
    """Count the parameters of the matrices of all layers that a pass over `tokens` tokens reads."""
    own = count_matrix_weights(shape)
    if shape.mixture is None:
        return own
    others = count_visited_experts(shape, tokens) - shape.mixture.per_token
    return own + (shape.layers - len(shape.dense_layers)) * others * count_block_weights(shape)


_Number = TypeVar("_Number", int, float)
QUANTILES = 64
"""Largest size of a sample that represents a length distribution."""
_PLACES = 8
"""Number of prompts that represent a portion."""
_PROMPTS = FORMS["prompt"].keys
"""Keys whose rows hold prompts without answers."""
GOLDEN = 0.6180339887498949
"""The golden ratio minus 1. Its multiples modulo 1 are spread evenly, so an order by them pairs prompts and answers
as if they were independent."""


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that sequences of a train or inference call begin with. A call can compute them once for several
    samples."""

    tokens: float
    """Mean number of tokens of a prompt."""
    squares: float
    """Mean of the squares of these numbers."""


@dataclass(frozen=True, kw_only=True)
class CallWork:
    """Sequences and passes of one call in a step."""

    items: int
    """Items of the whole step over all mini-batches, each counted once: records times samples per record. DP ranks
    divide items among themselves, not sequences."""
    lengths: tuple[int, ...]
    """Sample of sequence lengths in tokens: whole sequences, or prompts if the call generates."""
    answers: tuple[int, ...]
    """Tokens to generate for the same sequences. Empty unless the call generates."""
    longest_answer: int = 0
    """Expected tokens of the longest answer of all sequences, which `answers` may lack. 0 unless the call
    generates."""
    room: int
    """Maximum tokens that are generated per sequence."""
    minibatches: int
    """Optimizer steps per pass."""
    passes: int
    """Number of times that the call processes all sequences."""
    longest_sequence: int = 0
    """Expected tokens of the longest sequence of a step, which `lengths` may lack. 0 if it is unknown, and if the
    call generates."""
    episode: int = 0
    """Longest answer, in tokens, from which a train call computes experience, such as advantages. 0 for all other
    calls."""
    per_item: int = 1
    """Sequences per item."""
    samples: int = 1
    """Items generated from one prompt. They share the prompt's prefill and its part of the KV cache."""
    shared: SharedPrompts | None = None
    """The prompts of samples, if the call can compute a prompt once for all of its samples. Only for train and
    inference calls."""
    sampling: Sampling = UNRESTRICTED
    environment: EnvironmentWork | None = None
    """The environment of a generate call; None if there is none, or if its times are unknown."""

    @property
    def sequences(self) -> int:
        """Sequences of the whole step, over all mini-batches, each counted once."""
        return self.items * self.per_item

    @property
    def longest(self) -> int:
        """Tokens of the longest item, and so of the smallest micro-batch that can hold every item.

        If the call generates, these are tokens of whole cache blocks, with room for the longest answer.
        """
        if not self.answers:
            return self.per_item * max(self.lengths)
        return (
            self.per_item * BLOCK_TOKENS * (count_prompt_blocks(max(self.lengths)) + count_blocks(self.room))
        )

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a prompt with its continuation, if the call generates."""
        return max(self.lengths) + self.room

    @property
    def longest_of_minibatch(self) -> int:
        """Expected tokens of the longest sequence of a mini-batch: that of a step, or less, because fewer sequences
        are rarely as long. It grows with the logarithm of their number, as for an exponential distribution."""
        most, known = self.longest_sequence, max(self.lengths)
        count, all_of_them = (
            n * self.per_item / len(self.lengths) for n in (self.items // self.minibatches, self.items)
        )
        if most <= known or count <= 1:
            return known
        return round(known + (most - known) * math.log(count) / math.log(all_of_them))

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a mini-batch. If the call generates, these are tokens of whole cache
        blocks."""
        items = -(-self.items // self.minibatches)
        if not self.answers:
            return self.per_item * items * max(self.lengths)
        shared = -(-items // self.samples) * count_prompt_blocks(max(self.lengths))
        return self.per_item * BLOCK_TOKENS * (shared + items * count_blocks(self.room))

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def mean_square(self) -> float:
        """Mean of the squares of `lengths`. The cost of attention is proportional to it."""
        return sum(n * n for n in self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> float:
        """Tokens of one pass over all mini-batches of a step. If the call generates, only prompts count."""
        return self.sequences * self.mean


@dataclass(frozen=True)
class Workload:
    """Items of a step. Lengths are sorted samples of their distribution, of at most `QUANTILES` numbers."""

    items: int
    """Items per step: records (`data.batch`) times samples per record."""
    prompts: tuple[int, ...]
    """Lengths of prompts in tokens. If nothing is generated, these are lengths of whole training sequences."""
    answers: tuple[int, ...] = (0,)
    """Lengths of answers in tokens. 0 if nothing is generated."""
    max_new_tokens: int = 0
    """Maximum length of an answer."""
    epochs: int = 1
    """Training passes over the items of a step."""
    samples: int = 1
    """Number of samples of each prompt. Each sample is an item."""
    experience_calls: tuple[str, ...] = ()
    """Train calls that compute experience from the answers (`AlgorithmSpec.experience_calls`)."""
    sampling: Sampling = UNRESTRICTED
    environment: EnvironmentWork | None = None
    """The environment; None if there is none, or if its times are unknown."""
    longest: int = 0
    """Expected length of the longest answer of a step, if `answers` lack answers as rare as that one."""
    shares_prompts: bool = True
    """Whether training and inference compute a prompt once for several samples. Other systems do not."""

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        *,
        prompts: Sequence[int] | None = None,
        answers: Sequence[int] | None = None,
        longest: int = 0,
        environment: EnvironmentTimes | None = None,
    ) -> "Workload":
        """Build the workload of a recipe, with measured lengths of prompts and answers, and with the times of its
        environment, if they are given. `longest`: measured mean over steps of their longest answer, if `answers`
        are only quantiles.

        Without measured lengths, all sequences have the maximum length: `max_prompt_tokens` for prompts,
        `max_new_tokens` for answers, and `max_tokens` for training sequences. Longer answers are cut off, as in
        generation.
        """
        data, spec = experiment.data, experiment.spec
        epochs = spec.epochs(experiment)
        if spec.generation is None:
            return cls(data.batch, quantiles(prompts or [data.max_tokens]), epochs=epochs)
        generation, samples = spec.generation(experiment), spec.samples_per_prompt(experiment)
        most, items = generation.max_new_tokens, data.batch * samples
        measured = [min(answer, most) for answer in answers or [most]]
        return cls(
            items=items,
            prompts=quantiles(prompts or [data.max_prompt_tokens]),
            answers=quantiles(measured),
            longest=min(most, max(longest, expect_longest(measured, items))),
            max_new_tokens=most,
            epochs=epochs,
            samples=samples,
            experience_calls=spec.experience_calls,
            sampling=Sampling.of(generation),
            environment=_environment_work(experiment, environment),
        )

    def portion(self, number: int, portions: int) -> Self:
        """Return the workload of one of several portions of a step, counted from 1.

        Prompts are divided in the order of their longest answers. All portions together have the answers of the
        step, with the same mean.
        """
        prompts = self.items // self.samples
        count = prompts * number // portions - prompts * (number - 1) // portions
        answers = _divide_answers(self.answers, self.samples, portions)[number - 1]
        return replace(self, items=count * self.samples, answers=quantiles(answers), longest=0)

    def work(self, call: Call) -> CallWork:
        """Compute the work of a call. Each key in the call's `work` is one sequence per item."""
        if call.kind is Kind.GENERATE:
            parts = self._list_parts(call)
            prompts, answers = zip(*parts, strict=True)
            # The samples of a prompt share its prefill also in later parts. The model counts it for each of them
            # there, because each of them also has tokens of its own.
            shared = len(self.pairs) / self.samples + len(parts) - len(self.pairs)
            return CallWork(
                items=round(self.items * len(parts) / len(self.pairs)),
                lengths=prompts,
                answers=answers,
                longest_answer=max(*answers, min(self.longest_answer, call.count_part(self.max_new_tokens))),
                room=self.max_new_tokens,  # the cache has room for earlier parts, too
                minibatches=1,
                passes=1,
                per_item=len(call.work),
                samples=self.samples if call.span == 1 else max(1, round(len(parts) / shared)),
                sampling=self.sampling,
                environment=self.environment,
            )
        # All other calls process whole sequences, unless their keys hold only prompts.
        passes = self.epochs if call.kind is Kind.TRAIN else 1
        of_prompts = [key in _PROMPTS for key in call.work]
        kinds = of_prompts[:1] if len(set(of_prompts)) == 1 else of_prompts
        lengths = sorted(
            prompt if is_prompt else prompt + answer for prompt, answer in self.pairs for is_prompt in kinds
        )
        return CallWork(
            items=self.items,
            lengths=tuple(lengths),
            answers=(),
            room=0,
            minibatches=call.minibatches,
            passes=passes,
            longest_sequence=0 if all(of_prompts) or not any(self.answers) else self._longest_sequence,
            episode=self.longest_answer if call.name in self.experience_calls else 0,
            per_item=len(call.work),
            samples=self.samples,
            shared=self._find_shared(call) if not any(of_prompts) else None,
        )

    def _find_shared(self, call: Call) -> SharedPrompts | None:
        """Find the prompts that the sequences of a train or inference call share; None if they share none."""
        sampled = any(self.answers) and self.samples * len(call.work) > 1
        if not self.shares_prompts or not sampled or not can_share_prompts(call.candidates):
            return None
        lengths = [prompt for prompt, _ in self.pairs]
        return SharedPrompts(sum(lengths) / len(lengths), sum(n * n for n in lengths) / len(lengths))

    def _list_parts(self, call: Call) -> Sequence[tuple[int, int]]:
        """List what a generate call samples in a step, for answers of every age. Each pair has the number of tokens
        that are known before, and the number of tokens that are sampled."""
        if call.span == 1:
            return self.pairs
        most = call.count_part(self.max_new_tokens)
        return [
            (prompt + before, min(most, answer - before))
            for before in range(0, call.span * most, most)
            for prompt, answer in self.pairs
            if before < answer
        ]

    def tokens(self, graph: DataflowGraph) -> float:
        """Compute the mean number of tokens of a step of a graph. Prompts and answers count together, and each
        sequence counts once."""
        mean = sum(self.prompts) / len(self.prompts) + sum(self.answers) / len(self.answers)
        return mean * self.items * max(len(call.work) for call in graph.calls)

    @property
    def longest_answer(self) -> int:
        """Expected length of the longest answer of a step."""
        return max(self.longest, *self.answers)

    @property
    def _longest_sequence(self) -> int:
        """Expected length of the longest prompt with its answer."""
        return round(sum(self.prompts) / len(self.prompts)) + self.longest_answer

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Sample of (prompt, answer) lengths, as if the two were independent."""
        count = max(len(self.prompts), len(self.answers))
        shuffled = sorted(range(count), key=lambda i: i * GOLDEN % 1)
        return tuple(
            (self.prompts[i * len(self.prompts) // count], self.answers[j * len(self.answers) // count])
            for i, j in enumerate(shuffled)
        )


@lru_cache
def _divide_answers(answers: tuple[int, ...], samples: int, portions: int) -> list[list[int]]:
    """Represent the answers of each portion by lengths, if prompts with `samples` answers each are divided in the
    order of their longest answers."""
    ordered = sorted(answers)
    below = (np.arange(len(ordered)) + 0.5) / len(ordered)
    found = []
    for number in range(portions):
        lengths: list[float] = []
        for place in np.linspace(number, number + 1, 2 * _PLACES + 1)[1::2] / portions:
            # The longest of n answers is below a length with the n-th power of an answer's probability.
            longest = place ** (1 / samples)
            others = np.linspace(0.0, longest, 2 * samples - 1)[1::2]
            lengths += np.interp([*others.tolist(), longest], below, ordered).tolist()
        found.append(lengths)
    scale = np.mean(ordered) / np.mean(found)
    return [[max(1, round(scale * length)) for length in lengths] for lengths in found]


def _environment_work(experiment: Experiment, times: EnvironmentTimes | None) -> EnvironmentWork | None:
    config = experiment.environment_config
    if config is None or times is None:
        return None
    if times.agents:
        agents = math.inf if config.threads is None else config.workers * config.threads
        return EnvironmentWork(times, math.inf, rows_at_once=agents)
    return EnvironmentWork(times, config.workers * (config.threads or CALLS_AT_ONCE))


def expect_longest(lengths: Iterable[int], count: int) -> int:
    """Compute the expected value of the largest of `count` numbers, each drawn from these at random."""
    ordered = sorted(lengths)
    below = [(i / len(ordered)) ** count for i in range(len(ordered) + 1)]
    return round(sum(n * (high - low) for n, low, high in zip(ordered, below[:-1], below[1:], strict=True)))


def quantiles(lengths: Iterable[_Number]) -> tuple[_Number, ...]:
    """Reduce lengths, or other numbers, to a sorted sample of at most `QUANTILES` numbers: the means of equal parts
    of the sorted numbers. The sample has the mean of all numbers.

    If all numbers are equal, the sample is a single number. Raises ValueError if there are none.
    """
    ordered = sorted(lengths)
    if not ordered:
        raise ValueError("no lengths to take quantiles of")
    if ordered[0] == ordered[-1]:
        return (ordered[0],)
    if len(ordered) <= QUANTILES:
        return tuple(ordered)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    # A number at the border of two parts counts in both, in proportion.
    borders = np.linspace(0, len(ordered), QUANTILES + 1)
    means = np.diff(np.interp(borders, np.arange(len(sums)), sums)) * QUANTILES / len(ordered)
    whole = isinstance(ordered[0], int)
    return tuple(type(ordered[0])(round(mean) if whole else mean) for mean in means.tolist())
