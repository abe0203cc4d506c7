"""Messages of a reallocation: few, bounded, and the same on both sides."""

from dataclasses import replace
from math import prod

import pytest

from realrl.families.shape import ModelShape
from realrl.layout.layout import build_layout
from realrl.layout.limits import CPU_MESSAGES, MessageLimits
from realrl.layout.routing.chunks import RankSchedule, RankScheduler, group_tensors
from realrl.layout.routing.routes import reallocate
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy

SHAPE = ModelShape(
    vocab_size=67, hidden_size=24, intermediate_size=50, layers=4, heads=6, kv_heads=3, head_dim=4
)
WIDTH = 4


def place(first: int, dp: int, tp: int, pp: int) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


def schedules(a: Placement, b: Placement, limits: MessageLimits = CPU_MESSAGES) -> list[RankSchedule]:
    moved = reallocate(build_layout(SHAPE, "lm", a), build_layout(SHAPE, "lm", b), Cluster(2, 4))
    return [RankScheduler(moved, rank, WIDTH, limits=limits).schedule() for rank in range(8)]


def test_an_unchanged_shard_is_one_copy() -> None:
    schedule = schedules(place(0, 2, 1, 1), place(0, 2, 1, 1))[1]
    assert not schedule.messages and len(schedule.copies) == 1


def test_whole_layers_are_sent_as_contiguous_messages() -> None:
    for schedule in schedules(place(0, 1, 1, 2), place(4, 1, 1, 1)):
        assert all(len(message.spans) == 1 for message in schedule.messages)
    assert len(schedules(place(0, 1, 1, 2), place(4, 1, 1, 1))[4].messages) == 2


PAIRS = [
    (place(0, 1, 4, 2), place(0, 2, 2, 2)),
    (place(0, 2, 1, 2), place(2, 1, 6, 1)),
    (place(0, 1, 3, 1), place(4, 4, 1, 1)),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_messages_are_bounded_and_equal_on_sender_and_receiver(a: Placement, b: Placement) -> None:
    everyone = schedules(a, b, replace(CPU_MESSAGES, message_bytes=500, alone_bytes=200))
    digests: dict[str, set[str]] = {}
    for schedule in everyone:
        for pair, digest in schedule.digests.items():
            digests.setdefault(pair, set()).add(digest)
        for message in schedule.messages:
            rows = {prod(region.size[1:]) for region in message.regions}
            assert message.numel == sum(region.numel for region in message.regions)
            assert message.numel * WIDTH <= 500 or (len(message.regions), message.numel) == (1, *rows)
    assert digests and all(len(found) == 1 for found in digests.values())
    for rank, schedule in enumerate(everyone):
        for peer, other in enumerate(everyone):
            sent = [m.regions for m in schedule.messages if m.sends and m.peer == peer]
            assert sent == [m.regions for m in other.messages if not m.sends and m.peer == rank]


@pytest.mark.parametrize("tp", [1, 3])
def test_tensor_groups_hold_every_tensor_once_within_the_limit(tp: int) -> None:
    held = build_layout(SHAPE, "lm", place(0, 1, tp, 1))
    groups = group_tensors(held, WIDTH, 12000)
    assert [name for group in groups for name in group] == [spec.name for spec in held.specs]
    for rank in range(tp):
        sizes = {tensor.region.tensor: tensor.stored.numel * WIDTH for tensor in held.tensors(rank)}
        assert all(len(g) == 1 or sum(sizes[name] for name in g) <= 12000 for g in groups)
