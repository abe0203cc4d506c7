"""Evaluations of a training run."""

from collections.abc import Mapping
from typing import Any

from realrl.algorithms.rewards.judge import load_judge
from realrl.data.dataset import Dataset
from realrl.model.group import Group
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.evaluate import Evaluation
from realrl.runtime.evaluation.answers import EvaluationResult
from realrl.runtime.evaluation.best import BestEvaluation
from realrl.runtime.evaluation_run import Opponent, make_opponent
from realrl.runtime.prepare.compile import Compiled
from realrl.runtime.processes.process import Process
from realrl.runtime.setup import RecordLoader
from realrl.runtime.worker.worker import Worker


class TrainingEvaluations:
    """Evaluations of a run on one rank: their records, the model they compare with, and the best one so far."""

    def __init__(
        self,
        experiment: Experiment,
        compiled: Compiled,
        worker: Worker,
        loader: RecordLoader,
        *,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        tokenizer: Any,
    ) -> None:
        """`groups` are those of all placements. UserError for mistakes that show without weights."""
        self._process = process
        self.best = BestEvaluation(experiment.evaluation.best)
        self.records: Dataset | None = None
        self._evaluation: Evaluation | None = None
        self._opponent: Opponent | None = None
        if compiled.evaluation is not None:
            # Code of the user's runs once: on the rank that asks the judge.
            judge = load_judge(experiment.evaluation.judge) if process.rank == WRITER else None
            self.records = records = loader.load_eval(compiled.evaluation, judge)
            self._evaluation = Evaluation(
                experiment, process, worker, compiled.evaluation, records, tokenizer=tokenizer, judge=judge
            )
            origins = records.list_origins(range(len(records)))
            self._opponent = make_opponent(experiment, compiled.train.plan, process, groups, origins)

    def face_opponent(self) -> None:
        """Have the model of `evaluation.against` answer, before any other is loaded."""
        if self._opponent is not None and self._evaluation is not None:
            self._evaluation.face(self._opponent.answer())
            self._opponent = None

    def run(self) -> EvaluationResult | None:
        """Evaluate the weights of now; None in a run without evaluations. UserCodeError as `Evaluation.run`."""
        if self._evaluation is None:
            return None
        with self._process.activity.part("eval"):
            return self._evaluation.run()
