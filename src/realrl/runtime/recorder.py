"""Record training steps on one rank, while the run trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from realrl.checkpoint.saved import RunState, list_records, record_path
from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.data.batch import Ragged
from realrl.dataflow.call import Call
from realrl.engine.model import Model
from realrl.program.lower import WRITER
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.process import Process
from realrl.runtime.records.fingerprints import Fingerprints, take_fingerprints
from realrl.runtime.records.step_record import RankRecord, Rows, StepHeader
from realrl.runtime.step import StepData, TrainingSteps
from realrl.runtime.worker.store import Store


class CallFingerprints:
    """Takes the fingerprints of each call's parameters before the call, as a `StepWatch`."""

    def __init__(self) -> None:
        self.found: dict[str, Fingerprints] = {}

    def begin_call(self, call: Call, model: Model) -> None:
        self.found[call.name] = take_fingerprints(model)

    def end_call(self, call: Call, store: Store) -> None:
        """Ignore the outputs, which stay in the store until the end of the step."""


@dataclass(frozen=True, eq=False)
class _Kept:
    step: int
    checkpoint: int
    taken: int
    data: StepData
    metrics: Mapping[str, float]
    fingerprints: Mapping[str, Fingerprints]


class Recorder:
    """Records the steps that the recipe asks for, and steps with trouble.

    All ranks call `begin` and `end` for every step. The last two steps stay in memory, because other ranks learn of
    trouble one step later than the rank that writes.
    """

    def __init__(
        self,
        job: Job,
        process: Process,
        training: TrainingSteps,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """`say` is called with notes. Raises UserError if the recipe asks for a step that the run does not have."""
        self._settings = settings = job.experiment.debug.record
        # Steps of asynchronous runs cannot be replayed.
        self._most = 0 if job.experiment.asynchrony.active else settings.trouble
        """Maximum number of steps with trouble that are recorded."""
        late = [step for step in settings.steps if step > training.count]
        if late:
            raise UserError(f"debug.record.steps: {late[0]} is after the run's last step, {training.count}")
        self._job, self._process, self._training = job, process, training
        self._run_dir, self._say = run_dir, say
        self._checkpoint = 0
        self._taken: dict[int, int] = {}
        """Number of records that were taken when training last continued from each checkpoint."""
        self._factors: list[tuple[int, float]] = []
        """Steps from which the factor of the learning rates has changed, in the order of time, and the factor."""
        self._kept: dict[int, _Kept] = {}
        self._watch: CallFingerprints | None = None
        self.trouble = 0
        """On the rank that writes, the latest step with trouble. Other ranks learn it from `StepAgreement`."""

    def asks(self, step: int) -> bool:
        """Return whether the recipe asks for the record of a step, which is counted from 1."""
        return self._settings.asks(step)

    def begin(self, step: int, checkpoint: int | None) -> CallFingerprints | None:
        """Begin a step, which is counted from 1. Returns the watch for the step.

        `checkpoint`: number of steps before the last checkpoint; None if there is none.
        """
        first, factor = not self._factors, self._training.rate_factor
        if first or checkpoint == step - 1:
            self._checkpoint = checkpoint or 0
            self._taken[self._checkpoint] = self._training.taken
        if first or factor != self._factors[-1][1]:
            self._factors.append((step, factor))
        self._watch = CallFingerprints() if self.asks(step) else None
        return self._watch

    def end(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step. `metrics` has those of all calls on the rank that writes."""
        data = self._training.latest
        assert data is not None, "a step has ended"
        kept = self._keep(step, data, metrics)
        if self.asks(step):
            self._write(
                kept, "debug.record asks for it", _list_rows(kept.data, self._job, self._process.rank)
            )
        if not self._most:
            return
        self._kept = {number: old for number, old in self._kept.items() if number == step - 1} | {step: kept}
        skipped = next(
            (name for name, value in metrics.items() if name.endswith("/skipped_steps") and value > 0), None
        )
        writes = self._process.rank == WRITER and not self.asks(step)
        if writes and skipped is not None and self._has_room():
            call = skipped.partition("/")[0]
            # Write at once, so that the checkpoint before this step is kept.
            self.write_trouble(step, f"{call} skipped an optimizer step: a number was not finite")
            self.trouble = step

    def write_trouble(self, step: int, reason: str) -> None:
        """Write the record of one of the last two steps, unless it is written already."""
        kept = self._kept.pop(step, None)
        if kept is not None:
            self._write(kept, reason, _list_rows(kept.data, self._job, self._process.rank))

    def write_spike(self, step: int, reason: str, state: RunState) -> None:
        """Write the record of a step with a spike, after training has gone back to `state`. All ranks call this.

        The record starts from that checkpoint, because later ones will be replaced.
        """
        kept = self._kept.pop(step, None)
        if self._process.gather(self._has_room())[WRITER] and kept is not None:
            taken = self._taken.get(state.step, state.taken)
            kept = replace(kept, checkpoint=state.step, taken=taken, fingerprints={})
            self._write(kept, reason, _list_rows(kept.data, self._job, self._process.rank))

    def write_failed(self, step: int, reason: str) -> None:
        """Write everything that this rank holds of a step that failed.

        Other ranks may have failed elsewhere, so this rank waits for nobody.
        """
        data = self._training.latest
        if data is None or not (self.asks(step) or (self._most and self._has_room())):
            return
        kept = self._keep(step, data, {})
        self._write(kept, reason, {key: data.store.held(key) for key in data.store.keys})

    def _has_room(self) -> bool:
        troubled = [step for step in list_records(self._run_dir) if not self.asks(step)]
        return len(troubled) < self._most

    def _keep(self, step: int, data: StepData, metrics: Mapping[str, float]) -> _Kept:
        found = {} if self._watch is None else self._watch.found
        return _Kept(step, self._checkpoint, self._taken[self._checkpoint], data, metrics, found)

    def _find_factor(self, step: int) -> float:
        """Find the factor of the learning rates in a step. After going back, the latest change counts."""
        return next((factor for since, factor in reversed(self._factors) if since <= step), 1.0)

    def _write(self, kept: _Kept, reason: str, rows: Rows) -> None:
        steps = range(kept.checkpoint + 1, kept.step + 1)
        header = StepHeader(
            step=kept.step,
            checkpoint=kept.checkpoint,
            taken=kept.taken,
            rate_factors=[self._find_factor(number) for number in steps],
            prompts=kept.data.prompts,
            plan=self._job.plan.describe(),
            ranks=self._job.plan.cluster.size,
        )
        directory = record_path(self._run_dir, header.step, header.checkpoint)
        record = RankRecord(header, rows, kept.metrics, kept.fingerprints)
        try:
            record.write(directory, self._process.rank, reason)
        except (OSError, SafetensorError) as error:
            problem = reason_of(error) if isinstance(error, OSError) else str(error)
            self._say(f"step {header.step} is not recorded: {directory} cannot be written: {problem}")


def _list_rows(data: StepData, job: Job, rank: int) -> dict[str, tuple[list[int], Ragged]]:
    """List the rows that a rank writes to a record: outputs of its calls, and on one rank the records."""
    store = data.store
    found: dict[str, tuple[list[int], Ragged]] = {}
    produced: set[str] = set()
    for call in store.graph.calls:
        produced.update(call.outputs)
        placement = job.plan[call.name]
        if rank in placement.output_ranks:
            items = store.items(call, placement.item_index(rank))
            found.update({key: (items, store.rows(key, items)) for key in call.outputs})
    if rank == WRITER:
        found.update({key: store.held(key) for key in store.keys if key not in produced})
    return found
