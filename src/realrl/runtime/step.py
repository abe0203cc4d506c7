"""Execution of training steps on one rank: records, seeds and learning rates in, metrics out."""

import zlib

from realrl.algorithms.method import Metrics
from realrl.config.errors import UserError
from realrl.config.user_code import find_source, is_own_module
from realrl.data.dataset import Dataset
from realrl.data.order import Order
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.training.optimizer import compute_learning_rate
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import trained_models
from realrl.runtime.costs import Costs
from realrl.runtime.evaluate import flatten
from realrl.runtime.prepare.compile import Compiled, SampledStep, models
from realrl.runtime.processes.process import Process
from realrl.runtime.rounds import SamplingRounds
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.worker import StepInput, Worker


class TrainingSteps:
    """Runner of the training steps of a run, one after another, on every rank."""

    def __init__(
        self,
        experiment: Experiment,
        compiled: Compiled,
        process: Process,
        worker: Worker,
        costs: Costs,
        records: Dataset,
    ) -> None:
        """`costs` measures every step. UserError if an epoch is less than a batch, or the run less than a step."""
        self._experiment, self._compiled, self._process = experiment, compiled, process
        self._worker, self._costs, self._records = worker, costs, records
        data, training = experiment.data, experiment.training
        self.order = Order(
            len(records),
            data.batch,
            experiment.seed,
            data.shuffle,
            sources=[(source.items, source.weight) for source in records.sources],
        )
        """Order of the records."""
        least = min(1.0, data.batch / self.order.size)
        if training.steps is None and training.epochs < least:
            raise UserError(
                f"training.epochs={training.epochs:g} takes {training.epochs * self.order.size:.3g} of"
                f" {self.order.size} records, which is less than one step (data.batch={data.batch}); set it to at"
                f" least {least:.3g}, or training.steps=1"
            )
        self.count = training.steps or max(1, self.order.steps(training.epochs))
        """Number of steps of the run."""
        self._samples = get_spec(experiment).samples_per_prompt(experiment)
        self.taken = 0
        """Records taken so far, with those whose samples were replaced."""
        self.data = records.identify()
        """What identifies the records and their order."""
        self.scoring = _identify_code(compiled.train.graph) | {
            f"field {name!r} of data.train": checksum for name, checksum in records.identify_further().items()
        }
        """Checksums of what scores on this rank, by name."""

    def run(self, step: int) -> dict[str, float]:
        """Execute a step, counted from 0: its metrics by `call/name`, all of them on the rank that writes."""
        phase, sampled = self._compiled.train, self._compiled.sampled
        if sampled is not None:
            return self._run_in_rounds(step, sampled)
        store = Store(phase.graph, phase.plan, self._samples)
        inputs = self._make_input(step, self._take(self._experiment.data.batch))
        with self._costs.step():
            program = phase.programs_of(step + 1)[self._process.rank]
            metrics = self._worker.run(program, store, inputs, self._costs.timer)
        self._costs.add_lengths(store)
        return flatten(metrics)

    def _run_in_rounds(self, step: int, sampled: SampledStep) -> dict[str, float]:
        phase, timer = self._compiled.train, self._costs.timer
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
                self._experiment.data.batch,
                self._take,
                lambda prompts, before: self._make_input(step, prompts, before),
                timer,
            )
            program = sampled.learning.programs_of(step + 1)[self._process.rank]
            found = self._worker.run(program, chosen.store, self._make_input(step, chosen.prompts), timer)
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
        # Samples of a prompt are consecutive items, so that item // samples is the prompt.
        indices = [i for i in prompts for _ in range(self._samples)]
        rates = {
            role: compute_learning_rate(config.optimizer, step, self.count)
            for role, config in trained_models(models(self._experiment)).items()
        }
        return StepInput(
            records=self._records.batch(indices),
            sampling_seed=SamplingSeed(self._experiment.seed, step, first_sequence),
            rates=rates,
            further=self._records.further_fields(indices),
            origins=self._records.list_origins(indices),
            samples=self._samples,
        )


def _identify_code(graph: DataflowGraph) -> dict[str, int]:
    """Identify the files of the user's functions: a checksum of each, by the name of its call and its path."""
    references = {call.name: call.function for call in graph.functions if call.function is not None}
    files = {
        name: find_source(given)
        for name, given in references.items()
        if not is_own_module(given.partition(":")[0])
    }
    return {
        f"{name}, {file}": zlib.crc32(file.read_bytes()) for name, file in files.items() if file is not None
    }
