"""The estimate of reallocations that a search uses, against the schedules that workers use."""

import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from realrl.families.shape import Mixture, ModelShape
from realrl.layout.layout import build_layout
from realrl.layout.routing.routes import reallocate
from realrl.plan.axes import Degrees
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Mesh, Placement, Strategy, divides_experts
from realrl.planner.moves.links import Boxes, LinkTransfers, ParameterBytes, TransferTable
from realrl.planner.moves.transfers import TYPES, Layouts
from realrl.program.arrays import Floats
from realrl.program.memory import StoredModel
from tests.plan.meshes import list_tidy

SHAPE = ModelShape(
    vocab_size=512, hidden_size=256, intermediate_size=704, layers=16, heads=8, kv_heads=8, head_dim=32
)
WEIGHTS = {"actor": (ParameterBytes.of(StoredModel(SHAPE, "lm", "bfloat16", trained=True), 2),)}
MIXTURE = SHAPE.model_copy(
    update={"family": "qwen3_moe", "intermediate_size": 64, "mixture": Mixture(experts=8, per_token=2)}
)
MIXTURES = {"actor": (ParameterBytes.of(StoredModel(MIXTURE, "lm", "bfloat16", trained=True), 2),)}
LINKS = Links(170e6, 20e6, 0.0)


def list_placements(layouts: Layouts) -> list[Placement]:
    numbers = (layouts.first, layouts.size, layouts.sharded, layouts.dtype, layouts.ep, layouts.vpp)
    return [
        Placement(
            Mesh(first, size),
            Strategy(
                degrees=Degrees(tuple(degrees)),
                ep=ep,
                vpp=vpp,
                zero=3 if sharded else 1,
                dtype=TYPES[dtype],
            ),
        )
        for first, size, sharded, dtype, ep, vpp, *degrees in zip(
            *(column.tolist() for column in (*numbers, *layouts.degrees)), strict=True
        )
    ]


class PairTransfers:
    """Transfers by a function of one pair, with no bound better than 0."""

    def __init__(self, seconds: Callable[[str, Placement, Placement], float]) -> None:
        self._seconds = seconds

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `LinkTransfers`."""
        pairs = zip(list_placements(source), list_placements(target), strict=True)
        return np.array([self._seconds(role, a, b) if a != b else 0.0 for a, b in pairs], dtype=np.float64)

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `LinkTransfers`."""
        return np.zeros((len(source.first), len(target.first)))


def sampled_placement(
    rng: random.Random, cluster: Cluster, eps: tuple[int, ...] = (1,), turns: tuple[int, ...] = (1,)
) -> Placement:
    mesh = rng.choice(list_tidy(cluster))
    parts = [devices for _, devices in mesh.nodes(cluster).runs]
    tp = rng.choice([t for t in (1, 2, 3, 4, 8) if all(part % t == 0 for part in parts)])
    pp = rng.choice([p for p in (1, 2, 4, 8) if (mesh.size // tp) % p == 0])
    dense = Strategy(dp=mesh.size // tp // pp, tp=tp, pp=pp)
    ep = rng.choice([ep for ep in eps if divides_experts(dense.degrees, ep)])
    vpp = rng.choice([vpp for vpp in turns if vpp == 1 or (pp > 1 and pp * vpp <= SHAPE.layers)])
    return Placement(mesh, dense.with_degrees(ep=ep, vpp=vpp))


@pytest.mark.parametrize("turns", [(1,), (1, 2, 4)], ids=["plain", "interleaved"])
@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(
    "cluster", [Cluster(1, 8), Cluster(4, 4), Cluster(4, 8), Cluster(2, 8, (1, 4))], ids=str
)
def test_reallocation_estimates_are_near_the_executed_schedules(
    cluster: Cluster, shape: ModelShape, turns: tuple[int, ...]
) -> None:
    rng = random.Random(0)
    weights, eps = (WEIGHTS, (1,)) if shape.mixture is None else (MIXTURES, (1, 2, 4, 8))
    transfers = LinkTransfers(cluster, weights, (LINKS,) * cluster.nodes)
    pairs = [tuple(sampled_placement(rng, cluster, eps, turns) for _ in range(2)) for _ in range(40)]
    pairs = [(a, b) for a, b in pairs if a.layout != b.layout]
    columns = [Layouts.of(side) for side in zip(*pairs, strict=True)]
    estimates = transfers.seconds("actor", *columns)
    exact = [
        reallocate(build_layout(shape, "lm", a), build_layout(shape, "lm", b), cluster, LINKS).seconds(
            LINKS, 2
        )
        for a, b in pairs
    ]
    ratios = [e / x for e, x in zip(estimates, exact, strict=True) if x]
    assert 0.99 < statistics.median(ratios) < 1.01
    assert sum(0.95 < ratio < 1.05 for ratio in ratios) > 0.85 * len(ratios)
    assert min(ratios) > 0.7 and max(ratios) < 1.35


@pytest.mark.parametrize(
    "cluster", [Cluster(1, 8), Cluster(4, 4), Cluster(3, 8), Cluster.parse("1x5+1x8+1x2+1x4")], ids=str
)
@pytest.mark.parametrize("turns", [(1,), (1, 2, 4)], ids=["plain", "interleaved"])
@pytest.mark.parametrize("weights", [WEIGHTS, MIXTURES], ids=["dense", "mixture"])
def test_lower_bounds_of_reallocation_hold_for_all_mesh_positions(
    cluster: Cluster, weights: dict[str, tuple[ParameterBytes, ...]], turns: tuple[int, ...]
) -> None:
    rng = random.Random(1)
    transfers = LinkTransfers(cluster, weights, (LINKS,) * cluster.nodes)
    eps = (1, 2, 4, 8) if weights is MIXTURES else (1,)
    places = Layouts.of(sampled_placement(rng, cluster, eps, turns) for _ in range(60))
    i, j = np.divmod(np.arange(60 * 60), 60)
    seconds = transfers.seconds("actor", places[i], places[j])
    assert (transfers.at_least("actor", places, places) <= seconds.reshape(60, 60) + 1e-12).all()


@pytest.mark.parametrize(
    "source, target",
    [
        (
            Placement(
                Mesh(0, 8),
                Strategy(
                    tp=8,
                ),
            ),
            Placement(
                Mesh(0, 16),
                Strategy(
                    dp=2,
                    tp=8,
                ),
            ),
        ),
        (
            Placement(Mesh(0, 8), Strategy(dp=2, tp=2, pp=2)),
            Placement(Mesh(8, 24), Strategy(dp=6, tp=2, pp=2)),
        ),
        (Placement(Mesh(0, 16), Strategy(tp=8, pp=2)), Placement(Mesh(0, 32), Strategy(dp=2, tp=8, pp=2))),
        (
            Placement(
                Mesh(0, 2),
                Strategy(
                    tp=2,
                ),
            ),
            Placement(
                Mesh(0, 4),
                Strategy(
                    dp=2,
                    tp=2,
                ),
            ),
        ),
    ],
    ids=str,
)
def test_lower_bounds_assume_no_data_on_devices_beyond_the_source(
    source: Placement, target: Placement
) -> None:
    cluster = Cluster(4, 8)
    transfers = LinkTransfers(cluster, WEIGHTS, (LINKS,) * cluster.nodes)
    firsts = range(0, cluster.size - target.mesh.size + 1, min(target.mesh.size, 8))
    places = Layouts.of(Placement(Mesh(first, target.mesh.size), target.strategy) for first in firsts)
    sources = Layouts.of([source] * len(firsts))
    nearest = transfers.seconds("actor", sources, places).min()
    least = transfers.at_least("actor", Layouts.of([source]), Layouts.of([target]))[0, 0]
    assert 0.8 * nearest < least <= nearest + 1e-12


def test_homogeneous_nodes_use_their_own_links() -> None:
    cluster, slow = Cluster(4, 4), Links(17e6, 2e6, 0.0)
    alike, mixed = (
        LinkTransfers(cluster, WEIGHTS, links) for links in ((LINKS,) * 4, (LINKS, LINKS, slow, slow))
    )
    rng = random.Random(3)
    placements = [p for _ in range(200) if (p := sampled_placement(rng, cluster)).mesh.size <= 8]
    places = Layouts.of(p for p in placements if p.mesh.first % 8 + p.mesh.size <= 8)
    n = len(places.first)
    i, j = np.divmod(np.arange(n * n), n)
    source, target = places[i], places[j]
    fast = (source.first < 8) & (target.first < 8)
    before, after = alike.seconds("actor", source, target), mixed.seconds("actor", source, target)
    assert fast.any() and (after[fast] == before[fast]).all()
    assert after[~fast] == pytest.approx(10 * before[~fast])
    assert (mixed.at_least("actor", places, places) <= after.reshape(n, n) + 1e-12).all()


def test_reallocation_between_equal_layouts_takes_no_time() -> None:
    cluster = Cluster(2, 4)
    places = Layouts.of(sampled_placement(random.Random(i), cluster) for i in range(20))
    by_links = LinkTransfers(cluster, WEIGHTS, (LINKS,) * cluster.nodes)
    for transfers in (by_links, PairTransfers(lambda role, a, b: 1.0)):
        assert not transfers.seconds("actor", places, places).any()


def test_a_transfer_table_computes_each_pair_once() -> None:
    asked = []

    def seconds(role: str, source: Placement, target: Placement) -> float:
        asked.append((source.layout, target.layout))
        return float(len(asked))

    rng = random.Random(2)
    places = sorted({sampled_placement(rng, Cluster(2, 4)) for _ in range(8)})
    table = TransferTable(PairTransfers(seconds), "a", Layouts.of(places), Layouts.of(places))
    source, target = np.array([0, 1, 0, 0]), np.array([1, 0, 1, 0])
    first = table(source, target)
    assert (table(source, target) == first).all()
    assert first[0] == first[2] and first[3] == 0
    assert len(asked) == 2


def test_blocks_are_looked_at_once_for_each_of_their_shapes() -> None:
    rng = np.random.default_rng(0)
    low, left = rng.integers(0, 2, (4, 50)) * 1.0, rng.integers(0, 2, (4, 50)) / 4
    high, right = low + rng.integers(0, 3, (4, 50)), left + rng.integers(0, 2, (4, 50)) / 2
    boxes = Boxes(low[None], high[None], left, right, rng.integers(0, 2, (4, 50)) * 1.0)
    found: list[list[tuple[float, ...]]] = [[] for _ in range(50)]
    for pairs, shapes in boxes.shapes():
        for pair, shape in zip(pairs.tolist(), shapes.T.tolist(), strict=True):
            found[pair].append(tuple(shape))
    every = np.stack([high - low, right - left, boxes.embeds])
    for pair in range(50):
        assert sorted(found[pair]) == sorted({tuple(shape) for shape in every[:, :, pair].T.tolist()})
