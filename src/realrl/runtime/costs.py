"""Measure time and memory of training steps on every rank, and compare them with the prediction on one rank."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.distributed as dist

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.planner.profile.profile import Profile, read_versions
from realrl.planner.report.calibrate import describe_times
from realrl.planner.report.comparison import Comparison
from realrl.program.lower import WRITER
from realrl.runtime.measure.compare import Prediction, RunInfo, compare, predict
from realrl.runtime.measure.performance import Performance
from realrl.runtime.measure.step_timer import StepTimer, StepTimes, measure_clock_offsets
from realrl.runtime.measure.timing_log import TimingLog
from realrl.runtime.prepare.devices import spec_of
from realrl.runtime.prepare.environments import Environments, Measures
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.host_memory import HostMemory, read_memory
from realrl.runtime.processes.messages import pack, unpack
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.store import Store

KEPT_LENGTHS = 1 << 13
"""Number of latest lengths of prompts and answers to keep. It limits memory and the size of messages."""
_REST = 100
"""Minimum pause between two comparisons, as a multiple of the duration of a comparison. Ranks wait
during a comparison, so this keeps their waiting below 1 % of the run."""


class Costs:
    """Collects the measurements of training steps. The rank that writes receives the measurements of all ranks."""

    def __init__(
        self,
        job: Job,
        process: Process,
        roles: Roles,
        profile: Profile | None,
        say: Callable[[str], None],
        environments: Environments | None = None,
    ) -> None:
        """`profile` is used for predictions. If there is no prediction, `say` is called with the reason.
        `environments`: the environment of the recipe, if it has one."""
        self._job, self._process = job, process
        self._profile, self._say = profile, say
        self.timer = StepTimer(
            process.device, held=roles.held, staged=roles.staged, kept_beside=roles.kept_beside
        )
        self.spec = spec_of(job.experiment, job.plan.cluster, process.gpu or "cpu")
        """Devices of the run; None if the planner does not know their kind."""
        phase = job.train
        self._source = phase.plan[_lengths_call(phase.graph).name].output_ranks[0]
        self._prompts, self._answers = deque[int](maxlen=KEPT_LENGTHS), deque[int](maxlen=KEPT_LENGTHS)
        self._waits, self._environment = None if environments is None else environments.measures, Measures()
        self._agents = environments is not None and environments.runs
        self._log = TimingLog()
        self._tokens: int | None = None
        """Number of tokens of all prompts and answers in the last step; None on ranks that do not know it."""
        self._reports = StepReports(process)
        self._offsets = [0.0] * process.world
        self._performance = Performance(
            graph=phase.graph,
            plan=phase.plan,
            models=job.models.stored,
            spec=self.spec,
            profile=profile,
        )
        self.predicted: Prediction | None = None
        """Prediction in the last comparison, on the rank that writes."""
        self._next = 0.0
        """Earliest time at which the next comparison may take place."""

    @property
    def notes(self) -> list[str]:
        """Notes about the source of predicted times, and about metrics that are left out."""
        missing, spec = self._performance.missing, self.spec
        if self._profile is None and missing and spec and all(group.device.cpu for group in spec.groups):
            # One note, because each run of a beginner starts with it.
            functions = ", functions count as 0 s" if self._job.train.graph.functions else ""
            return [
                f"on a CPU without a profile, predicted times are rough{functions}, and MFU and decode bandwidth"
                " are left out; realrl profile measures the CPU"
            ]
        source = self._source_of_times()
        notes = [] if source is None else [f"predictions: {source}"]
        return notes if missing is None else [*notes, missing]

    def _source_of_times(self) -> str | None:
        """Describe where predicted times come from; None if there are no times and no profile."""
        path, graph = str(self._job.experiment.profile), self._job.train.graph
        if self.spec is None and self._profile is None:
            return None
        if self.spec is None:
            return f"no times, because these devices are of an unknown kind; the profile {path} was not used"
        functions = [call.function for call in graph.functions if call.function is not None]
        return "; ".join(describe_times(self._profile, path, self.spec, self._job.models.stored, functions))

    def compare_clocks(self) -> None:
        """Measure the offsets of the ranks' clocks, before the first step. All ranks call this together."""
        self._offsets = measure_clock_offsets(self._process, self._job.plan.cluster.nodes)

    def step(self) -> AbstractContextManager[None]:
        """Return a context that measures its block as one step."""
        if self._waits is not None:
            self._waits.clear()  # of evaluations
        return self.timer.step()

    def add_lengths(self, store: Store) -> None:
        """Record the lengths of the prompts and answers of a step."""
        if self._process.rank == self._source:
            prompts, answers = lengths(store, agents=self._agents)
            self._prompts.extend(prompts)
            self._answers.extend(answers)
            self._tokens = sum(prompts) + sum(answers)
            if self._waits is not None:
                self._environment.add(self._waits)

    def report_step(self) -> dict[str, float]:
        """Send the times of a step to the rank that writes.

        Returns performance metrics on the rank that writes, and an empty dict on the other ranks.
        """
        (mine,) = self.timer.take()
        everyone = self._reports.exchange(replace(mine, tokens=self._tokens))
        if everyone is None:
            return {}
        return self._performance.compute(everyone, self._log.add(everyone, self._offsets))

    def collect(self, *, last: bool) -> Comparison | None:
        """Compare all steps so far with the prediction.

        Returns the comparison on the rank that writes, and None on the other ranks.

        Also returns None before the first step. If the previous comparison was too recent, returns None unless this
        is the `last` comparison. All ranks call this together.
        """
        self.compare_clocks()
        lengths = list(self._prompts), list(self._answers), self._environment.times(agents=self._agents)
        mine = (self.timer.reserved, read_memory(), *lengths)
        everyone = self._process.gather(mine)
        if self._process.rank != WRITER:
            return None
        start = time.monotonic()
        if not self._log.step.seconds or (start < self._next and not last):
            return None
        *_, prompts, answers, environment = everyone[self._source]
        memories = [memory for _, memory, *_ in everyone]
        info = RunInfo(
            job=self._job,
            spec=self.spec,
            software=read_versions(),
            prompts=prompts,
            answers=answers,
            environment=environment,
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
        """Compare the costs with a prediction, or without one if predicting fails.

        A failing prediction must not end a run.
        """
        try:
            self.predicted = predict(info, self._profile)
            return compare(info, self.predicted, self._log)
        except Exception as error:
            self._say(f"steps are compared without a prediction: {type(error).__name__}: {error}")
        self.spec = self.predicted = None
        return compare(replace(info, spec=None), None, self._log)


def _lengths_call(graph: DataflowGraph) -> Call:
    """Find the call whose ranks know the lengths of prompts and answers.

    This is the first generate call or, if there is none, the first train call.
    """
    of_kind = {kind: [call for call in graph.order if call.kind is kind] for kind in Kind}
    return (of_kind[Kind.GENERATE] or of_kind[Kind.TRAIN])[0]


def lengths(store: Store, *, agents: bool = False) -> tuple[list[int], list[int]]:
    """Return the lengths of all prompts and of all answers in a step, in tokens.

    With `agents`, rows begin with a single token, and an answer is a whole conversation without this token.

    Call this on a rank that knows the lengths: an output rank of the first generate call. If no call generates,
    prompts are the sequences of the first train call, and there are no answers.
    """
    graph = store.graph
    call = _lengths_call(graph)
    prompts = [length for key in call.work for length in store.lengths[key]]
    if call.kind is not Kind.GENERATE:
        return prompts, []
    made = next(key for key in call.outputs if graph.keys[key].length == "own")
    if agents:
        prompts = [1] * len(prompts)
    return prompts, [whole - prompt for whole, prompt in zip(store.lengths[made], prompts, strict=True)]


_TAG = 1 << 22
"""Tag of these messages. It is above all tags that `Exchange` uses."""


class StepReports:
    """Sends this rank's times to the rank that writes, which receives the times of all ranks.

    Only the receiving rank waits, after its own part of the step. All other ranks continue.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def exchange(self, mine: StepTimes) -> list[StepTimes] | None:
        """Send this rank's times of a step.

        Returns the times of all ranks, in order, on the rank that writes; otherwise None.
        """
        if self._process.rank == WRITER:
            others = range(1, self._process.world)
            return [mine, *(self._take(rank) for rank in others)]
        for work, _ in self._under_way:
            work.wait()
        message = torch.frombuffer(bytearray(pack(mine)), dtype=torch.uint8)
        self._under_way = [self._post(torch.tensor([len(message)])), self._post(message)]
        return None

    def _post(self, message: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        work = dist.isend(message, WRITER, group=self._process.control, tag=_TAG)
        assert work is not None, "this rank is part of the control group"
        return work, message

    def _take(self, rank: int) -> StepTimes:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._process.control, tag=_TAG)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(message, rank, group=self._process.control, tag=_TAG)
        found = unpack(message.numpy().tobytes())
        assert isinstance(found, StepTimes), "nothing else has this tag"
        return found
