"""Evaluation: metrics of the evaluation graph over all its records, and samples where it generates."""

from collections.abc import Sequence
from typing import Any

from realrl.algorithms.method import Metrics
from realrl.config.user_function import UserFunction
from realrl.data.dataset import Dataset
from realrl.data.order import split_eval_batches
from realrl.engine.generation.sampling import SamplingSeed
from realrl.program.lower import WRITER
from realrl.recipe.graphs import SAMPLED
from realrl.runtime.output.metric_notes import JUDGE
from realrl.runtime.prepare.compile import Phase
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.worker import StepInput, Worker

_NOISE_STEP = 1 << 40
"""Step of the evaluation's sampling noise, which training never reaches.

The noise is the same at every evaluation, so differences between them are the model's.
"""


class Evaluation:
    """Runner of the evaluation graph over a data set, on every rank; metrics and samples arrive at the writer."""

    def __init__(
        self,
        process: Process,
        worker: Worker,
        phase: Phase,
        records: Dataset,
        *,
        batch: int,
        seed: int,
        tokenizer: Any,
        judge: UserFunction | None,
        sample_keys: Sequence[str],
    ) -> None:
        """`sample_keys` are those that samples show, see `AlgorithmSpec.sample_keys`."""
        self._process, self._worker, self._phase, self._records = process, worker, phase, records
        dp = max(placement.strategy.dp for placement in phase.plan.placements.values())
        self._batches = split_eval_batches(len(records), max(batch, 2 * dp))
        self._seed, self._tokenizer, self._judge = seed, tokenizer, judge
        self._sample_keys = tuple(sample_keys)

    def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluate: metrics by `call/name`, and a row per sample; both empty except on the rank that writes."""
        totals: dict[str, Metrics] = {}
        samples: list[dict[str, Any]] = []
        program = self._phase.programs[self._process.rank]
        for indices in self._batches:
            store = Store(self._phase.graph, self._phase.plan)
            seed = SamplingSeed(self._seed, _NOISE_STEP, first_sequence=indices[0])
            step = StepInput(
                self._records.batch(indices),
                seed,
                {},
                further=self._records.further_fields(indices),
                origins=self._records.list_origins(indices),
                evaluation=True,
            )
            by_call = self._worker.run(program, store, step)
            for call, found in by_call.items():
                totals.setdefault(call, Metrics()).update(found)
            samples += self._samples(store)
        if self._process.rank != WRITER:
            totals, samples = {}, []
        named = flatten(totals)
        with self._process.together():
            if self._judge is not None and samples:
                named[JUDGE] = _ask(self._judge, samples)
        return named, samples

    def _samples(self, store: Store) -> list[dict[str, Any]]:
        """List what this step generated, in the order of its items, on the rank that writes."""
        if store.graph.producer("sequences") is None:
            return []
        keys = (*SAMPLED, *self._sample_keys)
        mine = {key: self._held(store, key) for key in keys}
        everyone = self._process.gather(mine)
        rows = {key: {i: row for part in everyone for i, row in part[key].items()} for key in keys}
        return [self._sample({key: rows[key][i] for key in keys}) for i in range(store.size)]

    def _held(self, store: Store, key: str) -> dict[int, list[float]]:
        """List the rows of a key that this rank produced."""
        call = store.graph.producer(key)
        assert call is not None, "only produced keys are asked for"
        placement = store.plan[call.name]
        if self._process.rank not in placement.output_ranks:
            return {}
        ids = store.items(call, placement.dp_index(self._process.rank))
        return {i: row.tolist() for i, row in zip(ids, store.rows(key, ids).rows(), strict=True)}

    def _sample(self, row: dict[str, list[Any]]) -> dict[str, Any]:
        length = int(row["prompt_length"][0])
        texts = [row["sequences"][:length], row["sequences"][length:]]
        prompt, completion = (self._tokenizer.decode(t, skip_special_tokens=True) for t in texts)
        sample: dict[str, Any] = {"prompt": prompt, "completion": completion}
        sample["finished"] = bool(row["finished"][0])
        return sample | {key: row[key][0] for key in self._sample_keys}


def _ask(judge: UserFunction, samples: list[dict[str, Any]]) -> float:
    """Add the judge's scores to the samples; return their mean. UserCodeError when it gives no scores."""
    scores = judge.numbers(len(samples), [sample["completion"] for sample in samples])
    for sample, score in zip(samples, scores, strict=True):
        sample["judge"] = score
    return sum(scores) / len(scores)


def flatten(by_call: dict[str, Metrics]) -> dict[str, float]:
    """Flatten metrics to plain numbers by `call/name`."""
    return {f"{call}/{name}": value for call, m in by_call.items() for name, value in m.result().items()}
