"""Costs of a run's training steps: measured on every rank, compared with the prediction on the writer."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.planner.calibration.comparison import Comparison
from realrl.planner.calibration.coverage import describe_times
from realrl.planner.profile.profile import Profile
from realrl.planner.profile.versions import read_versions
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.measure.compare import Prediction, RunInfo, compare, predict
from realrl.runtime.measure.performance import Performance
from realrl.runtime.measure.step_reports import StepReports
from realrl.runtime.measure.step_timer import StepTimer, measure_clock_offsets
from realrl.runtime.measure.timing_log import TimingLog
from realrl.runtime.prepare.compile import Compiled, stored_models
from realrl.runtime.prepare.devices import spec_of
from realrl.runtime.processes.host_memory import HostMemory, read_memory
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.store import Store

KEPT_LENGTHS = 1 << 13
"""Maximum lengths kept of a run, the latest ones, so that memory and messages stay bounded."""
_REST = 100
"""Ratio of the time between comparisons to the time of one: ranks wait for the writer during a comparison."""


class Costs:
    """Collector of the measured training steps; the rank that writes gets those of all ranks."""

    def __init__(
        self,
        experiment: Experiment,
        compiled: Compiled,
        process: Process,
        roles: Roles,
        profile: Profile | None,
        say: Callable[[str], None],
    ) -> None:
        """`profile` is for the prediction. `say` is called with the reason where there is no prediction."""
        self._experiment, self._compiled, self._process = experiment, compiled, process
        self._roles, self._profile, self._say = roles, profile, say
        self.timer = StepTimer(
            process.device, held=roles.held, staged=roles.staged, kept_beside=roles.kept_beside
        )
        self.spec = spec_of(experiment, compiled.train.plan.cluster, process.gpu or "cpu")
        """Devices of the run; None where the planner does not know their kind."""
        phase = compiled.train
        self._source = phase.plan[_lengths_call(phase.graph).name].output_ranks[0]
        self._prompts, self._answers = deque[int](maxlen=KEPT_LENGTHS), deque[int](maxlen=KEPT_LENGTHS)
        self._log = TimingLog()
        self._tokens: int | None = None
        """Tokens of prompts and answers of the last step, on a rank that knows them."""
        self._reports = StepReports(process)
        self._offsets = [0.0] * process.world
        self._performance = Performance(
            graph=phase.graph,
            plan=phase.plan,
            models=stored_models(experiment, phase.graph, roles.shapes),
            spec=self.spec,
            profile=profile,
        )
        self.predicted: Prediction | None = None
        """Prediction of the last comparison, on the rank that writes."""
        self._next = 0.0
        """Time from which the next comparison may be made."""

    @property
    def notes(self) -> list[str]:
        """Notes on where predicted times come from, and on metrics that are left out."""
        source = self._source_of_times()
        notes = [] if source is None else [f"predictions: {source}"]
        return notes if (missing := self._performance.missing) is None else [*notes, missing]

    def _source_of_times(self) -> str | None:
        """Source of predicted times; None where there are none and no profile that they should come from."""
        path, graph = str(self._experiment.profile), self._compiled.train.graph
        if self.spec is None and self._profile is None:
            return None
        if self.spec is None:
            return f"no times, since these devices are of an unknown kind; the profile {path} was not used"
        stored = stored_models(self._experiment, graph, self._roles.shapes)
        functions = [call.function for call in graph.functions if call.function is not None]
        return "; ".join(describe_times(self._profile, path, self.spec, stored, functions))

    def compare_clocks(self) -> None:
        """Measure how far the clocks of ranks are apart, before the first step. All ranks call this together."""
        self._offsets = measure_clock_offsets(self._process, self._compiled.train.plan.cluster.nodes)

    def step(self) -> AbstractContextManager[None]:
        """Measure the block, which executes one step."""
        return self.timer.step()

    def add_lengths(self, store: Store) -> None:
        """Add the lengths of prompts and answers that a step has worked on."""
        if self._process.rank == self._source:
            prompts, answers = lengths(store)
            self._prompts.extend(prompts)
            self._answers.extend(answers)
            self._tokens = sum(prompts) + sum(answers)

    def report_step(self) -> dict[str, float]:
        """Bring the times of the last step to the rank that writes; performance metrics there, none elsewhere."""
        (mine,) = self.timer.take()
        everyone = self._reports.exchange(replace(mine, tokens=self._tokens))
        if everyone is None:
            return {}
        return self._performance.compute(everyone, self._log.add(everyone, self._offsets))

    def collect(self, *, last: bool) -> Comparison | None:
        """Compare all steps so far with the prediction, on the rank that writes; None elsewhere.

        Also None where there are no steps, and too soon after the time before, unless this is the `last`. All ranks
        call this together.
        """
        self.compare_clocks()
        mine = (self.timer.reserved, read_memory(), list(self._prompts), list(self._answers))
        everyone = self._process.gather(mine)
        if self._process.rank != WRITER:
            return None
        start = time.monotonic()
        if not self._log.step.seconds or (start < self._next and not last):
            return None
        *_, prompts, answers = everyone[self._source]
        memories = [memory for _, memory, *_ in everyone]
        info = RunInfo(
            experiment=self._experiment,
            compiled=self._compiled,
            shapes=self._roles.shapes,
            spec=self.spec,
            software=read_versions(),
            prompts=prompts,
            answers=answers,
            reserved=max(reserved for reserved, *_ in everyone),
            resident=HostMemory(
                resident=max(memory.resident for memory in memories),
                peak=max(memory.peak for memory in memories),
            ),
        )
        comparison = self._compare(info)
        end = time.monotonic()
        self._next = end + _REST * (end - start)
        return comparison

    def _compare(self, info: RunInfo) -> Comparison:
        """Compare, without a prediction where that fails: by now it must not cost anybody a run."""
        try:
            self.predicted = predict(info, self._profile)
            return compare(info, self.predicted, self._log)
        except Exception as error:
            self._say(f"what steps cost is not predicted: {type(error).__name__}: {error}")
        self.spec = self.predicted = None
        return compare(replace(info, spec=None), None, self._log)


def _lengths_call(graph: DataflowGraph) -> Call:
    """The call whose lengths say how long prompts and answers are: the first that generates; where none does, the
    first that trains."""
    of_kind = {kind: [call for call in graph.order if call.kind is kind] for kind in Kind}
    return (of_kind[Kind.GENERATE] or of_kind[Kind.TRAIN])[0]


def lengths(store: Store) -> tuple[list[int], list[int]]:
    """Find the tokens of prompts and of answers after a step, on a rank that knows them.

    That is the first output rank of the call that generates. Where nothing is generated, tokens of the sequences
    that the first train call learns from, and no answers.
    """
    graph = store.graph
    call = _lengths_call(graph)
    prompts = [length for key in call.work for length in store.lengths[key]]
    if call.kind is not Kind.GENERATE:
        return prompts, []
    made = next(key for key in call.outputs if graph.keys[key].length == "own")
    return prompts, [whole - prompt for whole, prompt in zip(store.lengths[made], prompts, strict=True)]
