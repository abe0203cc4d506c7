"""Each preset does on any cluster what the publication that it is named after describes."""

from math import gcd

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.algorithms.sft import train_graph as sft_graph
from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.families.sizes import SHAPES
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.plan.split_cluster import list_mesh_sizes, split_by_weight, split_evenly
from realrl.program.lower import waves

CLUSTERS = (
    "1x1",
    "1x2",
    "1x3",
    "1x6",
    "1x8",
    "2x8",
    "3x2",
    "5x3",
    "16x8",
    "2x8+1x4",
    "1x2+1x1",
    "1x1+1x6+2x3",
)
PPO = train_graph(minibatches=1)
SMALL, LARGE = SHAPES["llama-3.2-1b"], SHAPES["llama-2-7b"]
INFERENCE = ("reward.inference", "ref.inference", "critic.inference")


def preset(name: str, cluster: str) -> Plan:
    """The plan of PPO, checked by `make_plan`."""
    return make_plan(name, PPO, Cluster.parse(cluster), 99)


def everything(cluster: str) -> Mesh:
    return Mesh(0, Cluster.parse(cluster).size)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_a_cluster_or_names_the_devices_it_needs(name: str, cluster: str) -> None:
    size = Cluster.parse(cluster).size
    least = {"disjoint": 4, "separate": 2, "openrlhf": 3}.get(name, 1)
    if size < least:
        with pytest.raises(UserError, match=f"plan {name} needs at least {least} devices"):
            preset(name, cluster)
        return
    plan = preset(name, cluster)
    assert all(p.strategy.micro_batch_tokens == 99 for p in plan.placements.values())


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_serves_algorithms_with_one_call(name: str, cluster: str) -> None:
    if (name, cluster) != ("separate", "1x1"):
        assert make_plan(name, sft_graph(), Cluster.parse(cluster), 99).keep == ()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_symmetric_is_one_data_parallel_placement(cluster: str) -> None:
    mesh = everything(cluster)
    assert set(preset("symmetric", cluster).placements.values()) == {
        Placement(mesh, Strategy(dp=mesh.size, micro_batch_tokens=99))
    }


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_deepspeed_chat_shares_out_everything_but_generation(cluster: str) -> None:
    c, plan = Cluster.parse(cluster), preset("deepspeed-chat", cluster)
    for call in PPO.calls:
        placement = plan[call.name]
        s = placement.strategy
        assert placement.mesh == everything(cluster) and s.pp == 1
        if call.kind is Kind.GENERATE:
            assert (s.tp, s.zero) == (gcd(*(devices for _, devices in c.runs)), 1)
        else:
            assert (s.tp, s.zero) == (1, 3 if c.size > 1 else 1)


@pytest.mark.parametrize(
    ("cluster", "meshes"),
    [("1x3", ("0", "1", "2")), ("1x8", ("0-3", "4-5", "6-7")), ("3x2", ("0-1", "2-3", "4-5"))],
)
def test_openrlhf_has_engines_of_its_own_beside_actor_and_critic(
    cluster: str, meshes: tuple[str, ...]
) -> None:
    plan = preset("openrlhf", cluster)
    engines, actor, critic = map(Mesh.parse, meshes)
    places = {call.name: plan[call.name].mesh for call in PPO.calls}
    assert places == {
        "actor.generate": engines,
        "actor.train": actor,
        "ref.inference": actor,
        "critic.train": critic,
        "critic.inference": critic,
        "reward.inference": critic,
    }
    assert plan.keep == ("actor",) and plan["actor.generate"].strategy.tp == engines.size
    assert plan["ref.inference"].strategy.zero == (3 if actor.size > 1 else 1)


def test_engines_have_no_more_tensor_parallel_ranks_than_a_model_has_heads() -> None:
    shapes = {"actor": SMALL.model_copy(update={"heads": 2, "kv_heads": 2})}
    for name in ("deepspeed-chat", "openrlhf"):
        assert make_plan(name, PPO, Cluster(1, 8), 99, shapes)["actor.generate"].strategy.tp == 2


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_heuristic_cuts_tensors_inside_nodes_and_layers_between_them(cluster: str) -> None:
    c = Cluster.parse(cluster)
    (placement,) = set(preset("heuristic", cluster).placements.values())
    s = placement.strategy
    assert (s.dp, placement.mesh) == (1, everything(cluster))
    for pp in range(s.pp):
        assert len({c.node(placement.rank(dp=0, tp=t, pp=pp)) for t in range(s.tp)}) == 1
    # With one tensor-parallel rank more, some stage would lie on two nodes.
    assert c.even == (s.pp == c.nodes)
    sizes = [len(c.ranks(node)) for node in range(c.nodes)]
    assert s.tp == max(t for t in range(1, min(sizes) + 1) if all(size % t == 0 for size in sizes))


def test_heuristic_for_a_model_with_too_few_layers_or_heads_is_one_error_message() -> None:
    shapes = dict.fromkeys(PPO.roles, SMALL)
    with pytest.raises(UserError, match=r"actor\.generate: pp=17 is more pipeline stages than the model has"):
        make_plan("heuristic", PPO, Cluster(17, 1), 99, shapes)


@pytest.mark.parametrize(
    ("cluster", "meshes"),
    [
        ("1x6", ["0", "1", "2", "3"]),
        ("1x8", ["0-1", "2-3", "4-5", "6-7"]),
        ("2x8", ["0-3", "4-7", "8-11", "12-15"]),
        ("4x2", ["0-1", "2-3", "4-5", "6-7"]),
        ("16x8", ["0-31", "32-63", "64-95", "96-127"]),
    ],
)
def test_disjoint_gives_each_role_an_equal_mesh_of_its_own(cluster: str, meshes: list[str]) -> None:
    plan = preset("disjoint", cluster)
    owned = {role: {str(plan[call.name].mesh) for call in PPO.role_calls(role)} for role in PPO.roles}
    assert owned == {role: {mesh} for role, mesh in zip(PPO.roles, meshes, strict=True)}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_interleave_trains_on_all_devices_and_infers_on_disjoint_meshes(cluster: str) -> None:
    plan = preset("interleave", cluster)
    for call in PPO.calls:
        if call.kind is not Kind.INFERENCE:
            assert plan[call.name].mesh == everything(cluster)
    meshes = {plan[name].mesh for name in INFERENCE}
    assert len(meshes) == min(3, everything(cluster).size)
    assert sum(mesh.size for mesh in meshes) == len({rank for mesh in meshes for rank in mesh.ranks})
    if len(meshes) == 3:
        assert len(waves(PPO, plan)[1]) == 3


def test_interleave_gives_a_larger_model_the_larger_part() -> None:
    shapes = {"reward": SMALL, "critic": SMALL, "ref": LARGE}
    plan = make_plan("interleave", PPO, Cluster(1, 8), 99, shapes)
    assert [plan[name].mesh.size for name in INFERENCE] == [2, 4, 2]
    plan = make_plan("interleave", PPO, Cluster(1, 2), 99, shapes)
    assert plan["reward.inference"].mesh == plan["critic.inference"].mesh != plan["ref.inference"].mesh


@pytest.mark.parametrize("cluster", CLUSTERS[1:])
def test_separate_has_two_sides_and_shadow_copies_of_trained_roles(cluster: str) -> None:
    plan = preset("separate", cluster)
    sides = {
        kind: {plan[c.name].mesh for c in PPO.calls if (c.kind is Kind.TRAIN) == kind} for kind in (0, 1)
    }
    (inference,), (training,) = sides[0], sides[1]
    assert not inference.overlaps(training) and training.size >= inference.size
    assert plan.keep == ("actor", "critic")


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 2, 1], [3, 1, 1, 1], [1, 2, 3, 4, 5]])
def test_split_by_weight_gives_valid_disjoint_meshes(cluster: str, weights: list[float]) -> None:
    c = Cluster.parse(cluster)
    if len(weights) > c.size:
        return
    meshes = split_by_weight(c, weights)
    for mesh in meshes:
        mesh.check(c)
    assert len({rank for mesh in meshes for rank in mesh.ranks}) == sum(mesh.size for mesh in meshes)
    smallest = split_evenly(c, len(weights))[0].size
    assert min(mesh.size for mesh in meshes) == smallest
    assert max(mesh.size for mesh in meshes) == meshes[weights.index(max(weights))].size


def test_presets_have_meshes_of_whole_nodes_or_of_equal_parts_of_one() -> None:
    assert list_mesh_sizes(Cluster(3, 4)) == (1, 2, 4, 8, 12)
    assert list_mesh_sizes(Cluster.of_nodes([4, 4, 6])) == (1, 2, 3, 4, 6, 8, 10, 14)
    uneven = Cluster.parse("2x8+1x4")
    assert split_evenly(uneven, 2) == [Mesh(0, 8), Mesh(8, 8)]
    assert split_evenly(uneven, 4) == [Mesh(first, 4) for first in (0, 4, 8, 12)]
    assert split_by_weight(uneven, [2, 1]) == [Mesh(8, 12), Mesh(0, 8)]
