"""Continue a run later or elsewhere: collect its state, resume from a checkpoint, and go back after a spike."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from realrl.algorithms.base.method import Algorithm, FunctionMethod, StatefulMethod
from realrl.checkpoint.contents import CheckpointContents, State
from realrl.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from realrl.checkpoint.rows import collect_rows, make_room
from realrl.checkpoint.saved import Restored, RunState, list_checkpoints
from realrl.checkpoint.storage import check_tensors, read_state
from realrl.config.errors import RunError, UserError
from realrl.config.explain import nearest
from realrl.dataflow.call import Kind
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.recipe.training import SpikeConfig
from realrl.runtime.checkpoint_writer import Checkpointer
from realrl.runtime.evaluation.training import BestEvaluation
from realrl.runtime.observer import Wishes
from realrl.runtime.output.earlier import EarlierRun
from realrl.runtime.output.notes import StepNotes
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.job import Phase
from realrl.runtime.processes.environment import restart_count
from realrl.runtime.processes.process import Process
from realrl.runtime.processes.signals import stop_requested
from realrl.runtime.recorder import Recorder
from realrl.runtime.step import TrainingSteps
from realrl.runtime.worker.roles import Roles

_LEAST_DISTANCE = 1e-3
"""Minimum of the median distance from the median, as a share of the median. Without it, small changes of a nearly
constant metric would be spikes."""


@dataclass(frozen=True)
class Spike:
    """A value far above the usual values of a metric, after a step counted from 1."""

    step: int
    metric: str
    value: float
    usual: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} is {self.value:g}, usually {self.usual:g}"


class SpikeDetector:
    """Detects spikes in a metric of training steps. It sees the steps in order, on one rank."""

    def __init__(self, settings: SpikeConfig) -> None:
        self._settings = settings
        self._values: deque[float] = deque(maxlen=settings.window)

    def look(self, step: int, metrics: Mapping[str, float]) -> Spike | None:
        """Return a spike in the metrics of a step, if there is one. Raises UserError if the metric is missing.

        NaN is also a spike. No value is a spike before the detector has seen half a window of values. Spikes do not
        count as usual values.
        """
        name = self._settings.metric
        if name not in metrics:
            hint = nearest(name, metrics)
            known = f"did you mean {hint}?" if hint else f"there are {', '.join(metrics)}"
            raise UserError(f"training.spike.metric={name}: training steps have no such metric; {known}")
        value = metrics[name]
        usual = median(self._values) if self._values else value
        if 2 * len(self._values) >= self._settings.window:
            distance = median(abs(other - usual) for other in self._values)
            distance = max(distance, _LEAST_DISTANCE * abs(usual))
            # Negated, so that NaN also counts as a spike.
            if not value - usual <= self._settings.factor * distance:
                return Spike(step, name, value, usual)
        if value == value:
            self._values.append(value)
        return None


class StepAgreement:
    """Exchanges numbers between ranks without waiting. All ranks learn their maxima one step later."""

    def __init__(self, process: Process, ask: Callable[[], tuple[float, ...]]) -> None:
        """`ask` returns the numbers of this rank, always equally many. Flags are 0 and 1."""
        self._process, self._ask = process, ask
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def learn(self) -> tuple[float, ...]:
        """Return the maximum of each number over all ranks at the last `say`; minus infinity before.

        A single rank returns its current numbers.
        """
        if self._process.control is None:
            return self._ask()
        if self._under_way is None:
            return tuple(-math.inf for _ in self._ask())
        work, numbers = self._under_way
        work.wait()
        self._under_way = None
        return tuple(numbers.tolist())

    def say(self) -> None:
        """Send this rank's numbers to the other ranks. Call this after acting on what `learn` returned."""
        if self._process.control is not None:
            numbers = torch.tensor(self._ask(), dtype=torch.float64)
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._process.control, async_op=True)
            self._under_way = work, numbers


def restore(
    paths: Sequence[Path], contents: CheckpointContents, process: Process, group: dist.ProcessGroup | None
) -> Restored:
    """Load the first checkpoint that all ranks can read; `paths` has the latest one first.

    Raises UserError on all ranks if none can be read.
    """
    problems: list[str] = []
    for path in paths:
        problem, manifest, state = None, None, None
        rows: State = {}
        tensors = contents.list_loaded()
        try:
            manifest, state = _open(path)
            check_tensors(path, manifest, tensors)
            rows = make_room(manifest)
        except CheckpointError as error:
            problem = str(error)
        problem = _find_first(problem, process)
        if problem is None:
            assert manifest is not None and state is not None, "all ranks have opened it"
            try:
                read_state(path, manifest, {**tensors, **rows}, group=group)
            except CheckpointError as error:
                problem = str(error)
            problem = _find_first(problem, process)
        if problem is None:
            assert state is not None, "all ranks have opened it"
            contents.spread()
            return Restored(path, state, tuple(problems), collect_rows(rows))
        problems.append(problem)
    raise UserError(
        f"no checkpoint of this run can be read: {'; '.join(problems)}; overwrite=true starts from the beginning"
    )


def _open(path: Path) -> tuple[Manifest, RunState]:
    manifest = read_manifest(path)
    try:
        return manifest, RunState.from_json(manifest.state)
    except TypeError:
        raise CheckpointError(f"{path} was written by another version: its state has other fields") from None


def _find_first(problem: str | None, process: Process) -> str | None:
    """Return the problem of the first rank that has one, on all ranks."""
    return next((found for found in process.gather(problem) if found is not None), None)


def gather_algorithm_state(process: Process, phase: Phase, algorithm: Algorithm) -> dict[str, Any]:
    """Gather the algorithm's state from the first rank of the first train call, on all ranks."""
    first = next(call for call in phase.graph.order if call.kind is Kind.TRAIN)
    states: list[dict[str, Any]] = process.gather(algorithm.state_dict())
    return states[phase.plan[first.name].ranks[0]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StatefulParts:
    """The parts of a run on this rank that have state other than tensors."""

    process: Process
    phase: Phase
    """The training step, with its plan and programs."""
    roles: Roles
    training: TrainingSteps
    directory: RunDirectory
    notes: StepNotes
    best: BestEvaluation
    functions: Mapping[str, FunctionMethod]
    """The functions that this rank calls, by the names of their calls."""
    algorithm: Callable[[], Algorithm]
    """Function that returns the current algorithm object."""

    def gather_scoring(self) -> dict[str, int]:
        """Gather, from all ranks, the checksums of everything that determines scores.

        One rank is not enough, because each rank keeps only the fields that it needs.
        """
        return dict(item for part in self.process.gather(self.training.scoring) for item in part.items())

    def _list_functions(self) -> dict[str, StatefulMethod]:
        return {
            call: method
            for call, method in self.functions.items()
            if call in self.phase.plan.placements and isinstance(method, StatefulMethod)
        }

    def collect(self, step: int, *, seconds: float, evaluated: int | None, rollbacks: int) -> RunState:
        """Collect the state of all ranks after `step` steps. The other arguments are fields of `RunState`."""
        trainers: dict[str, dict[str, Any]] = {}
        functions: dict[str, list[Any]] = {}
        of_rank = (
            {role: trainer.state_dict() for role, trainer in self.roles.trainers.items()},
            {call: method.state_dict() for call, method in self._list_functions().items()},
        )
        for rank, (of_trainers, of_functions) in enumerate(self.process.gather(of_rank)):
            for role, state in of_trainers.items():
                # A rank with no parameters to train counts no steps.
                if role not in trainers or state["steps"] > trainers[role]["steps"]:
                    trainers[role] = state
            for call, state in of_functions.items():
                if state is not None and rank in self.phase.plan[call].output_ranks:
                    functions.setdefault(call, []).append(state)
        return RunState(
            step=step,
            taken=self.training.taken,
            seconds=seconds,
            metrics_bytes=self.directory.metrics_bytes,
            evaluated=evaluated,
            data=self.training.data,
            scoring=self.gather_scoring(),
            algorithm=gather_algorithm_state(self.process, self.phase, self.algorithm()),
            trainers=trainers,
            functions=functions,
            best=None if self.best.settings is None else self.best.to_json(),
            rollbacks=rollbacks,
            notes=self.notes.state_dict(),
            rate_factor=self.training.rate_factor,
            under_way=self.training.describe_batches(),
        )

    def load_state(self, state: RunState) -> None:
        """Load the state of every part."""
        self.algorithm().load_state_dict(dict(state.algorithm))
        for role, trainer in self.roles.trainers.items():
            trainer.load_state_dict(state.trainers[role])
        for call, method in self._list_functions().items():
            saved = state.functions.get(call, [])
            if saved:
                ranks = self.phase.plan[call].output_ranks
                # If the number of ranks has changed, all of them start from the first rank's state.
                mine = ranks.index(self.process.rank) if len(saved) == len(ranks) else 0
                method.load_state_dict(json.loads(json.dumps(saved[mine])))
        self.training.taken, self.training.rate_factor = state.taken, state.rate_factor
        self.notes.load_state_dict(state.notes)
        self.best.restore(state.best or {})


class Continuation:
    """Saves the checkpoints of a run, resumes from one, and goes back to one after a spike. One object per rank."""

    def __init__(
        self,
        experiment: Experiment,
        parts: StatefulParts,
        contents: CheckpointContents,
        checkpointer: Checkpointer,
        wishes: Wishes,
        recorder: Recorder,
    ) -> None:
        """`wishes`: what callbacks ask for, on the rank that writes."""
        self._wishes, self._recorder = wishes, recorder
        self._experiment, self._process, self._directory = experiment, parts.process, parts.directory
        self._contents, self._parts, self.checkpointer = contents, parts, checkpointer
        self.agreement = StepAgreement(parts.process, self._ask)
        self.restored: Restored | None = None
        """The checkpoint from which this start of the run resumed."""
        self.notes: list[str] = []
        """Notes for the user about changes since this checkpoint."""
        self.evaluated: int | None = None
        """Number of training steps before the last evaluation."""
        spike = experiment.training.spike
        self._spikes = None if spike is None else SpikeDetector(spike)
        self._rollbacks = 0
        self._started = time.monotonic()

    def restore(self, earlier: EarlierRun, steps: int) -> None:
        """Resume from the first readable checkpoint of an earlier run.

        `steps`: number of steps of the run. Raises UserError if no checkpoint can be read, or if the latest one has
        more steps than the run.
        """
        checkpoints = earlier.checkpoints
        if checkpoints:
            if checkpoints[0] > steps:
                raise UserError(
                    f"run_dir={self._directory.path} is at step {checkpoints[0]}, and this recipe has {steps};"
                    " raise training.steps, or choose another directory"
                )
            paths = [self._directory.checkpoint(step) for step in checkpoints]
            self.restored = restore(paths, self._contents, self._process, self.checkpointer.group)
            self._compare_data(self.restored.state)
            self._compare_scoring(self.restored.state)
            self._load_state(self.restored.state)
            # A note means that data or scores have changed.
            batches, continues = self.restored.state.under_way, earlier.continues and not self.notes
            rows = self.restored.rows if continues else {}
            dropped = self._parts.training.restore_batches(self.restored.state.step, batches, rows)
            if dropped:
                self.notes.append(
                    f"batches under way: {dropped} {'is' if dropped == 1 else 'are'} sampled again from the weights"
                    " of this checkpoint, because the recipe, the data or the number of steps has changed"
                )

    def _compare_data(self, state: RunState) -> None:
        """Compare the training data with the data that the checkpoint describes."""
        old, new = state.data, self._parts.training.data
        if all(old[name] == new[name] for name in ("items", "crc32")):
            return
        how = (
            "with other contents"
            if old["items"] == new["items"]
            else f"{old['items']} items, now {new['items']}"
        )
        # Checkpoints of earlier versions lack the checksum of the template.
        template = old.get("chat_template", new["chat_template"]) != new["chat_template"]
        what = (
            "the chat template (the tokenizer's, data.chat_template or its kwargs)"
            if template
            else "data.train"
        )
        self._note_change(f"{what} has changed since {self._directory.path} was trained ({how})", "records")

    def _compare_scoring(self, state: RunState) -> None:
        """Compare the checksums of everything that determines scores with those in the checkpoint."""
        now = self._parts.gather_scoring()
        # If only one side has a name, some setting has changed, and settings are compared elsewhere.
        changed = sorted(
            name for name in state.scoring.keys() & now.keys() if state.scoring[name] != now[name]
        )
        if changed:
            text = f"scoring has changed since {self._directory.path} was trained ({'; '.join(changed)})"
            self._note_change(text, "scores")

    def _note_change(self, text: str, what: str) -> None:
        """Add a note about a change that the user has allowed. Raises UserError if the user has not."""
        # A run that restarts by itself has no user to ask.
        if self._experiment.resume != "changed" and restart_count() == 0:
            raise UserError(
                f"{text}, so the run would continue with other {what}; set resume=changed to allow that, or choose"
                " another run_dir"
            )
        self.notes.append(f"{text}, so the run continues with other {what}")

    def start(self, started: float) -> None:
        """Start the clock of `seconds`. `started`: when this start of the run began, on the monotonic clock."""
        before = 0.0 if self.restored is None else self.restored.state.seconds
        self._started = started - before

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, including earlier starts."""
        return time.monotonic() - self._started

    def save(self, done: int) -> None:
        """Begin a checkpoint after `done` steps, unless it exists. Raises RunError like `Checkpointer.save`."""
        if self.checkpointer.last != done:
            state = self._parts.collect(
                done, seconds=self.seconds, evaluated=self.evaluated, rollbacks=self._rollbacks
            )
            self.checkpointer.save(state)

    def watch(self, step: int, metrics: Mapping[str, float]) -> Spike | None:
        """Look for a spike in the metrics of a step, which only the writing rank has.

        All ranks get the same result.
        """
        if self._spikes is None:
            return None
        spike = None
        with self._process.together():
            if self._process.rank == WRITER:
                spike = self._spikes.look(step, metrics)
        found: Spike | None = self._process.gather(spike)[WRITER]
        return found

    def roll_back(self, spike: Spike) -> tuple[RunState, str]:
        """Go back to a checkpoint before a spike, and skip the records since then.

        Returns the state of the checkpoint, and a note. Raises RunError if there is no such
        checkpoint, or if training has gone back too often.
        """
        settings, rollbacks = self._experiment.training.spike, self._rollbacks
        assert settings is not None, "spikes are looked for"
        self.checkpointer.finish()
        if rollbacks == settings.most:
            raise RunError(f"{spike}; training has gone back {rollbacks} times before (training.spike.most)")
        saved = self._process.gather(tuple(list_checkpoints(self._directory.path)))[WRITER]
        before = [self._directory.checkpoint(step) for step in saved if step <= spike.step - settings.back]
        if not before:
            raise RunError(f"{spike}, and no checkpoint is {settings.back} steps older; see checkpoint.every")
        with self._contents.in_device_memory():
            found = restore(before, self._contents, self._process, self.checkpointer.group)
        taken = self._parts.training.taken
        self._load_state(found.state)
        self._parts.training.drop_batches()
        self._parts.training.taken, self._rollbacks = taken, rollbacks + 1
        if self._process.rank == WRITER:
            self._directory.go_back(found)
        under_way = sum(len(batch["prompts"]) for batch in found.state.under_way)
        records = taken - found.state.taken + under_way
        return (
            found.state,
            f"{spike}; training goes back to step {found.state.step} and skips {records} records",
        )

    def _load_state(self, state: RunState) -> None:
        self._parts.load_state(state)
        self.evaluated, self._rollbacks = state.evaluated, state.rollbacks
        self.checkpointer.last = state.step

    def _ask(self) -> tuple[float, ...]:
        """Return what this rank knows: whether the last checkpoint is too old, whether to stop, whether training
        ends, the factor of learning rates that a callback wants (minus infinity for none), and the latest step to
        record because of trouble.

        Only the rank that writes decides about checkpoints, and has callbacks.
        """
        late = self._process.rank == WRITER and self.checkpointer.is_late()
        factor = self._wishes.rate_factor
        wanted = -math.inf if factor is None else factor
        return late, stop_requested(), self._wishes.ends, wanted, self._recorder.trouble
