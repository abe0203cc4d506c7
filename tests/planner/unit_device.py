"""Devices on which one resource alone takes time, a second for each unit of it: seconds then are a count."""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf
from typing import Any

from realrl.dataflow.call import Call, Candidates, Kind
from realrl.families.shape import Head, ModelShape
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

SHAPE = ModelShape(
    vocab_size=960, hidden_size=64, intermediate_size=160, layers=4, heads=8, kv_heads=4, head_dim=16
)
"""Small model of which every width is another number: queries are 128 wide, keys 64, their block 160."""
NOTHING = 1e-250
"""Seconds of what takes no time but is divided by."""


def make_efficiency(**values: float) -> Efficiency:
    """All peaks are reached, and nothing is launched, copied or waited for, but for the given values."""
    free: dict[str, Any] = {
        field.name: 0 if field.type in (int, "int") else 0.0
        for field in fields(Efficiency)
        if field.name.endswith(("_passes", "_bytes", "_operations", "_s"))
        and field.name != "host_bytes_per_s"
    }
    whole = {
        "matmul": 1.0,
        "memory": 1.0,
        "attention": 1.0,
        "link": 1.0,
        "host_link": 1.0,
        "exact_forward": 1.0,
    }
    other: dict[str, Any] = {"host_bytes_per_s": inf, "collective_host_s": NOTHING, "overlap": 0.0}
    return replace(Efficiency(), **(free | whole | other | values))


def make_cluster(nodes: int = 1, per_node: int = 8, *, cpu: bool = False, **rates: float) -> ClusterSpec:
    """A cluster of devices that are infinitely fast but for the given rates and latencies."""
    defaults: dict[str, Any] = {
        "bf16_flops": inf,
        "fp32_flops": inf,
        "memory_bytes_per_s": inf,
        "link_bytes_per_s": inf,
        "link_latency_s": 0.0,
        "host_bytes_per_s": inf,
        "node_bytes_per_s": inf,
        "node_latency_s": 0.0,
        "kernel_s": 0.0,
        "groups_products": not cpu,
    }
    device = DeviceKind(
        name="unit", memory_bytes=10**13, host_memory_bytes=10**13, cpu=cpu, **(defaults | rates)
    )
    group = NodeGroup(
        nodes=nodes, devices_per_node=per_node, device=device, node_bytes_per_s=device.node_bytes_per_s
    )
    return ClusterSpec("unit", (group,))


def place(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    cp: int = 1,
    tokens: int = 1 << 20,
    sp: bool = False,
    recompute: bool = False,
) -> Placement:
    """A placement from rank 0 on."""
    strategy = Strategy(
        dp=dp, cp=cp, tp=tp, pp=pp, micro_batch_tokens=tokens, sequence_parallel=sp, recompute=recompute
    )
    return Placement(Mesh(0, strategy.size), strategy)


def store(
    shape: ModelShape = SHAPE, head: Head = "lm", dtype: Dtype = "bfloat16", part: TrainablePart = WHOLE
) -> StoredModel:
    """A role's model."""
    return StoredModel(shape, head, dtype, True, part)


def make_call(kind: Kind, *, minibatches: int = 1, candidates: Candidates | None = None) -> Call:
    """A call with one sequence per item; of a prompt where it generates."""
    name = "prompts" if kind is Kind.GENERATE else "tokens"
    return Call(
        f"actor.{kind.value}",
        "actor",
        kind,
        (name, "teacher_ids"),
        work=(name,),
        minibatches=minibatches,
        candidates=candidates,
    )


def cost(
    kind: Kind,
    workload: Workload,
    placement: Placement,
    cluster: ClusterSpec,
    *,
    model: StoredModel | None = None,
    minibatches: int = 1,
    candidates: Candidates | None = None,
    **efficiency: float,
) -> Mapping[str, float]:
    """The terms of a call."""
    costs = CostModel(cluster, efficiency=make_efficiency(**efficiency))
    call = make_call(kind, minibatches=minibatches, candidates=candidates)
    return costs.call(call, model or store(), placement, workload).terms
