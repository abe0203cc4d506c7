"""Run whose algorithm is made anew after every step, from the state that it saves."""

import json
from collections.abc import Mapping

from realrl.algorithms.build import build_algorithm
from realrl.dataflow.call import Kind
from realrl.runtime.setup import load_functions
from realrl.runtime.train import TrainingRun


class RenewedRun(TrainingRun):
    """Run in which nothing of an algorithm outlasts a step but what is saved: as where a run goes on from a
    checkpoint, with weights and optimizer as they are."""

    def _train_step(self, step: int) -> None:
        super()._train_step(step)
        state = self._gather_state()
        self.algorithm = build_algorithm(self.experiment)
        self.algorithm.load_state_dict(state)
        load_functions(self.algorithm, self.compiled.phases.values(), self.process.rank)
        self.worker.use(self.algorithm)

    def _gather_state(self) -> dict[str, float]:
        """Gather what a checkpoint would hold: the state of the first rank of the first train call."""
        phase = self.compiled.train
        first = next(call for call in phase.graph.order if call.kind is Kind.TRAIN)
        states: list[Mapping[str, float]] = self.process.gather(self.algorithm.state_dict())
        state: dict[str, float] = json.loads(json.dumps(states[phase.plan[first.name].ranks[0]]))
        return state
