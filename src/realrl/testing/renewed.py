"""Run whose algorithm is made anew after every step, from the state that it saves."""

import json
from typing import Any

from realrl.algorithms.build import build_algorithm
from realrl.runtime.continuation import gather_algorithm_state
from realrl.runtime.prepare.inputs import load_functions
from realrl.runtime.training_run import TrainingRun


class RenewedRun(TrainingRun):
    """Run in which nothing of an algorithm outlasts a step but what is saved: as where a run goes on from a
    checkpoint, with weights and optimizer as they are."""

    def _train_step(self, step: int) -> dict[str, float]:
        metrics = super()._train_step(step)
        saved = gather_algorithm_state(self.process, self.compiled.train, self.algorithm)
        state: dict[str, Any] = json.loads(json.dumps(saved))
        self.algorithm = build_algorithm(self.experiment)
        self.algorithm.load_state_dict(state)
        load_functions(self.algorithm, self.compiled.phases.values(), self.process.rank)
        self.worker.use(self.algorithm)
        return metrics
