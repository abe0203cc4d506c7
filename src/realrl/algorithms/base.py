"""Shared defaults of algorithms and train methods."""

from collections.abc import Mapping

from realrl.algorithms.method import Method, Metrics, Sum
from realrl.data.batch import Batch
from realrl.dataflow.graph import DataflowGraph


class StatelessAlgorithm:
    """Algorithm of graphs and a table of methods, without state."""

    def __init__(
        self,
        *,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        methods: dict[str, Method],
        temperature: float = 1.0,
    ) -> None:
        self.graph = graph
        self.eval_graph = eval_graph
        self.temperature = temperature
        self._methods = methods

    def method(self, call: str) -> Method:
        """Find the method of a call of either graph; KeyError if there is none of that name."""
        return self._methods[call]

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """List no notes."""
        return []

    def state_dict(self) -> dict[str, float]:
        """Save nothing."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load nothing."""


class PlainTrain:
    """Defaults of a train method: one epoch, nothing to prepare, no early stop."""

    epochs: int = 1
    entropy: bool = False

    @property
    def head_scale(self) -> float:
        """Return 1: the head has the learning rate of all other parameters."""
        return 1.0

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Return the batch as it is."""
        return batch, Metrics()

    def stop(self, metrics: dict[str, float]) -> bool:
        """Return False always."""
        return False

    def finish(self) -> Metrics:
        """Return no metrics."""
        return Metrics()
