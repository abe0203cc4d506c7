"""Scenario of a step: graph, models, cluster, workload, cost and memory models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.failures import Failures
from realrl.planner.cost.cost_model import CallCost, CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.program.order import TrainableParts


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Inputs of a plan's predicted time and memory. `models` maps roles to models."""

    graph: DataflowGraph
    models: Mapping[str, StoredModel]
    spec: ClusterSpec
    workload: Workload
    cost: CostModel
    memory: MemoryModel
    failures: Failures | None = None
    """Failures that the run is expected to meet. If they are given, plans are compared by their expected step."""

    @property
    def parts(self) -> TrainableParts:
        """Part of each role that training updates."""
        return {role: model.part for role, model in self.models.items()}

    @property
    def keeps_graphs(self) -> bool:
        """Whether generate calls keep CUDA graphs of decode steps for the next step. They do only if the step
        trains a role."""
        return any(self.graph.trained(role) for role in self.graph.roles)

    def model(self, call: Call) -> StoredModel | None:
        """Look up the model that a call uses. Returns None for a function."""
        return None if call.role is None else self.models[call.role]

    def call_cost(self, call: Call, placement: Placement) -> CallCost:
        """Return the cost of a call in one step.

        Raises UserError if there are fewer records than data-parallel ranks.
        """
        return self.cost.call(call, self.model(call), placement, self.workload)

    def on(self, spec: ClusterSpec) -> "Scenario":
        """Return the scenario on another cluster."""
        cost = CostModel(spec, self.cost.profile, self.cost.efficiency)
        return replace(self, spec=spec, cost=cost, memory=MemoryModel(spec, self.memory.efficiency))
