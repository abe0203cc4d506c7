"""Evaluate the models in memory: run the evaluation graph over all its records, and collect metrics and answers."""

from collections.abc import Iterator, Sequence
from typing import Any

from realrl.algorithms.base.method import Metrics, find_last_turn
from realrl.algorithms.rewards.scorers import Judge
from realrl.data.dataset import Dataset
from realrl.data.order import split_eval_batches
from realrl.dataflow.environment import (
    ACTION_MASK,
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REWARD,
    FAILED_CALLS,
    OUTPUTS,
    TRAJECTORY,
    TURN_REWARDS,
    TURNS,
)
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.program.lower import WRITER
from realrl.recipe.algorithm import SCORE
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import SAMPLED
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.evaluation.answers import Answer, AnswerMetrics, EvaluationResult
from realrl.runtime.prepare.job import Phase
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.worker import StepInput, Worker

_NOISE_STEP = 1 << 40
"""Number of the step whose sampling noise evaluations use. Training never reaches this step.

The noise is the same at every evaluation, so differences between evaluations come from the model.
"""


class Evaluation:
    """Runs the evaluation graph over a data set, on every rank. The rank that writes gets the result."""

    def __init__(
        self,
        experiment: Experiment,
        process: Process,
        worker: Worker,
        phase: Phase,
        records: Dataset,
        *,
        tokenizer: Any,
        judge: Judge | None,
    ) -> None:
        """`judge` is None on ranks that do not call it, and if the recipe has no judge."""
        self._process, self._worker, self._phase, self._records = process, worker, phase, records
        self._tokenizer, self._seed = tokenizer, experiment.seed
        spec, self._settings = experiment.spec, experiment.evaluation
        self._stop = StopStrings.of(tokenizer, spec.eval_generation(experiment))
        self._samples = self._settings.samples
        dp = max(placement.strategy.dp for placement in phase.plan.placements.values())
        batch = experiment.data.eval_batch or experiment.data.batch
        self._batches = split_eval_batches(len(records), max(batch, 2 * dp))
        self._judge = judge
        self._shown_keys = spec.sample_keys
        reader = spec.answers(experiment) if spec.answers is not None and self._settings.majority_at else None
        scored = phase.graph.producer(SCORE) is not None and phase.graph.length_key(SCORE) is None
        self._keys = dict.fromkeys(
            (
                *spec.sample_keys,
                *([SCORE] if scored else []),
                *([reader.key] if reader is not None else []),
            )
        )
        self._collected = dict.fromkeys((*SAMPLED, *self._keys))
        if experiment.environment_config is not None:
            self._collected |= dict.fromkeys(OUTPUTS)
        self._metrics = AnswerMetrics(self._settings, reader)
        self._opponents: list[Answer] | None = None

    def face(self, others: EvaluationResult) -> None:
        """From now on, compare the answers with another model's answers to the same prompts."""
        self._opponents = others.answers

    def run(self) -> EvaluationResult:
        """Evaluate once. Raises UserCodeError if a function or the judge fails."""
        totals: dict[str, Metrics] = {}
        answers: list[Answer] = []
        program = self._phase.programs[self._process.rank]
        for records in self._batches:
            phase = self._phase
            store = Store(phase.graph, phase.plan, phase.attention_costs, self._samples)
            # The samples of a prompt are consecutive items: prompt = item // samples.
            indices = [i for i in records for _ in range(self._samples)]
            step = StepInput(
                self._records.batch(indices),
                SamplingSeed(self._seed, _NOISE_STEP, first_sequence=records[0] * self._samples),
                {},
                further=self._records.further_fields(indices),
                origins=self._records.list_origins(indices),
                samples=self._samples,
                evaluation=True,
            )
            by_call = self._worker.run(program, store, step)
            for call, found in by_call.items():
                totals.setdefault(call, Metrics()).update(found)
            answers += self._collect(store)
        result = EvaluationResult()
        with self._process.together():
            if self._process.rank == WRITER:
                if self._judge is not None:
                    with self._process.activity.run_function(self._settings.judge or ""):
                        self._ask(self._judge, answers)
                metrics = flatten(totals) | self._metrics.compute(answers, self._opponents)
                metrics |= _count_left_out(self._records)
                rows = self._metrics.write_rows(answers, self._opponents, self._shown_keys)
                result = EvaluationResult(metrics, answers, rows)
        return result

    def _ask(self, judge: Judge, answers: Sequence[Answer]) -> None:
        """Add the judge's scores to all answers. Raises UserCodeError if the judge fails."""
        records = [i for i in range(len(self._records)) for _ in range(self._samples)]
        scores = judge.rate(
            {
                **self._records.further_fields(records),
                "prompts": [answer.prompt for answer in answers],
                "completions": [answer.completion for answer in answers],
                "completion_ids": [list(answer.tokens) for answer in answers],
            }
        )
        for answer, score in zip(answers, scores, strict=True):
            answer.judge = score

    def _collect(self, store: Store) -> list[Answer]:
        """Collect the answers of a step in the order of its items, on the rank that writes."""
        if store.graph.producer("sequences") is None:
            return []
        keys = self._collected
        mine = {key: self._held(store, key) for key in keys}
        everyone = self._process.gather(mine)
        if self._process.rank != WRITER:
            return []
        rows = {key: {i: row for part in everyone for i, row in part[key].items()} for key in keys}
        return [self._answer({key: rows[key][i] for key in keys}) for i in range(store.size)]

    def _held(self, store: Store, key: str) -> dict[int, list[float]]:
        """Return the rows of a graph value that this rank has produced, by item. `key` is the name of the value."""
        call = store.graph.producer(key)
        assert call is not None, "only produced keys are asked for"
        placement = store.plan[call.name]
        if self._process.rank not in placement.output_ranks:
            return {}
        ids = store.items(call, placement.item_index(self._process.rank))
        return {i: row.tolist() for i, row in zip(ids, store.rows(key, ids).rows(), strict=True)}

    def _answer(self, row: dict[str, list[Any]]) -> Answer:
        length = int(row["prompt_length"][0])
        tokens = scored = row["sequences"][length:]
        trajectory: dict[str, Any] = {}
        if ACTION_MASK in row:
            scored = find_last_turn(tokens, row[ACTION_MASK][length:])
            trajectory = {
                ENVIRONMENT_REWARD: row[ENVIRONMENT_REWARD][0],
                TURNS: int(row[TURNS][0]),
                FAILED_CALLS: int(row[FAILED_CALLS][0]),
                ENVIRONMENT_FAILED: bool(row[ENVIRONMENT_FAILED][0]),
                TRAJECTORY: list(self._list_parts(tokens, row, length)),
            }
        prompt, completion = (
            self._tokenizer.decode(part, skip_special_tokens=True)
            for part in (row["sequences"][:length], scored)
        )
        if self._stop is not None:
            completion = self._stop.cut(scored)
        return Answer(
            prompt=prompt,
            completion=completion,
            tokens=tokens,
            finished=bool(row["finished"][0]),
            values={key: row[key][0] for key in self._keys},
            trajectory=trajectory,
        )

    def _list_parts(
        self, tokens: list[int], row: dict[str, list[Any]], start: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the parts of a trajectory: turns of the model, and what stands before each of them.

        A part has its text with special tokens, its number of tokens, whether the model has sampled it, and the
        reward of the turn unless it is 0. `start`: length of the prompt.
        """
        mask, rewards = row[ACTION_MASK][start:], row[TURN_REWARDS][start:]
        begin = 0
        for end in range(1, len(tokens) + 1):
            reward = rewards[end - 1]
            # A reward ends a turn, even if the environment has written nothing after it.
            if end == len(tokens) or mask[end] != mask[end - 1] or reward:
                part = {
                    "text": self._tokenizer.decode(tokens[begin:end], skip_special_tokens=False),
                    "tokens": end - begin,
                    "sampled": bool(mask[begin]),
                }
                yield part | ({"reward": reward} if reward else {})
                begin = end


def _count_left_out(records: Dataset) -> dict[str, float]:
    """Count the skipped records, and how many of them were too long. Empty if no record was skipped."""
    if not records.skipped:
        return {}
    return {"skipped_records": records.skipped, "too_long_records": records.too_long}


def flatten(by_call: dict[str, Metrics]) -> dict[str, float]:
    """Flatten metrics to plain numbers by `call/name`."""
    return {f"{call}/{name}": value for call, m in by_call.items() for name, value in m.result().items()}
