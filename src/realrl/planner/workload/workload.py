"""Workload of a step: number of records and distribution of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.families.sizes import count_block_weights, count_layer_weights
from realrl.layout.kv_blocks import BLOCK_TOKENS, count_blocks, count_prompt_blocks
from realrl.program.arrays import Real
from realrl.recipe.experiment import Experiment
from realrl.recipe.forms import FORMS
from realrl.recipe.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Restrictions of the tokens that are drawn."""

    top_k: bool = False
    """Whether the k likeliest tokens are kept."""
    top_p: bool = False
    """Whether the likeliest tokens are kept that together have a probability."""
    minimum: bool = False
    """Whether sequences must not end before some tokens."""

    @classmethod
    def of(cls, generation: GenerationConfig) -> Self:
        """Return the restrictions of a recipe."""
        return cls(
            top_k=generation.top_k > 0,
            top_p=generation.top_p < 1,
            minimum=generation.min_new_tokens > 0,
        )


UNRESTRICTED = Sampling()
"""Every token may be drawn."""


def count_visited_experts(shape: ModelShape, tokens: Real) -> Real:
    """Compute the experts of a layer that at least one of so many tokens passes through, if all are as likely.

    0 for a model without experts.
    """
    mixture = shape.mixture
    if mixture is None:
        return 0.0
    return mixture.experts * (1 - (1 - mixture.per_token / mixture.experts) ** tokens)


def count_read_weights(shape: ModelShape, tokens: Real) -> Real:
    """Count the parameters of a layer's matrices that a pass of so many tokens reads."""
    own = count_layer_weights(shape)
    if shape.mixture is None:
        return own
    others = count_visited_experts(shape, tokens) - shape.mixture.per_token
    return own + others * count_block_weights(shape)


QUANTILES = 64
"""Sample size that represents a length distribution."""
_PROMPTS = FORMS["prompt"].keys
"""Keys whose rows are prompts without answers."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly: pairs prompts with answers as if they were independent."""


@dataclass(frozen=True, kw_only=True)
class CallWork:
    """Sequences and passes of one call in a step."""

    items: int
    """Items in the whole step, over all mini-batches, once: records times samples of each. Ranks share out items,
    not sequences."""
    lengths: tuple[int, ...]
    """Sample of tokens per sequence that is passed through the model at once: whole sequences, or prompts
    where the call generates."""
    answers: tuple[int, ...]
    """Tokens to generate for the same sequences; empty unless the call generates."""
    room: int
    """Most tokens that are generated per sequence."""
    minibatches: int
    """Optimizer steps per pass."""
    passes: int
    """Times that the sequences are gone through."""
    episode: int = 0
    """Most tokens of an answer of which a train call makes experience; 0 for calls that make none."""
    per_item: int = 1
    """Sequences of each item."""
    samples: int = 1
    """Items that are generated from one prompt, whose prefill and part of the KV cache they share."""
    sampling: Sampling = UNRESTRICTED
    """Restrictions of the tokens that are generated."""

    @property
    def sequences(self) -> int:
        """Sequences of the whole step, over all mini-batches, each counted once."""
        return self.items * self.per_item

    @property
    def longest(self) -> int:
        """Tokens of the longest item, as the cache holds it where it is generated: the least that is processed."""
        if not self.answers:
            return self.per_item * max(self.lengths)
        return (
            self.per_item * BLOCK_TOKENS * (count_prompt_blocks(max(self.lengths)) + count_blocks(self.room))
        )

    @property
    def capacity(self) -> int:
        """Most tokens of a mini-batch, as the cache holds them where they are generated."""
        items = -(-self.items // self.minibatches)
        if not self.answers:
            return self.per_item * items * max(self.lengths)
        shared = -(-items // self.samples) * count_prompt_blocks(max(self.lengths))
        return self.per_item * BLOCK_TOKENS * (shared + items * count_blocks(self.room))

    @property
    def mean(self) -> float:
        """Mean of `lengths`."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def mean_square(self) -> float:
        """Mean of the squares of `lengths`, which the cost of attention grows with."""
        return sum(n * n for n in self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> float:
        """Tokens passed through the model at once in a step, over all mini-batches, one pass."""
        return self.sequences * self.mean


@dataclass(frozen=True)
class Workload:
    """Items of a step; lengths are sorted samples, 64 quantiles of their distribution."""

    items: int
    """Items per step: records (`data.batch`), each as often as it is sampled."""
    prompts: tuple[int, ...]
    """Tokens of prompts; of whole training sequences where nothing is generated."""
    answers: tuple[int, ...] = (0,)
    """Tokens of answers; 0 where nothing is generated."""
    max_new_tokens: int = 0
    """Bound of the answers, for which the key/value cache has room."""
    epochs: int = 1
    """Training passes over the items of a step."""
    samples: int = 1
    """Items of each prompt, all samples of it."""
    experience_calls: tuple[str, ...] = ()
    """Train calls that make experience of the answers (`AlgorithmSpec.experience_calls`)."""
    sampling: Sampling = UNRESTRICTED
    """Restrictions of the tokens of answers."""

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        *,
        prompts: Sequence[int] | None = None,
        answers: Sequence[int] | None = None,
    ) -> "Workload":
        """Build the workload of a recipe, with measured lengths if there are any.

        Without them every prompt has `max_prompt_tokens`, every answer `max_new_tokens`, and every training
        sequence `max_tokens`: the most there can be. Longer answers are cut off, as generation does it.
        """
        data, spec = experiment.data, experiment.spec
        epochs = spec.epochs(experiment)
        if spec.generation is None:
            return cls(data.batch, quantiles(prompts or [data.max_tokens]), epochs=epochs)
        generation, samples = spec.generation(experiment), spec.samples_per_prompt(experiment)
        longest = generation.max_new_tokens
        return cls(
            items=data.batch * samples,
            prompts=quantiles(prompts or [data.max_prompt_tokens]),
            answers=quantiles([min(answer, longest) for answer in answers or [longest]]),
            max_new_tokens=longest,
            epochs=epochs,
            samples=samples,
            experience_calls=spec.experience_calls,
            sampling=Sampling.of(generation),
        )

    def work(self, call: Call) -> CallWork:
        """Compute the work of a call; each of its `work` keys is one sequence per item."""
        if call.kind is Kind.GENERATE:
            prompts, answers = zip(*self.pairs, strict=True)
            return CallWork(
                items=self.items,
                lengths=prompts,
                answers=answers,
                room=self.max_new_tokens,
                minibatches=1,
                passes=1,
                per_item=len(call.work),
                samples=self.samples,
                sampling=self.sampling,
            )
        # Inference, training, and functions, which see whole sequences unless their keys are of prompts alone.
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
            episode=max(self.answers) if call.name in self.experience_calls else 0,
            per_item=len(call.work),
        )

    def tokens(self, graph: DataflowGraph) -> float:
        """Compute the mean tokens of a step of a graph, prompts and answers together, each sequence once."""
        mean = sum(self.prompts) / len(self.prompts) + sum(self.answers) / len(self.answers)
        return mean * max(self.work(call).sequences for call in graph.calls)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Sample of (prompt, answer) lengths, as if the two were independent."""
        count = max(len(self.prompts), len(self.answers))
        shuffled = sorted(range(count), key=lambda i: i * _GOLDEN % 1)
        return tuple(
            (self.prompts[i * len(self.prompts) // count], self.answers[j * len(self.answers) // count])
            for i, j in enumerate(shuffled)
        )


def quantiles(lengths: Sequence[int], count: int = QUANTILES) -> tuple[int, ...]:
    """Reduce lengths to a sorted sample of at most `count`: the middles of equal parts of the sorted lengths.

    A single number where all are the same. ValueError for none.
    """
    if not lengths:
        raise ValueError("no lengths to take quantiles of")
    ordered = sorted(lengths)
    if ordered[0] == ordered[-1]:
        return (ordered[0],)
    if len(ordered) <= count:
        return tuple(ordered)
    return tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count))
