"""Run a recorded step again, on any devices and under any plan, and compare it with its record."""

import pdb
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from realrl.algorithms.base.method import (
    Algorithm,
    FunctionInput,
    FunctionMethod,
    InferenceMethod,
    Method,
    Metrics,
    ModelOutput,
    TrainMethod,
)
from realrl.checkpoint.saved import checkpoint_path, list_checkpoints, list_records
from realrl.config.errors import UserError
from realrl.config.user_code import UserFunction, find_definition
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.engine.optional_kernels import use_kernels
from realrl.plan.presets import SEARCH
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.output.earlier import EarlierRun
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.job import Job, make_job
from realrl.runtime.processes.process import Process, connect, resolve_cluster
from realrl.runtime.processes.startup import find_least_device
from realrl.runtime.records.step_record import StepRecord, read_record
from realrl.runtime.replay.compare import CallComparison, Comparer, StepComparer
from realrl.runtime.training_run import TrainingRun


@dataclass(frozen=True)
class Stop:
    """Where the debugger opens: one item of one call."""

    call: str
    item: int


@dataclass(frozen=True, eq=False)
class Replayed:
    """A step that was run again."""

    record: StepRecord
    plan: str
    calls: list[CallComparison]
    tolerance: float

    @property
    def first(self) -> CallComparison | None:
        """The first call that differs from the record."""
        return next((call for call in self.calls if call.problems), None)


def replay_step(
    experiment: Experiment,
    step: int,
    say: Callable[[str], None],
    *,
    tolerance: float | None = None,
    stop: Stop | None = None,
) -> Replayed | None:
    """Run a recorded step of the run in `experiment.run_dir` again, as one rank of the recipe's cluster.

    Steps between the checkpoint and this step run first. `tolerance`: largest relative deviation of numbers. The
    default is 1e-5 if all models compute in float32, and 0.02 for other models. `stop` opens a debugger,
    in a single process. `say` is called with notes. Returns None on ranks that do not write.

    Raises UserError if the step was not recorded, or if its checkpoint does not exist.
    """
    assert experiment.plan != SEARCH, "a replay has a plan"
    if experiment.asynchrony.active:
        raise UserError(
            f"run_dir={experiment.run_dir}: steps of asynchronous runs cannot be replayed, because their calls"
            " overlap with sampling (asynchrony)"
        )
    record = read_record(Path(experiment.run_dir), step)
    cluster = resolve_cluster(experiment.cluster, experiment.device)
    make_job(experiment, cluster)
    with ExitStack() as until_the_end, connect(experiment.device, experiment.launch) as process:
        here = find_least_device(process)
        check_kind(experiment, cluster, here)
        with process.together():
            until_the_end.enter_context(use_kernels(experiment.kernels, process.device))
            job = make_job(experiment, cluster, download=True)
            if stop is not None:
                check_stop(stop, job)
            run = ReplayedRun(job, process, record, tolerance, stop)
        with process.together():
            run.load()
        run.restore()
        if process.rank == WRITER:
            for note in run.continuation.notes:
                say(note)
        return run.replay(say)


def check_checkpoint(run_dir: Path, record: StepRecord) -> None:
    """Check that the checkpoint of a record exists. Raises UserError if not."""
    step = record.header.checkpoint
    if step and step not in list_checkpoints(run_dir):
        raise UserError(
            f"step {record.header.step} is replayed from {checkpoint_path(run_dir, step)}, which does not exist"
        )


def check_stop(stop: Stop, job: Job) -> None:
    """Check the call and the item that the debugger opens with. Raises UserError if it cannot."""
    calls = {call.name: call for call in job.train.graph.calls}
    if stop.call not in calls:
        raise UserError(f"--call {stop.call}: the calls of a step are {', '.join(calls)}")
    if calls[stop.call].kind is Kind.GENERATE:
        names = [name for name, call in calls.items() if call.kind is not Kind.GENERATE]
        raise UserError(
            f"--call {stop.call}: generation calls no method of the algorithm; choose {' or '.join(names)}"
        )
    if job.plan.cluster.size > 1:
        raise UserError("--call opens a debugger, which needs a cluster of one device")


class ReplayedRun(TrainingRun):
    """A run that goes from a checkpoint to a recorded step, and writes nothing."""

    def __init__(
        self,
        job: Job,
        process: Process,
        record: StepRecord,
        tolerance: float | None,
        stop: Stop | None,
    ) -> None:
        """Prepare everything except weights. Raises UserError like TrainingRun."""
        header = record.header
        run_dir = Path(job.experiment.run_dir)
        check_checkpoint(run_dir, record)
        super().__init__(job, process, None, EarlierRun((header.checkpoint,) if header.checkpoint else ()))
        self._recorded, self._debugged = record, stop
        exact = all(config.compute_dtype == "float32" for config in job.models.configs.values())
        self._tolerance = tolerance if tolerance is not None else 1e-5 if exact else 0.02
        between = range(header.checkpoint + 1, header.step)
        recorded = {step: of for step, of in list_records(run_dir).items() if step in between}
        self._earlier = {
            step: read_record(run_dir, step)
            for step, of in recorded.items()
            if of.checkpoint <= header.checkpoint or of.checkpoint in between
        }
        """Records of steps between the checkpoint and the step."""

    def replay(self, say: Callable[[str], None]) -> Replayed | None:
        """Run all steps up to the recorded one. Returns the comparison on the rank that writes."""
        record, training = self._recorded, self.training
        header, graph = record.header, self.job.train.graph
        training.taken = header.taken
        self.worker.start(self.job.start[self.process.rank])
        for step, factor in enumerate(header.rate_factors[:-1], header.checkpoint):
            training.rate_factor = factor
            self.trace.begin_step()
            known = self._earlier.get(step + 1)
            training.run(step, None if known is None else Comparer(known, graph, self._tolerance))
            if self.process.rank == WRITER:
                say(f"step {step + 1} of {header.step} {'from its record' if known else 'sampled again'}")
        training.rate_factor = header.rate_factors[-1]
        comparer = Comparer(record, graph, self._tolerance)
        if self._debugged is not None:
            self.worker.use(cast(Algorithm, DebuggedAlgorithm(self.algorithm, self.job, self._debugged)))
        self.trace.begin_step()
        metrics = training.run(header.step - 1, comparer)
        findings = self.process.gather(comparer.findings)
        if self.process.rank != WRITER:
            return None
        latest = training.latest
        assert latest is not None, "the step has run"
        samples = latest.store.samples
        origins = self.records.list_origins([i for i in latest.prompts for _ in range(samples)])
        step_comparer = StepComparer(record, graph, self._tolerance, latest.prompts, origins)
        calls = step_comparer.compare(findings, metrics, latest.store)
        return Replayed(record, self.job.plan.describe(), calls, self._tolerance)


class DebuggedAlgorithm:
    """An algorithm with a debugger in the method of one call."""

    def __init__(self, algorithm: Algorithm, job: Job, stop: Stop) -> None:
        self._algorithm, self._stop = algorithm, stop
        self._call = job.train.graph.call(stop.call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def method(self, call: str) -> Method:
        method = self._algorithm.method(call)
        if call != self._stop.call:
            return method
        kinds = {
            Kind.FUNCTION: _DebuggedFunction,
            Kind.TRAIN: _DebuggedTrain,
            Kind.INFERENCE: _DebuggedInference,
        }
        return cast(Method, kinds[self._call.kind](method, self._call, self._stop.item))


class _Debugged:
    """A method whose calls about one item run in the debugger."""

    def __init__(self, method: Any, call: Call, item: int) -> None:
        self._method, self._call, self._item = method, call, item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


class _DebuggedTrain(_Debugged):
    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        method = cast(TrainMethod, self._method)
        if self._item not in batch.ids:
            return method.loss(batch, output)
        return cast(tuple[Tensor, Metrics], pdb.runcall(method.loss, batch, output))


class _DebuggedInference(_Debugged):
    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        method = cast(InferenceMethod, self._method)
        if self._item not in batch.ids:
            return method.outputs(batch, output)
        return cast(dict[str, Ragged], pdb.runcall(method.outputs, batch, output))


class _DebuggedFunction(_Debugged):
    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """Call the function with the item alone in the debugger, then with all items."""
        method = cast(FunctionMethod, self._method)
        if self._item in inputs.batch.ids:
            place = inputs.batch.ids.index(self._item)
            alone = replace(
                inputs,
                batch=inputs.batch.select([place]),
                fields={name: [values[place]] for name, values in inputs.fields.items()},
                origins=[inputs.origins[place]] if inputs.origins else [],
            )
            assert self._call.function is not None, "a function has a reference"
            definition = find_function_definition(self._call.function)
            if definition is None:
                pdb.runcall(method.call, alone)
            else:
                debugger = pdb.Pdb()
                file, line, name = definition
                debugger.set_break(str(file), line, funcname=name)
                # Continue from the first line of our own code to the user's function.
                debugger.rcLines.append("continue")
                debugger.runcall(method.call, alone)
        return method.call(inputs)


def find_function_definition(reference: str) -> tuple[Path, int, str] | None:
    """Find the file, the line and the name of a user's function; None for a verifier or a service."""
    if ":" not in reference:
        return None
    try:
        function = UserFunction("--call", reference, awaits=True).function
    except UserError:
        return None
    called = function if hasattr(function, "__code__") else type(function).__call__
    definition = find_definition(called)
    return None if definition is None else (*definition, called.__name__)


def without_time_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a recipe without the time limits of functions, because a person in a debugger takes longer."""
    found = {
        name: without_time_limits(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }
    if found.get("function") is not None and "timeout" in found:
        found["timeout"] = None
    return found
