"""Random small models and placements."""

from hypothesis import strategies as st

from realrl.families.adapters import LowRank
from realrl.families.shape import Head, Mixture, ModelShape
from realrl.layout.layout import Layout, build_layout
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Models whose sizes divide badly."""
    kv_heads = draw(st.integers(1, 3))
    experts = draw(st.sampled_from([0, 0, 2, 4, 6]))
    return ModelShape(
        family="qwen3_moe" if experts else draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        mixture=Mixture(experts=experts, per_token=1) if experts else None,
        vocab_size=draw(st.integers(1, 11)),
        hidden_size=draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 9)),
        layers=draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2,
        tied_embeddings=draw(st.booleans()),
        lora=draw(st.sampled_from([None, LowRank(rank=1, targets=("all-linear",))])),
    )


@st.composite
def placements(draw: st.DrawFn, cluster: Cluster, shape: ModelShape) -> Placement:
    """Any placement of a model on any mesh of a cluster."""
    size = draw(st.integers(1, cluster.size))
    mesh = Mesh(draw(st.integers(0, cluster.size - size)), size)
    degrees = [
        (size // (cp * tp * pp), cp, tp, pp)
        for cp in range(1, size + 1)
        for tp in range(1, min(size, shape.heads) + 1)
        for pp in range(1, min(size, shape.layers) + 1)
        if size % (cp * tp * pp) == 0
    ]
    dp, cp, tp, pp = draw(st.sampled_from(degrees))
    zero = draw(st.sampled_from([1, 3])) if dp * cp > 1 else 1
    experts = 1 if shape.mixture is None else shape.mixture.experts
    divisors = [ep for ep in range(1, experts + 1) if experts % ep == 0 == size // pp % ep]
    ep = draw(st.sampled_from([ep for ep in divisors if ep % tp == 0 or tp % ep == 0]))
    turns = shape.layers // pp if pp > 1 == zero else 1
    vpp = draw(st.integers(1, turns))
    return Placement(mesh, Strategy(dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp, ep=ep, zero=zero))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to four nodes of up to six devices each."""
    return Cluster.of_nodes(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout, Cluster]:
    """Two layouts of a model on one cluster."""
    cluster, shape = draw(clusters()), draw(shapes())
    head: Head = draw(st.sampled_from(["lm", "scalar"]))
    source, target = (build_layout(shape, head, draw(placements(cluster, shape))) for _ in range(2))
    return source, target, cluster
