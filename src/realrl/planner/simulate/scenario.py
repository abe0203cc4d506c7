"""A step to plan: what is computed, with which models, on which devices, at what cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from realrl.dataflow.graph import DataflowGraph
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.cost.model import CostModel
from realrl.planner.memory.model import MemoryModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored
from realrl.program.order import Parts


@dataclass(frozen=True)
class Scenario:
    """All that a plan's time and memory depend on. `models` are by role."""

    graph: DataflowGraph
    models: Mapping[str, Stored]
    spec: ClusterSpec
    workload: Workload
    cost: CostModel
    memory: MemoryModel

    @property
    def parts(self) -> Parts:
        """What training updates of each role."""
        return {role: model.part for role, model in self.models.items()}

    def on(self, spec: ClusterSpec) -> "Scenario":
        """The same step on other devices."""
        cost = CostModel(spec, self.cost.profile, self.cost.efficiency)
        return replace(self, spec=spec, cost=cost, memory=MemoryModel(spec, self.memory.efficiency))
