"""What programs hold in device memory."""

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.families.registry import model_tensors
from realrl.families.shape import Head
from realrl.families.sizes import SHAPES
from realrl.layout import limits
from realrl.plan.cluster import Cluster
from realrl.plan.placement import ELEMENT_BYTES, Dtype, Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.program.instructions import Run
from realrl.program.lower import home_placements, kept_copies, lower, offloaded
from realrl.program.memory import HeldState, Holdings, Memory, StoredModel

PPO = train_graph(minibatches=1)
SHAPE = SHAPES["llama-2-7b"]
HEADS: dict[str, Head] = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}


def number(role: str) -> int:
    return sum(tensor.numel for tensor in model_tensors(SHAPE, HEADS[role]))


def memory(plan: Plan, dtype: Dtype = "bfloat16") -> Memory:
    homes = home_placements(PPO, plan)
    stored = {role: StoredModel(SHAPE, HEADS[role], dtype, PPO.trained(role)) for role in PPO.roles}
    return Memory(stored, homes, offloaded(plan), kept_copies(PPO, plan, homes))


def most(plan: Plan, rank: int) -> tuple[str, Holdings]:
    """The call of a step while which a rank holds most."""
    homes = home_placements(PPO, plan)
    program = lower(PPO, plan, homes, kept_copies(PPO, plan, homes))[rank]
    running = [(i.call, held) for i, held in memory(plan).timeline(program) if isinstance(i, Run)]
    return max(running, key=lambda moment: sum(moment[1].values()))


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets pad buffers a little; without them, bytes can be counted by hand."""
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 2**60)


def plan_of(default: Placement, **calls: Placement) -> dict[str, Placement]:
    named = {name.replace("__", "."): placement for name, placement in calls.items()}
    return {call.name: named.get(call.name, default) for call in PPO.calls}


def place(first: int, dp: int, tp: int = 1, pp: int = 1) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


def test_a_single_device_holds_all_state_once() -> None:
    plan = make_plan("symmetric", PPO, Cluster(1, 1), 10)
    held = memory(plan).at_rest(0)
    # bfloat16 parameters; float32 gradients, two moments and master weights.
    assert sum(held.values()) == sum(2 * number(role) for role in PPO.roles) + sum(
        16 * number(role) for role in ("actor", "critic")
    )


@pytest.mark.parametrize(("dtype", "shard"), [("float32", 12), ("bfloat16", 16)])
def test_optimizer_state_is_sharded_over_data_parallel_ranks(dtype: Dtype, shard: int) -> None:
    plan = make_plan("symmetric", PPO, Cluster(1, 8), 10)
    held = memory(plan, dtype).at_rest(3)
    n = number("actor")
    assert held[HeldState("actor", "d8 t1 p1 @0-7", "parameters")] == ELEMENT_BYTES[dtype] * n
    assert held[HeldState("actor", "d8 t1 p1 @0-7", "optimizer")] == 4 * n + shard * n // 8


@pytest.mark.parametrize("strategy", [(1, 8, 1), (1, 1, 8), (1, 2, 4)])
def test_tp_and_pp_ranks_divide_all_state_but_norms(strategy: tuple[int, int, int]) -> None:
    placement = place(0, *strategy)
    plan = Plan(Cluster(1, 8), plan_of(placement))
    item = HeldState("ref", placement.layout, "parameters")
    held = [memory(plan).at_rest(rank)[item] for rank in range(8)]
    norms = 2 * (2 * SHAPE.layers + 1) * SHAPE.hidden_size
    assert 2 * number("ref") <= sum(held) <= 2 * number("ref") + 7 * norms


def test_a_copy_counts_from_its_reallocation_to_its_release() -> None:
    away = place(2, 1, 2)
    placements = plan_of(place(0, 2), actor__generate=away)
    for keep, at_rest in (((), False), (("actor",), True)):
        plan = Plan(Cluster(1, 4), placements, keep=keep)
        item = HeldState("actor", away.layout, "parameters")
        of = memory(plan)
        assert (item in of.at_rest(2)) == at_rest and item not in of.at_rest(0)
        assert most(plan, 2)[1].keys() == {item}


def test_offloaded_state_counts_only_while_loaded() -> None:
    plan = Plan(
        Cluster(1, 1), plan_of(place(0, 1)), ("actor", "reward", "ref", "critic"), ("actor", "critic")
    )
    assert memory(plan).at_rest(0) == {}
    call, held = most(plan, 0)
    assert call == "actor.train"
    assert sum(held.values()) == 18 * number("actor")


def test_host_copies_always_count_on_devices_that_share_host_memory() -> None:
    plan = Plan(Cluster(1, 1), plan_of(place(0, 1)), ("ref",), ("actor", "critic"))
    of, apart = memory(plan).in_host_memory(), memory(plan)
    copies = {item: size for item, size in of.at_rest(0).items() if item.host}
    moments = {role: 12 * number(role) for role in ("actor", "critic")}
    assert {item.role: size for item, size in copies.items()} == {"ref": 2 * number("ref"), **moments}
    (program,) = lower(PPO, plan, home_placements(PPO, plan), {})
    for (_, held), (_, without) in zip(of.timeline(program), apart.timeline(program), strict=True):
        assert held == {**without, **copies}
