"""Items of a step on one rank: the lengths of all items, and the rows of some items."""

from collections.abc import Mapping

from torch import Tensor

from realrl.data.balance import assign, partition_samples, partition_shared
from realrl.data.batch import KEY_DTYPES, Batch, Ragged
from realrl.dataflow.call import Call, Kind, can_share_prompts
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.limits import LEAST_SHARED
from realrl.plan.plan import Plan


class Store:
    """Rows by key (named data, such as `sequences`) and item (a prompt, pair or answer).

    The assignment of items to ranks depends only on lengths, so every rank computes the same assignment.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: Plan,
        attention_costs: Mapping[str, float],
        samples: int = 1,
    ) -> None:
        """`attention_costs`: by role, see `families.sizes.estimate_attention_cost`. `samples`: samples per prompt;
        items i * `samples` to (i + 1) * `samples` - 1 have the i-th prompt."""
        self.graph = graph
        self.plan = plan
        self.samples = samples
        self.attention_costs = attention_costs
        self.size = 0
        """Number of items in the step's global batch."""
        self.lengths: dict[str, tuple[int, ...]] = {}
        """Row lengths by key. In a step with portions, a length is -1 as long as the row does not exist."""
        self.portion: list[int] | None = None
        """Items of a portion, in ascending order. None if this is not the store of a portion."""
        self._handed_on: set[int] = set()
        """Items of the portions so far."""
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._assignments: dict[str, list[list[list[int]]]] = {}

    def feed(self, batch: Batch) -> None:
        """Add the step's records: the values and lengths of every item."""
        self.size = len(batch)
        for key, field in batch.fields.items():
            self.put(key, batch.ids, field)
            self.lengths[key] = field.lengths

    def put(self, key: str, ids: tuple[int, ...] | list[int], rows: Ragged) -> None:
        """Add the rows of `key` for the items `ids`."""
        self._rows.setdefault(key, {}).update(zip(ids, rows.rows(), strict=True))

    def put_row(self, key: str, item: int, row: Tensor) -> None:
        """Add the row of `key` for one item, or replace it."""
        self._rows.setdefault(key, {})[item] = row

    def hand_on(self, key: str) -> "Store":
        """Make a store for the next portion of the step, with the rows and lengths of this store.

        Its items are those of prompts with all their samples, without the items of earlier portions. `key`: the key
        of samples, whose lengths are -1 as long as they go on.
        """
        portion = Store(self.graph, self.plan, self.attention_costs, self.samples)
        portion.size, portion.lengths, portion._rows = self.size, self.lengths, self._rows
        prompts = (range(i, i + self.samples) for i in range(0, self.size, self.samples))
        ended = (items for items in prompts if all(self.lengths[key][item] >= 0 for item in items))
        portion.portion = [item for items in ended for item in items if item not in self._handed_on]
        self._handed_on.update(portion.portion)
        return portion

    def place(self, call: Call, assignment: list[list[int]]) -> None:
        """Set the assignment of items to ranks for a call that has already run.

        `assignment`: for each data-parallel rank, the ids of its items.
        """
        self._assignments[call.name] = [[sorted(ids)] for ids in assignment]

    def row(self, key: str, item: int) -> Tensor | None:
        """Return the row of an item, if this rank holds it."""
        return self._rows.get(key, {}).get(item)

    def rows(self, key: str, ids: list[int]) -> Ragged:
        """Select rows of the items `ids`, which this rank must hold."""
        held = self._rows.get(key, {})
        return Ragged.of([held[i] for i in ids], dtype=KEY_DTYPES[self.graph.keys[key].dtype])

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of which this rank holds rows."""
        return tuple(self._rows)

    def held(self, key: str) -> tuple[list[int], Ragged]:
        """Return the items whose rows of `key` this rank holds, in ascending order, and these rows."""
        items = sorted(self._rows[key])
        return items, self.rows(key, items)

    def row_lengths(self, key: str, ids: list[int]) -> tuple[int, ...]:
        """Return the lengths of rows of `key`, regardless of the rank that holds them."""
        length_key = self.graph.length_key(key)
        if length_key is None:
            return (1,) * len(ids)
        return tuple(self.lengths[length_key][i] for i in ids)

    def assignment(self, call: Call) -> list[list[list[int]]]:
        """Assign the items of `call` to ranks. Returns ascending ids for each data-parallel rank and mini-batch.

        Ranks get about equal work: tokens and, in a model, attention to them. In generation, they get about equal
        numbers of tokens, and all samples of a prompt stay together. In calls that do not train, some ranks may get
        no items.
        """
        if call.name not in self._assignments:
            sampling = call.kind is Kind.GENERATE
            everyone = list(range(self.size)) if sampling or self.portion is None else self.portion
            columns = [self.row_lengths(key, everyone) for key in call.work]
            tokens = [sum(item) for item in zip(*columns, strict=True)]
            dp = self.plan[call.name].strategy.dp
            if sampling and self.samples > 1:
                found = [[items] for items in partition_samples(tokens, self.samples, dp)]
            else:
                costs = [
                    sum(self._estimate_cost(call, n) for n in item) for item in zip(*columns, strict=True)
                ]
                shared = self._find_shared_costs(call, everyone, tokens)
                shared = [min(pair) for pair in zip(shared, costs, strict=True)]
                prompts = [item // self.samples for item in everyone]
                if call.kind is Kind.TRAIN and self.portion is None:
                    found = assign(costs, minibatches=call.minibatches, dp=dp, shared=shared, prompts=prompts)
                else:
                    parts = partition_shared(costs, dp, shared, prompts)
                    found = [[[everyone[i] for i in items]] for items in parts]
            if sampling and self.portion is not None:
                chosen = {*self.portion}
                found = [[[item for item in items if item in chosen]] for (items,) in found]
            self._assignments[call.name] = found
        return self._assignments[call.name]

    def _estimate_cost(self, call: Call, tokens: int) -> int:
        """Estimate the time of a sequence in a call, in the time of a token without attention."""
        attention = 0.0
        if call.role is not None and call.kind is not Kind.GENERATE:
            attention = self.attention_costs.get(call.role, 0.0)
        return tokens + round(attention * tokens**2)

    def _find_shared_costs(self, call: Call, items: list[int], tokens: list[int]) -> list[int]:
        """Find the costs of each item's tokens that a call computes once for all samples of a prompt. They are only
        expected, because agents write prompts of their own. `tokens`: all tokens of the items.

        A prompt is computed more than once if a micro-batch does not have room for all of its samples. Its tokens
        count in proportion.
        """
        strategy = self.plan[call.name].strategy
        shares = not call.is_function and can_share_prompts(call.candidates)
        producers = [self.graph.producer(self.graph.length_key(key) or key) for key in call.work]
        sampled = sum(producer is not None and producer.kind is Kind.GENERATE for producer in producers)
        if not shares or not sampled or self.samples == 1 or "prompts" not in self.lengths:
            return [0] * len(items)
        found = []
        for length, count in zip(self.row_lengths("prompts", items), tokens, strict=True):
            together = max(1, min(self.samples, strategy.micro_batch_tokens // strategy.cp // max(1, count)))
            share = sampled * (1 - 1 / together)
            enough = share * length >= LEAST_SHARED * count
            found.append(round(share * self._estimate_cost(call, length)) if enough else 0)
        return found

    def items(self, call: Call, dp: int) -> list[int]:
        """List the ids of all items that a data-parallel rank of `call` processes, in ascending order."""
        return sorted(i for minibatch in self.assignment(call)[dp] for i in minibatch)

    def batch(self, call: Call, dp: int) -> Batch:
        """Collect the inputs of a call for a data-parallel rank."""
        ids = self.items(call, dp)
        return Batch(tuple(ids), {key: self.rows(key, ids) for key in call.inputs})
