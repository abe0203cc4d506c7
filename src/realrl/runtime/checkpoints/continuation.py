"""Continuation of a run: its checkpoints, going on from one, and going back to one after a spike."""

import time
from collections.abc import Mapping

from realrl.config.errors import RunError, UserError
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.checkpoints.agreement import StepAgreement
from realrl.runtime.checkpoints.checkpointer import Checkpointer
from realrl.runtime.checkpoints.contents import CheckpointContents
from realrl.runtime.checkpoints.restore import restore
from realrl.runtime.checkpoints.spikes import Spike, SpikeDetector
from realrl.runtime.checkpoints.state_keeper import StateKeeper
from realrl.runtime.output.run_state import Restored, RunState
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.output.saved import list_checkpoints
from realrl.runtime.processes.environment import restart_count
from realrl.runtime.processes.process import Process
from realrl.runtime.processes.signals import stop_requested


class Continuation:
    """All that a run needs to go on later, elsewhere or from an earlier step, on every rank."""

    def __init__(
        self,
        experiment: Experiment,
        process: Process,
        directory: RunDirectory,
        contents: CheckpointContents,
        checkpointer: Checkpointer,
        keeper: StateKeeper,
    ) -> None:
        self._experiment, self._process, self._directory = experiment, process, directory
        self._contents, self._keeper, self.checkpointer = contents, keeper, checkpointer
        self.agreement = StepAgreement(process, self._ask)
        self.restored: Restored | None = None
        """The checkpoint that this start of the run went on from."""
        self.notes: list[str] = []
        """Notes for the user on what is not as it was."""
        self.evaluated: int | None = None
        """Training steps before the last evaluation."""
        spike = experiment.training.spike
        self._spikes = None if spike is None else SpikeDetector(spike)
        self._rollbacks = 0
        self._started = time.monotonic()

    def restore(self, checkpoints: tuple[int, ...], steps: int) -> None:
        """Restore everything from the first of the checkpoints, by steps before them, that can be read.

        UserError where none can be, and for one that is beyond the `steps` of the run.
        """
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
            self._take(self.restored.state)

    def _compare_data(self, state: RunState) -> None:
        """Check that the training data are those of the checkpoint; else UserError, or a note."""
        old, new = state.data, self._keeper.data
        if all(old[name] == new[name] for name in ("items", "crc32")):
            return
        how = (
            "with other contents"
            if old["items"] == new["items"]
            else f"{old['items']} items, now {new['items']}"
        )
        # A checkpoint of an earlier version does not say which template it had.
        template = old.get("chat_template", new["chat_template"]) != new["chat_template"]
        what = (
            "the chat template (the tokenizer's, data.chat_template or its kwargs)"
            if template
            else "data.train"
        )
        self._note_change(
            f"{what} has changed since {self._directory.path} was trained ({how})", "other records"
        )

    def _compare_scoring(self, state: RunState) -> None:
        """Check that what scores is as in the checkpoint; else UserError, or a note."""
        now = self._keeper.gather_scoring()
        # What is in one of both alone is due to other settings, which are compared by themselves.
        changed = sorted(
            name for name in state.scoring.keys() & now.keys() if state.scoring[name] != now[name]
        )
        if changed:
            text = f"what scores has changed since {self._directory.path} was trained ({'; '.join(changed)})"
            self._note_change(text, "other scores")

    def _note_change(self, text: str, what: str) -> None:
        """Note a change that the user has agreed to; else UserError. `what` comes in place of what was due."""
        # One that is started again by itself has nobody to ask.
        if self._experiment.resume != "changed" and restart_count() == 0:
            raise UserError(
                f"{text}, so that {what} would come than those that are due; set resume=changed to continue"
                " with it, or choose another run_dir"
            )
        self.notes.append(f"{text}, and {what} come than those that were due")

    def start(self, started: float) -> None:
        """Start the clock: this start of the run began at `started`, by the monotonic clock."""
        before = 0.0 if self.restored is None else self.restored.state.seconds
        self._started = started - before

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, its earlier parts included."""
        return time.monotonic() - self._started

    def save(self, done: int) -> None:
        """Begin a checkpoint after so many steps, unless the last one is; RunError as `Checkpointer.save`."""
        if self.checkpointer.last != done:
            state = self._keeper.collect(
                done, seconds=self.seconds, evaluated=self.evaluated, rollbacks=self._rollbacks
            )
            self.checkpointer.save(state)

    def watch(self, step: int, metrics: Mapping[str, float]) -> Spike | None:
        """Look for a spike in the metrics of a step, which the rank that writes has; the same on all ranks."""
        if self._spikes is None:
            return None
        spike = None
        with self._process.together():
            if self._process.rank == WRITER:
                spike = self._spikes.look(step, metrics)
        found: Spike | None = self._process.gather(spike)[WRITER]
        return found

    def roll_back(self, spike: Spike) -> tuple[int, str]:
        """Go back to a checkpoint before a spike, without the records since.

        Returns the number of steps done there, and a note. RunError where there is none, or after too many.
        """
        settings, rollbacks = self._experiment.training.spike, self._rollbacks
        assert settings is not None, "spikes are looked for"
        self.checkpointer.finish()
        what = f"step {spike.step}: {settings.metric} is {spike.value:g}, usually {spike.usual:g}"
        if rollbacks == settings.most:
            raise RunError(f"{what}; training has gone back {rollbacks} times before (training.spike.most)")
        saved = self._process.gather(tuple(list_checkpoints(self._directory.path)))[WRITER]
        before = [self._directory.checkpoint(step) for step in saved if step <= spike.step - settings.back]
        if not before:
            raise RunError(f"{what}, and no checkpoint is {settings.back} steps older; see checkpoint.every")
        with self._contents.in_device_memory():
            found = restore(before, self._contents, self._process, self.checkpointer.group)
        taken = self._keeper.taken
        self._take(found.state)
        self._keeper.taken, self._rollbacks = taken, rollbacks + 1
        if self._process.rank == WRITER:
            self._directory.go_back(found)
        records = taken - found.state.taken
        return (
            found.state.step,
            f"{what}; training goes back to step {found.state.step}, leaving out {records} records",
        )

    def _take(self, state: RunState) -> None:
        """Go on from the state of a checkpoint that has been loaded."""
        self._keeper.give_back(state)
        self.evaluated, self._rollbacks = state.evaluated, state.rollbacks
        self.checkpointer.last = state.step

    def _ask(self) -> tuple[bool, bool]:
        """Tell whether the last checkpoint is too old, which one rank says for all, and whether to end."""
        return self._process.rank == WRITER and self.checkpointer.is_late(), stop_requested()
