"""Store of the items of a step on one rank: lengths of all of them, rows of some."""

from torch import Tensor

from realrl.data.batch import KEY_DTYPES, Batch, Ragged
from realrl.data.partition import assign
from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan


class Store:
    """Rows by key and item. The assignment of items follows from lengths, the same on every rank."""

    def __init__(self, graph: DataflowGraph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.size = 0
        """Number of items in the step's global batch."""
        self.lengths: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._assignments: dict[str, list[list[list[int]]]] = {}

    def feed(self, batch: Batch) -> None:
        """Add the step's records: values and lengths of every item."""
        self.size = len(batch)
        for key, field in batch.fields.items():
            self.put(key, batch.ids, field)
            self.lengths[key] = field.lengths

    def put(self, key: str, ids: tuple[int, ...] | list[int], rows: Ragged) -> None:
        """Add rows of the items `ids`."""
        self._rows.setdefault(key, {}).update(zip(ids, rows.rows(), strict=True))

    def rows(self, key: str, ids: list[int]) -> Ragged:
        """Select rows of the items `ids`, which this rank must hold."""
        held = self._rows[key]
        return Ragged.of([held[i] for i in ids], dtype=KEY_DTYPES[self.graph.keys[key].dtype])

    def row_lengths(self, key: str, ids: list[int]) -> tuple[int, ...]:
        """Find the lengths of the rows of `key`, held here or not."""
        length_key = self.graph.length_key(key)
        if length_key is None:
            return (1,) * len(ids)
        return tuple(self.lengths[length_key][i] for i in ids)

    def assignment(self, call: Call) -> list[list[list[int]]]:
        """Assign items of `call` to ranks: [dp][mini-batch] -> ids, ascending."""
        if call.name not in self._assignments:
            everyone = list(range(self.size))
            columns = [self.row_lengths(key, everyone) for key in call.work]
            costs = [sum(item) for item in zip(*columns, strict=True)]
            self._assignments[call.name] = assign(
                costs, minibatches=call.minibatches, dp=self.plan[call.name].strategy.dp
            )
        return self._assignments[call.name]

    def items(self, call: Call, dp: int) -> list[int]:
        """List the ids of all items that a data-parallel rank of `call` works on, ascending."""
        return sorted(i for minibatch in self.assignment(call)[dp] for i in minibatch)

    def batch(self, call: Call, dp: int) -> Batch:
        """Collect the call's inputs for a data-parallel rank."""
        ids = self.items(call, dp)
        return Batch(tuple(ids), {key: self.rows(key, ids) for key in call.inputs})
