"""Sampling in rounds: prompts whose samples all score the same are replaced by others (dynamic sampling)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realrl.algorithms.base.method import Metrics
from realrl.data.batch import Ragged
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan
from realrl.recipe.algorithm import SCORE
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.prepare.compile import SampledStep
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.worker import StepInput, Worker

MakeInput = Callable[[list[int], int], StepInput]
"""Makes the input of a round from its prompts and the number of samples taken in earlier rounds."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """Samples of a step, taken in rounds."""

    store: Store
    """An empty store but for the rows that this rank has put out; see `Store.place`."""
    prompts: list[int]
    """Records of the prompts that the step learns from, in the order of their items."""
    metrics: dict[str, Metrics]
    """Metrics of all samples that were taken, by call."""
    rounds: int
    """Number of rounds."""
    taken: int
    """Number of prompts that were sampled in all rounds."""


@dataclass(frozen=True, eq=False)
class _Round:
    """One round: its rows on this rank, and where those of all ranks are."""

    store: Store
    prompts: list[int]
    holders: dict[str, list[int]]
    """Call -> the data-parallel rank that has an item's outputs, by item."""
    differing: list[bool]
    """Whether the samples of a prompt have different scores, by prompt."""


class SamplingRounds:
    """Runner of the rounds of a step, on every rank."""

    def __init__(
        self,
        process: Process,
        worker: Worker,
        step: SampledStep,
        *,
        graph: DataflowGraph,
        plan: Plan,
        samples: int,
    ) -> None:
        """`graph` and `plan` are those of the whole step; `samples` are taken of each prompt."""
        self._process, self._worker, self._step = process, worker, step
        self._graph, self._plan, self._samples = graph, plan, samples
        dp = max(plan[call.name].strategy.dp for call in step.sampling.graph.calls)
        self._fewest = -(-dp // samples)
        """Prompts of a round in which no data-parallel rank is left without a sample."""

    def run(
        self,
        batch: int,
        take: Callable[[int], list[int]],
        make_input: MakeInput,
        timer: StepTimer | None = None,
    ) -> Sampled:
        """Sample until the answers to `batch` prompts have different scores, or the rounds are over.

        `take` gives the next prompts, and `timer` measures. After the last round the prompts that are still missing
        are the latest of those whose samples score the same.
        """
        rounds: list[_Round] = []
        metrics: dict[str, Metrics] = {}
        differing: list[tuple[int, int]] = []
        equal: list[tuple[int, int]] = []
        while len(differing) < batch and len(rounds) < self._step.rounds:
            prompts = take(batch - len(differing))
            before = sum(len(earlier.prompts) for earlier in rounds) * self._samples
            # Copies that nobody looks at, so that the prompts which a step takes do not depend on the plan.
            padding = prompts[:1] * (self._fewest - len(prompts))
            latest, found = self._sample(prompts, make_input(prompts + padding, before), timer)
            for call, more in found.items():
                metrics.setdefault(call, Metrics()).update(more)
            for i, differs in enumerate(latest.differing):
                (differing if differs else equal).append((len(rounds), i))
            rounds.append(latest)
        missing = max(0, batch - len(differing))
        chosen = sorted(differing + equal[len(equal) - missing :])
        return Sampled(
            store=self._merge(rounds, chosen),
            prompts=[rounds[number].prompts[i] for number, i in chosen],
            metrics=metrics,
            rounds=len(rounds),
            taken=sum(len(one.prompts) for one in rounds),
        )

    def _sample(
        self, prompts: list[int], inputs: StepInput, timer: StepTimer | None
    ) -> tuple[_Round, dict[str, Metrics]]:
        """Run a round, and tell all ranks what came out where."""
        phase, rank = self._step.sampling, self._process.rank
        store = Store(phase.graph, phase.plan, self._samples)
        metrics = self._worker.run(phase.programs[rank], store, inputs, timer)
        items: dict[str, tuple[int, list[int]]] = {}
        scores: dict[int, float] = {}
        for call in phase.graph.calls:
            placement = phase.plan[call.name]
            if rank in placement.output_ranks:
                dp = placement.item_index(rank)
                items[call.name] = dp, store.items(call, dp)
                if SCORE in call.outputs:
                    held = items[call.name][1]
                    scores.update(zip(held, store.rows(SCORE, held).values.tolist(), strict=True))
        holders = {call.name: [0] * store.size for call in phase.graph.calls}
        table = [math.nan] * store.size
        for their_items, their_scores in self._process.gather((items, scores)):
            for name, (dp, held) in their_items.items():
                for item in held:
                    holders[name][item] = dp
            for item, score in their_scores.items():
                table[item] = score
        groups = [table[i * self._samples : (i + 1) * self._samples] for i in range(len(prompts))]
        return _Round(store, prompts, holders, [*map(_differ, groups)]), metrics

    def _merge(self, rounds: Sequence[_Round], chosen: Sequence[tuple[int, int]]) -> Store:
        """Make the store of the step: the samples of the chosen (round, prompt), where they are."""
        merged = Store(self._graph, self._plan, self._samples)
        merged.size = len(chosen) * self._samples
        origins = [(number, i * self._samples + k) for number, i in chosen for k in range(self._samples)]
        for call in self._step.sampling.graph.calls:
            placement = self._plan[call.name]
            places: list[list[int]] = [[] for _ in range(placement.strategy.dp)]
            for item, (number, old) in enumerate(origins):
                places[rounds[number].holders[call.name][old]].append(item)
            merged.place(call, places)
            if self._process.rank not in placement.output_ranks:
                continue
            mine = places[placement.item_index(self._process.rank)]
            for key in call.outputs:
                held = [rounds[origins[i][0]].store.rows(key, [origins[i][1]]).values for i in mine]
                if held:
                    merged.put(key, mine, Ragged.of(held))
        return merged


def _differ(scores: Sequence[float]) -> bool:
    """Tell whether samples have different scores; of those that were skipped, NaN, nothing is known."""
    return len({score for score in scores if not math.isnan(score)}) > 1
