"""Keeper of all that a run continues from besides tensors: collects it from its parts, and gives it back."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from realrl.algorithms.base.method import Algorithm, FunctionMethod, StatefulMethod
from realrl.dataflow.call import Kind
from realrl.runtime.evaluation.best import BestEvaluation
from realrl.runtime.output.notes import StepNotes
from realrl.runtime.output.run_state import RunState
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.compile import Phase
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.roles import Roles


def gather_algorithm_state(process: Process, phase: Phase, algorithm: Algorithm) -> dict[str, Any]:
    """Gather what an algorithm saves, on all ranks: the state of the first rank of the first train call."""
    first = next(call for call in phase.graph.order if call.kind is Kind.TRAIN)
    states: list[dict[str, Any]] = process.gather(algorithm.state_dict())
    return states[phase.plan[first.name].ranks[0]]


class DataPosition(Protocol):
    """Holder of the number of records taken of the data, and of what identifies the data and what scores."""

    taken: int
    data: dict[str, int]
    scoring: dict[str, int]


class StateKeeper:
    """Collector of the state of a run, on every rank."""

    def __init__(
        self,
        process: Process,
        phase: Phase,
        roles: Roles,
        training: DataPosition,
        directory: RunDirectory,
        notes: StepNotes,
        best: BestEvaluation,
        functions: Mapping[str, FunctionMethod],
        algorithm: Callable[[], Algorithm],
    ) -> None:
        """`phase` is that of training steps, `functions` those that this rank calls, by call; `algorithm` gives the
        one that is used now."""
        self._process, self._phase, self._roles, self._training = process, phase, roles, training
        self._directory, self._notes, self._best, self._algorithm = directory, notes, best, algorithm
        self._functions = {
            call: method
            for call, method in functions.items()
            if call in phase.plan.placements and isinstance(method, StatefulMethod)
        }

    @property
    def taken(self) -> int:
        """Records taken of the data."""
        return self._training.taken

    @taken.setter
    def taken(self, count: int) -> None:
        self._training.taken = count

    @property
    def data(self) -> dict[str, int]:
        """Number of the training items, and a checksum of them."""
        return self._training.data

    def gather_scoring(self) -> dict[str, int]:
        """Gather checksums of what scores, of all ranks: not every rank keeps every field."""
        return dict(item for part in self._process.gather(self._training.scoring) for item in part.items())

    def collect(self, step: int, *, seconds: float, evaluated: int | None, rollbacks: int) -> RunState:
        """Collect the state after so many steps; arguments as the fields of it."""
        trainers: dict[str, dict[str, Any]] = {}
        functions: dict[str, list[Any]] = {}
        of_rank = (
            {role: trainer.state_dict() for role, trainer in self._roles.trainers.items()},
            {call: method.state_dict() for call, method in self._functions.items()},
        )
        for rank, (of_trainers, of_functions) in enumerate(self._process.gather(of_rank)):
            for role, state in of_trainers.items():
                # A rank with nothing to train counts no steps.
                if role not in trainers or state["steps"] > trainers[role]["steps"]:
                    trainers[role] = state
            for call, state in of_functions.items():
                if state is not None and rank in self._phase.plan[call].output_ranks:
                    functions.setdefault(call, []).append(state)
        return RunState(
            step=step,
            taken=self._training.taken,
            seconds=seconds,
            metrics_bytes=self._directory.metrics_bytes,
            evaluated=evaluated,
            data=self.data,
            scoring=self.gather_scoring(),
            algorithm=gather_algorithm_state(self._process, self._phase, self._algorithm()),
            trainers=trainers,
            functions=functions,
            best=None if self._best.settings is None else self._best.to_json(),
            rollbacks=rollbacks,
            notes=self._notes.state_dict(),
        )

    def give_back(self, state: RunState) -> None:
        """Give every part of the run its state back."""
        self._algorithm().load_state_dict(dict(state.algorithm))
        for role, trainer in self._roles.trainers.items():
            trainer.load_state_dict(state.trainers[role])
        for call, method in self._functions.items():
            saved = state.functions.get(call, [])
            if saved:
                ranks = self._phase.plan[call].output_ranks
                # On another number of ranks, all go on from what the first one had.
                mine = ranks.index(self._process.rank) if len(saved) == len(ranks) else 0
                method.load_state_dict(json.loads(json.dumps(saved[mine])))
        self._training.taken = state.taken
        self._notes.load_state_dict(state.notes)
        self._best.restore(state.best or {})
