"""Evaluate during training, and keep track of the best evaluation so far."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from realrl.algorithms.rewards.scorers import load_judge
from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.data.dataset import Dataset
from realrl.model.group import Group
from realrl.program.lower import WRITER
from realrl.recipe.evaluation import BestConfig
from realrl.runtime.evaluation.answers import EvaluationResult
from realrl.runtime.evaluation.evaluate import Evaluation
from realrl.runtime.evaluation.run import Opponent, make_opponent
from realrl.runtime.prepare.inputs import RecordLoader
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.worker import Worker


class BestEvaluation:
    """The best evaluation so far by a metric. Of equal values, the first one counts."""

    def __init__(self, settings: BestConfig | None) -> None:
        """`settings` is None if the run does not keep the best evaluation."""
        self.settings = settings
        self._step: int | None = None
        self._value: float | None = None

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of an evaluation after `step` training steps. Returns whether it is the best so far.

        A value that is not finite is never the best. Raises UserError if `metrics` lacks the configured metric.
        """
        assert self.settings is not None, "a best evaluation is kept"
        name = self.settings.metric
        if name not in metrics:
            hint = nearest(name, metrics)
            known = f"did you mean {hint}?" if hint else f"there are {', '.join(metrics)}"
            raise UserError(f"evaluation.best.metric={name}: evaluations have no such metric; {known}")
        value = metrics[name]
        if not isfinite(value):
            return False
        sign = 1 if self.settings.keep == "highest" else -1
        if self._value is not None and sign * value <= sign * self._value:
            return False
        self._step, self._value = step, value
        return True

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load what `to_json` returned, unless it was for another metric."""
        if self.settings is not None and saved.get("metric") == self.settings.metric:
            self._step, self._value = saved["step"], saved["value"]

    def to_json(self) -> dict[str, Any]:
        """Return the metric, its best value, and the number of training steps before the best evaluation."""
        assert self.settings is not None, "a best evaluation is kept"
        return {"metric": self.settings.metric, "value": self._value, "step": self._step}


class TrainingEvaluations:
    """Evaluations of a training run on one rank: their records, the opponent, and the best evaluation so far.

    The opponent is the model of `evaluation.against`.
    """

    def __init__(
        self,
        job: Job,
        worker: Worker,
        loader: RecordLoader,
        *,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        tokenizer: Any,
    ) -> None:
        """`groups` are the communication groups of all placements, by their ranks.

        Raises UserError for mistakes that can be found without weights.
        """
        self._process, experiment = process, job.experiment
        self.best = BestEvaluation(experiment.evaluation.best)
        self.records: Dataset | None = None
        self._evaluation: Evaluation | None = None
        self._opponent: Opponent | None = None
        if job.evaluation is not None:
            # The user's judge runs in one process only: on the rank that calls it.
            judge = load_judge(experiment.evaluation.judge) if process.rank == WRITER else None
            self.records = records = loader.load_eval(job.evaluation, judge)
            self._evaluation = Evaluation(
                experiment, process, worker, job.evaluation, records, tokenizer=tokenizer, judge=judge
            )
            origins = records.list_origins(range(len(records)))
            self._opponent = make_opponent(experiment, job.plan, process, groups, origins)

    def face_opponent(self) -> None:
        """Let the model of `evaluation.against` answer the prompts, before any other model is loaded."""
        if self._opponent is not None and self._evaluation is not None:
            self._evaluation.face(self._opponent.answer())
            self._opponent = None

    def run(self) -> EvaluationResult | None:
        """Evaluate the current weights. Returns None if the recipe has no evaluations.

        Raises UserCodeError like `Evaluation.run`.
        """
        if self._evaluation is None:
            return None
        with self._process.activity.part("eval"):
            return self._evaluation.run()
