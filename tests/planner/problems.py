"""Models, calls and placements for tests of the cost and memory models."""

from dataclasses import replace

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Call
from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

GRAPH = train_graph(minibatches=4)
NODES = ClusterSpec.parse("a100-80g:4x8")
SMALL = SHAPES["llama-2-7b"]
LARGE = SHAPES["llama-2-70b"]
GROUPED = ModelShape(
    vocab_size=101, hidden_size=48, intermediate_size=100, layers=5, heads=6, kv_heads=2, head_dim=8
)
"""Shape whose sizes no parallel degree divides."""
STEP = Workload(256, (128,), (384,), 384)
KINDS = ("actor.generate", "ref.inference", "actor.train")


def drop_tables(spec: ClusterSpec) -> ClusterSpec:
    """A cluster without tables of measured operators, whose times are those of formulas alone."""
    groups = [replace(group, device=replace(group.device, measured=None)) for group in spec.groups]
    return ClusterSpec(spec.name, tuple(groups))


BARE_NODES = drop_tables(NODES)


def call(name: str) -> Call:
    """A call of PPO."""
    return GRAPH.call(name)


def stored(shape: ModelShape, head: Head = "lm", dtype: Dtype = "bfloat16") -> StoredModel:
    """A role's model."""
    return StoredModel(shape, head, dtype, trained=True)


def recomputing(placement: Placement) -> Placement:
    """Add recomputation to a placement."""
    return replace(placement, strategy=replace(placement.strategy, recompute=True))


def place(dp: int, tp: int = 1, pp: int = 1, *, tokens: int = 8192, sp: bool = False) -> Placement:
    """A placement from rank 0 on."""
    strategy = Strategy(dp=dp, tp=tp, pp=pp, micro_batch_tokens=tokens, sequence_parallel=sp)
    return Placement(Mesh(0, dp * tp * pp), strategy)
