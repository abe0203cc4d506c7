"""Run the training steps on one rank, including steps that sample in rounds (dynamic sampling).

The inputs of a step are records, seeds and learning rates. Its results are metrics.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realrl.algorithms.base.method import Metrics
from realrl.checkpoint.rows import Rows, StoredRows
from realrl.config.errors import UserError
from realrl.config.user_code import find_source, is_own_module
from realrl.data.batch import KEY_DTYPES, Ragged
from realrl.data.dataset import Dataset
from realrl.data.order import Order
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.training.optimizer import compute_learning_rate
from realrl.plan.plan import Plan
from realrl.program.lower import WRITER
from realrl.program.validate import select_batches
from realrl.recipe.algorithm import SCORE
from realrl.recipe.model import trained_models
from realrl.runtime.costs import Costs
from realrl.runtime.evaluation.evaluate import flatten
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.prepare.job import Job, SampledStep
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.worker import (
    BatchUnderWay,
    StepInput,
    StepWatch,
    Worker,
    count_going_on,
    list_output_items,
)


@dataclass(frozen=True, eq=False)
class StepData:
    """Data of a training step on this rank."""

    store: Store
    prompts: list[int]
    """Numbers of the records of the step."""


@dataclass(eq=False, kw_only=True)
class TrainingBatch(BatchUnderWay):
    """A batch of training on this rank."""

    prompts: list[int]
    """Numbers of the records of the batch."""


class TrainingSteps:
    """Runs the training steps one after another, on every rank."""

    def __init__(
        self,
        job: Job,
        process: Process,
        worker: Worker,
        costs: Costs,
        records: Dataset,
    ) -> None:
        """`costs` measures every step.

        Raises UserError if an epoch has fewer records than a batch, or if the run has no step.
        """
        experiment, self._job, self._process = job.experiment, job, process
        self._worker, self._costs, self._records = worker, costs, records
        data, training = experiment.data, experiment.training
        self.order = Order(
            len(records),
            data.batch,
            experiment.seed,
            data.shuffle,
            sources=[(source.items, source.weight) for source in records.sources],
        )
        """Order in which the run takes the records."""
        least = min(1.0, data.batch / self.order.size)
        if training.steps is None and training.epochs < least:
            raise UserError(
                f"training.epochs={training.epochs:g} takes {training.epochs * self.order.size:.3g} of"
                f" {self.order.size} records, which is less than one step (data.batch={data.batch}); set it to at"
                f" least {least:.3g}, or training.steps=1"
            )
        self.count = training.steps or max(1, self.order.steps(training.epochs))
        """Number of steps of the run."""
        self._samples = experiment.spec.samples_per_prompt(experiment)
        self.rate_factor = 1.0
        """Factor of the learning rates of the schedules."""
        self.taken = 0
        """Number of records taken so far, including records whose samples were replaced."""
        self.under_way: dict[int, TrainingBatch] = {}
        """Batches that are sampled but not trained on yet, by the number of their step, counted from 0."""
        self._first = 0
        """Step of the first batch that this start of the run samples."""
        self.latest: StepData | None = None
        """The latest step, which may have failed; None before the first step."""
        self.data = records.identify()
        """Numbers that identify the records and their order."""
        self.scoring = _identify_code(job.train.graph) | {
            f"field {name!r} of data.train": checksum for name, checksum in records.identify_further().items()
        }
        """Checksums of everything that determines scores on this rank, by name."""

    def run(self, step: int, watch: StepWatch | None = None) -> dict[str, float]:
        """Execute a step, which is counted from 0.

        If sampling runs ahead, and no batch is under way, steps that only sample run first. Returns metrics by
        `call/name`. Only the rank that writes has all of them.
        """
        sampled = self._job.sampled
        if sampled is not None:
            return self._run_in_rounds(step, sampled, watch)
        graph = self._job.train.graph
        if step not in self.under_way:
            self._first = step
            for earlier in range(step - graph.ahead, step):
                self._run_batches(earlier)
        with self._costs.step():
            self._run_batches(step, self._costs.timer, watch)
        batch = self.under_way.pop(step)
        self._costs.add_lengths(batch.store)
        return flatten(batch.metrics)

    def _run_batches(self, step: int, timer: StepTimer | None = None, watch: StepWatch | None = None) -> None:
        """Work on all batches of a step. Before the first step of a run, `step` is negative."""
        phase = self._job.train
        # A replay may run a step that is not among those of the recipe any more.
        count = max(self.count, step + 1)
        selected = select_batches(phase.graph, step, first=self._first, count=count)
        if not selected:
            return
        new = step + phase.graph.ahead
        if phase.graph.ahead in selected:
            prompts = self._take(self._job.experiment.data.batch)
            self._begin_batch(new, prompts)
        batches = {ahead: self.under_way[step + ahead] for ahead in selected}
        if 0 in batches:
            trained = batches[0]
            # A callback may have changed the rates since the batch was sampled.
            trained.input = replace(trained.input, rates=self._find_rates(step))
            self.latest = StepData(trained.store, trained.prompts)
        program = phase.programs_of(step + 1, selected)[self._process.rank]
        self._worker.run_batches(program, batches, timer, watch)

    def list_rows(self) -> dict[int, Rows]:
        """List the rows of batches under way that calls of this rank have produced, between two steps."""
        phase, rank, done = self._job.train, self._process.rank, min(self.under_way, default=0)
        found: dict[int, Rows] = {}
        for step, batch in self.under_way.items():
            rows: dict[str, tuple[list[int], Ragged]] = {}
            for call in phase.graph.calls:
                placement = phase.plan[call.name]
                if call.begins_ahead > step - done and rank in placement.output_ranks:
                    items = batch.store.items(call, placement.item_index(rank))
                    rows |= {key: (items, batch.store.rows(key, items)) for key in call.outputs}
            found[step] = rows
        return found

    def describe_batches(self) -> list[dict[str, Any]]:
        """Describe the batches under way by JSON values, without their rows."""
        return [
            {
                "step": step,
                "first": batch.input.first,
                "prompts": batch.prompts,
                "metrics": {call: metrics.to_plain() for call, metrics in batch.metrics.items()},
            }
            for step, batch in sorted(self.under_way.items())
        ]

    def restore_batches(
        self,
        done: int,
        batches: Sequence[Mapping[str, Any]],
        rows: StoredRows,
    ) -> int:
        """Restore the batches under way after `done` steps: what `describe_batches` returned, and the rows of all
        ranks. `taken` has been restored before.

        Batches are dropped if their rows are missing, or if other batches would be under way in this run. Their
        records are then taken again. Returns the number of dropped batches.
        """
        graph = self._job.train.graph
        steps = [batch["step"] for batch in batches]
        produced = {
            step: {key for call in graph.calls if call.begins_ahead > step - done for key in call.outputs}
            for step in steps
        }
        fits = all(rows.get(step, {}).keys() == keys for step, keys in produced.items())
        if not fits or steps != list(range(done, min(done + graph.ahead, self.count))):
            self.taken -= sum(len(batch["prompts"]) for batch in batches)
            return len(batches)
        for batch in batches:
            self._first = batch["first"]
            self._begin_batch(batch["step"], batch["prompts"])
            restored = self.under_way[batch["step"]]
            restored.store.feed(restored.input.records)
            for key, values in rows[batch["step"]].items():
                items = sorted(values)
                dtype = KEY_DTYPES[graph.keys[key].dtype]
                restored.store.put(key, items, Ragged.of([values[item] for item in items], dtype=dtype))
                if graph.keys[key].length == "own":
                    restored.store.lengths[key] = tuple(len(values[item]) for item in items)
            self._restore_progress(restored, batch["step"] - done)
            if self._process.rank == WRITER:
                restored.metrics = {
                    call: Metrics.from_plain(plain) for call, plain in batch["metrics"].items()
                }
        return 0

    def _restore_progress(self, batch: TrainingBatch, ahead: int) -> None:
        """Restore how far the calls of this rank are with a batch that is trained on `ahead` steps later."""
        experiment, rank = self._job.experiment, self._process.rank
        for call in self._job.train.graph.calls:
            if call.begins_ahead <= ahead:
                continue
            going_on = 0
            if call.span > 1 and experiment.spec.generation is not None:
                tokens = experiment.spec.generation(experiment).max_new_tokens
                items = list_output_items(batch.store, call, rank)
                going_on = count_going_on(batch.store, call, items, tokens)
            parts = min(call.begins_ahead - ahead, call.span)
            batch.count_call(call, rank, parts=parts, going_on=going_on)

    def drop_batches(self) -> None:
        """Drop all batches under way. The next step samples new ones first."""
        self.under_way.clear()
        self._process.activity.batches = []

    def _begin_batch(self, step: int, prompts: list[int]) -> None:
        """Begin the batch that is trained on in `step`. `prompts`: numbers of its records."""
        phase = self._job.train
        store = Store(phase.graph, phase.plan, phase.attention_costs, self._samples)
        self.under_way[step] = TrainingBatch(store, self._make_input(step, prompts), prompts=prompts)

    def _run_in_rounds(self, step: int, sampled: SampledStep, watch: StepWatch | None) -> dict[str, float]:
        phase, timer = self._job.train, self._costs.timer
        rounds = SamplingRounds(
            self._process,
            self._worker,
            sampled,
            graph=phase.graph,
            plan=phase.plan,
            samples=self._samples,
        )
        with self._costs.step():
            chosen = rounds.run(
                self._job.experiment.data.batch,
                self._take,
                lambda prompts, before: self._make_input(step, prompts, before),
                timer,
                watch,
            )
            self.latest = StepData(chosen.store, chosen.prompts)
            if watch is not None:
                for call in sampled.sampling.graph.order:
                    if self._process.rank in phase.plan[call.name].output_ranks:
                        watch.end_call(call, chosen.store)
            program = sampled.learning.programs_of(step + 1)[self._process.rank]
            inputs = self._make_input(step, chosen.prompts)
            found = self._worker.run(program, chosen.store, inputs, timer, watch)
        self._costs.add_lengths(chosen.store)
        metrics: dict[str, Metrics] = chosen.metrics | found
        source = next(call.name for call in sampled.sampling.graph.order if call.kind is Kind.GENERATE)
        counts = {f"{source}/rounds": float(chosen.rounds), f"{source}/prompts": float(chosen.taken)}
        return counts | flatten(metrics)

    def _take(self, count: int) -> list[int]:
        """Take the next records in the order of the run."""
        first = self.taken
        self.taken += count
        return self.order.take(first, count)

    def _make_input(self, step: int, prompts: list[int], first_sequence: int = 0) -> StepInput:
        # The samples of a prompt are consecutive items: prompt = item // samples.
        indices = [i for i in prompts for _ in range(self._samples)]
        return StepInput(
            records=self._records.batch(indices),
            sampling_seed=SamplingSeed(self._job.experiment.seed, step, first_sequence),
            rates=self._find_rates(step),
            further=self._records.further_fields(indices),
            origins=self._records.list_origins(indices),
            samples=self._samples,
            first=self._first,
        )

    def _find_rates(self, step: int) -> dict[str, float]:
        """Find the learning rate of each trained role in a step."""
        return {
            role: self.rate_factor * compute_learning_rate(config.optimizer, step, self.count)
            for role, config in trained_models(self._job.experiment.model_configs).items()
        }


def _identify_code(graph: DataflowGraph) -> dict[str, int]:
    """Compute a checksum of each file with a user's function. Keys are `call, path`."""
    references = {call.name: call.function for call in graph.functions if call.function is not None}
    files = {
        name: find_source(given)
        for name, given in references.items()
        if not is_own_module(given.partition(":")[0])
    }
    return {
        f"{name}, {file}": zlib.crc32(file.read_bytes()) for name, file in files.items() if file is not None
    }


MakeInput = Callable[[list[int], int], StepInput]
"""Function that creates the input of a round from its prompts and the number of samples in earlier rounds."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """The samples of a step, which were taken in rounds."""

    store: Store
    """A store with only the rows that this rank has produced; see `Store.place`."""
    prompts: list[int]
    """Numbers of the records whose prompts are in the step, in the order of their items."""
    metrics: dict[str, Metrics]
    """Metrics of all samples, by call."""
    rounds: int
    """Number of rounds."""
    taken: int
    """Number of prompts that were sampled in all rounds together."""


@dataclass(frozen=True, eq=False)
class _Round:
    """One round: the rows of this rank, and which ranks hold all other rows."""

    store: Store
    prompts: list[int]
    holders: dict[str, list[int]]
    """For each call and item: the data-parallel rank that holds the item's outputs."""
    differing: list[bool]
    """For each prompt: whether its samples have different scores."""


class SamplingRounds:
    """Runs the rounds of a step, on every rank.

    Prompts whose samples all have the same score are replaced by other prompts (dynamic sampling).
    """

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
        """`graph` and `plan` are those of the whole step. Each prompt gets `samples` samples."""
        self._process, self._worker, self._step = process, worker, step
        self._graph, self._plan, self._samples = graph, plan, samples
        dp = max(plan[call.name].strategy.dp for call in step.sampling.graph.calls)
        self._fewest = -(-dp // samples)
        """Minimum number of prompts in a round, so that every data-parallel rank gets a sample."""

    def run(
        self,
        batch: int,
        take: Callable[[int], list[int]],
        make_input: MakeInput,
        timer: StepTimer | None = None,
        watch: StepWatch | None = None,
    ) -> Sampled:
        """Sample until `batch` prompts have answers with different scores, or until the last round.

        `take` returns the next prompts. `timer` measures the rounds, and `watch` sees their models. After the last
        round, the latest prompts whose samples have equal scores fill the batch.
        """
        rounds: list[_Round] = []
        metrics: dict[str, Metrics] = {}
        differing: list[tuple[int, int]] = []
        equal: list[tuple[int, int]] = []
        while len(differing) < batch and len(rounds) < self._step.rounds:
            prompts = take(batch - len(differing))
            before = sum(len(earlier.prompts) for earlier in rounds) * self._samples
            # Fill the round with copies of one prompt, whose samples are discarded. With other prompts instead, the
            # prompts of a step would depend on the plan.
            padding = prompts[:1] * (self._fewest - len(prompts))
            latest, found = self._sample(prompts, make_input(prompts + padding, before), timer, watch)
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
        self, prompts: list[int], inputs: StepInput, timer: StepTimer | None, watch: StepWatch | None
    ) -> tuple[_Round, dict[str, Metrics]]:
        """Run a round, and inform all ranks which rank holds which rows."""
        phase, rank = self._step.sampling, self._process.rank
        store = Store(phase.graph, phase.plan, phase.attention_costs, self._samples)
        metrics = self._worker.run(phase.programs[rank], store, inputs, timer, watch)
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
        """Create the store of the step from the samples of the chosen (round, prompt) pairs.

        Rows stay on their ranks.
        """
        merged = Store(self._graph, self._plan, self._step.learning.attention_costs, self._samples)
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
    """Return whether samples have different scores. A skipped sample (NaN) is ignored."""
    return len({score for score in scores if not math.isnan(score)}) > 1
