"""The run of a recipe on one rank: its parts, and the training loop."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch.distributed import ProcessGroup

from realrl.algorithms.base.method import FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.checkpoint.contents import CheckpointContents
from realrl.checkpoint.rows import list_rows
from realrl.checkpoint.saved import BEST, find_saved, find_saved_state, load_saved_state
from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.files import as_os_error, reason_of, whole_file
from realrl.config.redaction import redact
from realrl.data.batch import Batch
from realrl.engine.finite import NotFiniteError
from realrl.engine.training.skipped_steps import SkippedStepsError
from realrl.huggingface.tokenizers import list_saving_notes
from realrl.plan.communicators import list_rank_sets, reallocates
from realrl.planner.profile.profile import Profile
from realrl.planner.report.comparison import COSTS, Comparison
from realrl.planner.simulate.predicted_trace import predict_step
from realrl.program.lower import WRITER
from realrl.program.trace_file import TRACE, TRACES, write_trace
from realrl.runtime.checkpoint_writer import Checkpointer
from realrl.runtime.costs import Costs
from realrl.runtime.evaluation.training import TrainingEvaluations
from realrl.runtime.export import ModelSaver
from realrl.runtime.observer import MetricsRecord, RunObserver, Wishes
from realrl.runtime.output.earlier import EarlierRun
from realrl.runtime.output.notes import (
    StepNotes,
    list_data_notes,
    list_epoch_notes,
    list_kernel_notes,
    list_model_notes,
    list_resume_notes,
    list_state_notes,
)
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.device_memory import list_early_loads, list_kept_decoding
from realrl.runtime.prepare.environments import open_environments
from realrl.runtime.prepare.inputs import (
    RecordLoader,
    list_tokenizer_notes,
    load_functions,
    load_shared_tokenizer,
    load_stop_token_ids,
)
from realrl.runtime.prepare.job import Job
from realrl.runtime.prepare.trained_parts import list_trained_parts
from realrl.runtime.processes.process import Process
from realrl.runtime.processes.signals import end_by_signal
from realrl.runtime.recorder import Recorder
from realrl.runtime.resume import Continuation, StatefulParts
from realrl.runtime.step import TrainingSteps
from realrl.runtime.supervision.run_end import NoteFile
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.trace import Trace, TraceFiles
from realrl.runtime.worker.worker import Worker

COLLECT_EVERY = 100
"""Maximum number of steps between two writes of the measured costs. Evaluations and checkpoints also write them."""
COLLECT_EARLY = (2, 10, 30)
"""Costs are also written after these steps, so that a long run shows them early."""


class TrainingRun:
    """The run of a recipe on one rank."""

    def __init__(
        self,
        job: Job,
        process: Process,
        observer: RunObserver | None,
        earlier: EarlierRun | None = None,
    ) -> None:
        """Prepare everything except weights and the run's directory.

        `earlier`: the run in the same directory, which this run continues. Raises UserError for mistakes that can
        be found without weights.
        """
        self.job, self.experiment = job, job.experiment
        self.process, self.observer = process, observer
        experiment = job.experiment
        self.earlier = earlier
        # Creating groups needs all ranks, so it comes before everything that can fail on a single rank.
        groups = process.groups(list_rank_sets(job.placements), moves=reallocates(job.placements))
        group_of_threads = process.make_control_group()
        self.trained = job.trained
        self.directory = RunDirectory(experiment.run_dir, self.trained)
        profile = None if experiment.profile is None else Profile.load(experiment.profile)
        self.tokenizer = load_shared_tokenizer(experiment)
        self.stop_token_ids = load_stop_token_ids(experiment, self.tokenizer)
        self.algorithm = algorithm = build_algorithm(experiment)
        go_on = earlier is not None and earlier.checkpoints
        self._started_from = None if go_on else find_saved_state(experiment, self.trained)
        if self._started_from is not None:
            load_saved_state(algorithm, *self._started_from)
        self.roles = Roles(job, process, groups, temperature=algorithm.temperature)
        # Writing these notes now also finds mistakes that saving would find only hours later.
        self.saving_notes = [
            f"models.{role}: {text}" for role in self.trained for text in self._saving_notes(role)
        ]
        functions = load_functions(algorithm, job.phases.values(), process.rank)
        self.environments = open_environments(job, process.rank, self.tokenizer, self.stop_token_ids)
        loader = RecordLoader(
            experiment, self.tokenizer, self.stop_token_ids, functions, environments=self.environments
        )
        self.records = loader.load_train(job.train)
        self.costs = Costs(job, process, self.roles, profile, self._say, self.environments)
        self.trace = Trace(process.rank, experiment.debug.traced_steps)
        self.trace_files = TraceFiles(self.directory.path, self.trace)
        self._note_file = NoteFile(self.directory.path)
        kept = list_kept_decoding(job, process.rank, process.gpu)
        self.roles.keep_decoding(kept)
        self.worker = Worker(
            process,
            self.roles,
            algorithm,
            self.stop_token_ids,
            self.trace,
            self.tokenizer,
            list_early_loads(job, process.rank, process.gpu, kept),
            self.environments,
        )
        self.training = TrainingSteps(job, process, self.worker, self.costs, self.records)
        self.steps = self.training.count
        self.recorder = Recorder(job, process, self.training, self.directory.path, self._say)
        self.evaluations = TrainingEvaluations(
            job, self.worker, loader, process=process, groups=groups, tokenizer=self.tokenizer
        )
        self.notes = StepNotes(algorithm, experiment.spec)
        self.saver = ModelSaver(
            job,
            process,
            self.roles,
            self.directory,
            self.tokenizer,
            self.stop_token_ids,
            lambda: self.algorithm,
        )
        self._prepare_checkpoints(functions, group_of_threads)

    def _prepare_checkpoints(
        self, functions: Mapping[str, FunctionMethod], group: ProcessGroup | None
    ) -> None:
        """Create the parts that save and restore checkpoints.

        `functions`: the functions that this rank calls. `group` has all ranks, for the threads that write.
        """
        experiment, process = self.experiment, self.process
        parts = StatefulParts(
            process=process,
            phase=self.job.train,
            roles=self.roles,
            training=self.training,
            directory=self.directory,
            notes=self.notes,
            best=self.evaluations.best,
            functions=functions,
            algorithm=lambda: self.algorithm,
        )
        contents = CheckpointContents(
            self.roles.learning,
            self.roles.home_model,
            self.roles.trainers,
            lambda: list_rows(self.training.list_rows(), process.rank),
        )
        self.checkpointer = Checkpointer(
            experiment, process, contents, self.directory, group, self.saver.export
        )
        self.roles.before_change = self.checkpointer.wait_copied
        self.continuation = Continuation(
            experiment,
            parts,
            contents,
            self.checkpointer,
            Wishes() if self.observer is None else self.observer.wishes,
            self.recorder,
        )

    def load(self) -> None:
        """Load the weights that no checkpoint restores. Raises UserError if they cannot be used."""
        checkpoints = () if self.earlier is None else self.earlier.checkpoints
        self.roles.load_weights(restored=self.roles.learning if checkpoints else ())

    def restore(self) -> None:
        """Restore the last checkpoint of the run that is continued. Raises UserError if that fails."""
        if self.earlier is not None:
            self.continuation.restore(self.earlier, self.steps)
        self.roles.offload_homes()

    def open(self) -> None:
        """On the rank that writes, start the run's directory, and notify the observer.

        Raises UserError if the directory cannot be used.
        """
        fresh = {
            role: names for part in self.process.gather(self.roles.fresh) for role, names in part.items()
        }
        if (observer := self.observer) is None:
            return
        restored = self.continuation.restored
        self.directory.start(self.experiment, self.job.plan, self.job.programs, restored)
        done = 0 if restored is None else restored.state.step
        self.directory.open_trackers(self.experiment, self._say, done)
        notes = [
            *list_resume_notes(self.experiment, self.earlier, restored),
            *self.continuation.notes,
            *list_state_notes(self._started_from),
            *list_data_notes({"train": self.records, "eval": self.evaluations.records}),
            *list_tokenizer_notes(self.experiment, self.tokenizer),
            *list_epoch_notes(self.experiment.training, self.training.order, self.steps),
            *list_model_notes(self.experiment, self.steps, {} if restored else fresh),
            *list_kernel_notes(self.experiment, self.roles.shapes),
            *list_trained_parts(self.job.models.stored),
            *self.saving_notes,
            *self.costs.notes,
        ]
        shutil.rmtree(self.directory.path / TRACES, ignore_errors=True)  # traces of an earlier start
        for note in notes:
            self._say(note)
        observer.begin(self.experiment, self.steps)

    def close(self) -> None:
        """End the processes of the environment, if there is one."""
        if self.environments is not None:
            self.environments.close()

    def execute(self, started: float) -> None:
        """Train from the first step, or the step after the checkpoint, to the last step.

        `started`: when this start of the run began, on the monotonic clock.
        """
        self.continuation.start(started)
        self.costs.compare_clocks()
        try:
            self._run_steps()
        except (UserError, RunError) as error:
            self.checkpointer.wait_written()
            if isinstance(error, UserCodeError):
                raise self._saying_what_is_saved(error) from error
            raise
        finally:
            # Write the trace even if the run fails, because then it is most useful.
            self.trace_files.write()
        self._finish()

    def _run_steps(self) -> None:
        activity = self.process.activity
        activity.steps = self.steps
        activity.enter("train")
        self.worker.start(self.job.start[self.process.rank])
        done, restored, agreement = 0, self.continuation.restored, self.continuation.agreement
        if restored is None:
            self._evaluate(0)
        else:
            done = restored.state.step
            activity.step = done
            self._after_step(done, resumed=True)
        while done < self.steps:
            metrics = self._train_step(done)
            done += 1
            activity.done(done)
            spike = self.continuation.watch(done, metrics)
            if spike is not None:
                state, note = self.continuation.roll_back(spike)
                self.recorder.write_spike(done, str(spike), state)
                self._say(note)
                done = state.step
                activity.done(done)
                continue
            late, stops, ends, factor, trouble = agreement.learn()
            if trouble > 0:
                self.recorder.write_trouble(int(trouble), "an optimizer step was skipped")
            if factor >= 0 and factor != self.training.rate_factor:
                self.training.rate_factor = factor
                self._say(
                    f"learning rates are multiplied by {factor:g} after step {done}, as a callback has asked"
                )
            if ends > 0 and done < self.steps:
                sampled = len(self.training.under_way)
                left = f"; {sampled} sampled batches are not trained on" if sampled else ""
                self._say(f"training ends after step {done} of {self.steps}, as a callback has asked{left}")
                self.steps = activity.steps = done
            self._after_step(done, late=late > 0)
            if stops > 0 and done < self.steps:
                self._stop(done)
            agreement.say()
        trouble = agreement.learn()[-1]
        if trouble > 0:
            self.recorder.write_trouble(int(trouble), "an optimizer step was skipped")

    def _after_step(self, done: int, *, late: bool = False, resumed: bool = False) -> None:
        """Save and evaluate after `done` steps, if due. `late`: whether a checkpoint is overdue.

        `resumed`: whether the run has just resumed from the checkpoint after these steps.
        """
        every = self.experiment.evaluation.every
        last = done >= self.steps
        evaluates = last or bool(every and done % every == 0)
        keeps = last and self.experiment.checkpoint.last
        recorded = not last and self.recorder.asks(done + 1)
        saves = not resumed and (keeps or late or recorded or self.checkpointer.is_due(done))
        if not last and (evaluates or saves or done % COLLECT_EVERY == 0 or done in COLLECT_EARLY):
            self._collect(last=False)
        if last and not resumed:
            self._check_learning()
        # Save first, because the user's judge may fail in the evaluation.
        if saves:
            self.continuation.save(done)
        if keeps:
            self.saver.save(None)
        if evaluates and self.continuation.evaluated != done:
            self._evaluate(done)

    def _stop(self, done: int) -> NoReturn:
        """Save a checkpoint and stop, after SIGTERM or Ctrl-C on any rank."""
        self.continuation.save(done)
        self.checkpointer.finish()
        self._collect(last=False)
        end_by_signal()

    def _train_step(self, step: int) -> dict[str, float]:
        """Train a step, which is counted from 0. Returns its metrics. Only the rank that writes has all."""
        start = time.monotonic()
        self.trace.begin_step()
        watch = self.recorder.begin(step + 1, self.checkpointer.last)
        try:
            metrics = self.training.run(step, watch)
        except SkippedStepsError as error:
            self.recorder.write_failed(step + 1, str(error))
            raise self._stopped(error, step + 1) from None
        except NotFiniteError as error:
            self.recorder.write_failed(step + 1, str(error))
            raise
        self.recorder.end(step + 1, metrics)
        measured = metrics | self.costs.report_step()
        self._record(MetricsRecord(step + 1, "train", time.monotonic() - start, measured))
        self.trace_files.refresh()
        if self.observer is not None:
            for note in self.notes.describe_step(step + 1, metrics):
                self._say(note)
        return metrics

    def _say(self, text: str) -> None:
        """Show a note, and write it to the run's directory, on the rank that writes."""
        if self.observer is not None:
            text = redact(text)
            self.observer.note(text)
            self._note_file.add(text)
            self.directory.note(text)

    def _check_learning(self) -> None:
        """Check that every role has been updated in the last step, on all ranks. Raises RunError if not."""
        with self.process.together():
            for trainer in self.roles.trainers.values():
                try:
                    trainer.check_learning()
                except SkippedStepsError as error:
                    self.recorder.write_trouble(self.steps, str(error))
                    raise self._stopped(error, self.steps) from None

    def _stopped(self, error: SkippedStepsError, step: int) -> RunError:
        """Create the error that ends a run whose loss or gradients are not finite."""
        return make_stop_error(error, step=step, rank=self.process.rank, run_dir=self.directory.path)

    def _collect(self, *, last: bool) -> Comparison | None:
        """Write the costs and the trace of the steps so far. Returns the costs, on the rank that writes."""
        self.trace_files.write()
        comparison = self.costs.collect(last=last)
        if comparison is not None:
            with self.directory.writing(self.directory.path / COSTS):
                comparison.save(self.directory.path)
                if self.costs.predicted is not None:
                    predict_step(self.costs.predicted.estimate).save(self.directory.path)
        if self.observer is not None and not last:
            self.trace_files.merge()
        return comparison

    def _evaluate(self, done: int) -> None:
        start = time.monotonic()
        result = self.evaluations.run()
        if result is None:
            return
        self.continuation.evaluated = done
        self.notes.take_evaluation(result.metrics)
        settings = self.experiment.evaluation
        if self.observer is not None and result.rows:
            self.directory.write_samples(done, result.rows[: settings.shown * settings.samples])
        self._record(MetricsRecord(done, "eval", time.monotonic() - start, result.metrics))
        self._keep_best(done, result.metrics)

    def _keep_best(self, done: int, metrics: Mapping[str, float]) -> None:
        """Save the models if this evaluation is the best so far, and a checkpoint if it is among the best."""
        best = self.evaluations.best
        if best.settings is None:
            return
        better, offered = False, False
        with self.process.together():
            if self.observer is not None:
                better = best.take(done, metrics)
                offered = self.checkpointer.offers_best(metrics[best.settings.metric])
        better, offered = self.process.gather((better, offered))[WRITER]
        if better:
            if self.observer is not None:
                self.directory.drop_best()
            self.saver.save(BEST)
            if self.observer is not None:
                self.directory.write_best(best.to_json())
        if offered:
            self.continuation.save(done)
            self.checkpointer.keep_best(metrics.get(best.settings.metric, math.nan))

    def _saying_what_is_saved(self, error: UserCodeError) -> UserCodeError:
        """Add to an error of the user's code a sentence about what has been saved."""
        saved = find_saved(self.directory.path, self.trained).describe_paths()
        message = f"{error}; {saved}" if saved else str(error)
        return UserCodeError(message, error.trace, error.alone)

    def _record(self, record: MetricsRecord) -> None:
        if self.observer is not None:
            self.directory.log(record.step, record.kind, record.seconds, record.metrics)
            self.observer.record(record)

    def _saving_notes(self, role: str) -> Iterator[str]:
        origin, vocabulary = self.roles.origins[role], self.roles.shapes[role].vocab_size
        head = self.experiment.spec.heads[role]
        return list_saving_notes(origin, head, self.tokenizer, self.stop_token_ids, vocabulary)

    def _finish(self) -> None:
        self.checkpointer.finish()
        comparison = self._collect(last=True)
        events = self.process.gather(self.trace.events)
        if self.observer is not None:
            if comparison is not None:
                self.observer.costs(comparison)
            trace = self.directory.path / TRACE
            with self.directory.writing(trace):
                write_trace(trace, events, "measured")
            seconds, best = self.continuation.seconds, self.evaluations.best
            summary: dict[str, Any] = {"algorithm": self.experiment.spec.name, "steps": self.steps}
            summary |= {"seconds": round(seconds, 2), "skipped_steps": self.notes.skipped}
            summary |= {"untaught_steps": self.notes.untaught.counts}
            if best.settings is not None:
                summary["best"] = best.to_json()
            for text in self.notes.untaught.describe(str(self.steps)):
                self._say(text)
            self.directory.finish(summary)
            self.directory.close_trackers(done=True)
            self.observer.end(self.experiment.run_dir, seconds)


MINIBATCHES = "minibatches"
"""Name of the folder in the run directory for mini-batches on which training failed."""


def make_stop_error(error: SkippedStepsError, *, step: int, rank: int, run_dir: Path) -> RunError:
    """Create the error that ends a run, the same on all ranks, and save this rank's part of the mini-batch.

    `step`: number of the failed training step, counted from 1.
    """
    folder = run_dir / MINIBATCHES
    kept = f"the last mini-batch is kept in {folder}"
    if error.minibatch is not None:
        try:
            write_minibatch(folder / f"step-{step:06}-{error.call}-rank-{rank}.safetensors", error.minibatch)
        except Exception as trouble:
            refusal = as_os_error(trouble)
            if refusal is None:
                raise
            kept = f"the last mini-batch cannot be kept in {folder}: {reason_of(refusal)}"
    return RunError(
        f"{error.call}, step {step}: {error.what} because numbers are not finite, first of all {error.quantity};"
        f" {kept}"
    )


def write_minibatch(file: Path, minibatch: Batch) -> None:
    """Write items with all their fields as safetensors.

    The rows of a field are stored one after the other under its name, and their lengths under `FIELD.lengths`.
    `ids` are the positions of the items in the step's batch.
    """
    tensors = {"ids": torch.tensor(minibatch.ids)}
    for key, field in minibatch.fields.items():
        tensors[key] = field.values.detach().contiguous()
        tensors[f"{key}.lengths"] = torch.tensor(field.lengths)
    with whole_file(file) as partial:
        save_file(tensors, partial)
