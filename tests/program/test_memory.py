"""What programs hold in device memory, and the sentence about a device that cannot hold it."""

import pytest

from realrl.algorithms.ppo.graph import train_graph
from realrl.config.errors import UserError
from realrl.config.shape import Head
from realrl.config.shapes import SHAPES
from realrl.config.units import parse_bytes
from realrl.layout import tensors
from realrl.layout.tensors import model_tensors
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.program.lower import home_placements, kept_copies, lower, offloaded
from realrl.program.memory import Item, Memory, Stored

PPO = train_graph(minibatches=1)
SHAPE = SHAPES["llama-2-7b"]
HEADS: dict[str, Head] = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}


def number(role: str) -> int:
    return sum(tensor.numel for tensor in model_tensors(SHAPE, HEADS[role]))


def memory(plan: Plan, element_bytes: int = 2) -> Memory:
    homes = home_placements(PPO, plan)
    stored = {role: Stored(SHAPE, HEADS[role], element_bytes, PPO.trained(role)) for role in PPO.roles}
    return Memory(stored, homes, offloaded(plan), kept_copies(PPO, plan, homes))


def check(plan: Plan, device_memory: str) -> None:
    homes = home_placements(PPO, plan)
    programs = lower(PPO, plan, homes, kept_copies(PPO, plan, homes))
    memory(plan).check(programs, PPO, parse_bytes(device_memory))


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets pad buffers a little; without them, bytes can be counted by hand."""
    monkeypatch.setattr(tensors, "BUCKET_ELEMENTS", 2**60)


def plan_of(default: Placement, **calls: Placement) -> dict[str, Placement]:
    named = {name.replace("__", "."): placement for name, placement in calls.items()}
    return {call.name: named.get(call.name, default) for call in PPO.calls}


def place(first: int, dp: int, tp: int = 1, pp: int = 1) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp, tp, pp))


def test_one_device_holds_everything_once() -> None:
    plan = make_plan("symmetric", PPO, Cluster(1, 1), 10)
    held = memory(plan).at_rest(0)
    # bfloat16 parameters; float32 gradients twice, two moments and master weights.
    assert sum(held.values()) == sum(2 * number(role) for role in PPO.roles) + sum(
        20 * number(role) for role in ("actor", "critic")
    )


@pytest.mark.parametrize(("element_bytes", "shard"), [(4, 12), (2, 16)])
def test_data_parallel_ranks_share_the_optimizer(element_bytes: int, shard: int) -> None:
    plan = make_plan("symmetric", PPO, Cluster(1, 8), 10)
    held = memory(plan, element_bytes).at_rest(3)
    n = number("actor")
    assert held[Item("actor", "d8 t1 p1 @0-7", "parameters")] == element_bytes * n
    assert held[Item("actor", "d8 t1 p1 @0-7", "optimizer")] == 4 * n + shard * n // 8


@pytest.mark.parametrize("strategy", [(1, 8, 1), (1, 1, 8), (1, 2, 4)])
def test_tensor_and_pipeline_ranks_share_everything_but_norms(strategy: tuple[int, int, int]) -> None:
    placement = place(0, *strategy)
    plan = Plan(Cluster(1, 8), plan_of(placement))
    item = Item("ref", placement.layout, "parameters")
    held = [memory(plan).at_rest(rank)[item] for rank in range(8)]
    norms = 2 * (2 * SHAPE.layers + 1) * SHAPE.hidden_size
    assert 2 * number("ref") <= sum(held) <= 2 * number("ref") + 7 * norms


def test_a_copy_counts_while_it_is_there() -> None:
    away = place(2, 1, 2)
    placements = plan_of(place(0, 2), actor__generate=away)
    for keep, at_rest in (((), False), (("actor",), True)):
        plan = Plan(Cluster(1, 4), placements, keep=keep)
        homes = home_placements(PPO, plan)
        item = Item("actor", away.layout, "parameters")
        of = memory(plan)
        assert (item in of.at_rest(2)) == at_rest and item not in of.at_rest(0)
        program = lower(PPO, plan, homes, kept_copies(PPO, plan, homes))[2]
        assert of.peak(program).holdings[item] == of.peak(program).bytes


def test_what_is_offloaded_counts_only_while_it_is_in_use() -> None:
    plan = Plan(
        Cluster(1, 1), plan_of(place(0, 1)), ("actor", "reward", "ref", "critic"), ("actor", "critic")
    )
    assert memory(plan).at_rest(0) == {}
    peak = memory(plan).peak(lower(PPO, plan, home_placements(PPO, plan))[0])
    assert peak.run is not None and peak.run.call == "actor.train"
    assert peak.bytes == 22 * number("actor")


@pytest.mark.parametrize(
    ("plan", "device_memory", "sentence"),
    [
        (
            make_plan("symmetric", PPO, Cluster(1, 8), 10),
            "120GiB",
            "plan: device 0 has to hold 124 GiB during actor.generate, more than its 120 GiB, even without"
            " activations: actor gradients and optimizer (d8 t1 p1 @0-7) 37.7 GiB, critic gradients and optimizer"
            " (d8 t1 p1 @0-7) 36.9 GiB, actor parameters (d8 t1 p1 @0-7) 12.6 GiB and 3 more; add actor to"
            " offload_optimizer in the plan, or spread actor over more devices",
        ),
        (
            Plan(
                Cluster(3, 8),
                plan_of(
                    place(0, 1, 8, 2),
                    actor__generate=place(16, 1),
                    critic__inference=place(16, 1),
                    ref__inference=place(17, 1),
                    reward__inference=place(18, 1),
                ),
                keep=("actor", "critic"),
            ),
            "20GiB",
            "plan: device 16 has to hold 24.9 GiB during actor.generate, more than its 20.0 GiB, even without"
            " activations: actor parameters (d1 t1 p1 @16) 12.6 GiB, critic parameters (d1 t1 p1 @16) 12.3 GiB;"
            " remove critic from keep in the plan, or spread actor over more devices",
        ),
        (
            make_plan("heuristic", PPO, Cluster(2, 8), 10),
            "1GiB",
            "spread actor.train over more devices, with a larger tp or pp",
        ),
    ],
)
def test_a_device_that_cannot_hold_its_part_is_named_with_a_remedy(
    plan: Plan, device_memory: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(plan, device_memory)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_that_fits_is_accepted() -> None:
    check(make_plan("symmetric", PPO, Cluster(1, 8), 10), "128GiB")
    check(make_plan("heuristic", PPO, Cluster(2, 8), 10), "40GiB")
