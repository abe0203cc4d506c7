"""Traffic of ZeRO-2 and ZeRO-3 as charged, beside the sizes of what layouts gather and reduce."""

from dataclasses import replace

import pytest

from realrl.layout.layout import build_layout, group_stacks
from realrl.layout.local_tensors import count_shard_rows
from realrl.layout.routing.region_groups import group_regions
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.batching import split_work
from tests.planner.problems import GROUPED, STEP, call, stored

SPEC = ClusterSpec.parse("cpu:1x4")
COST = CostModel(SPEC)
MODEL = stored(GROUPED, "lm", "float32")
DP = 4


def place(zero: int) -> Placement:
    return Placement(Mesh(0, DP), Strategy(dp=DP, micro_batch_tokens=1024, zero=zero))


def collective(numbers: int) -> float:
    """Seconds of a ring of four that gathers, or reduces to parts, so many float32 numbers."""
    device = SPEC.device(0)
    each = 4 * numbers / DP / (device.link_bytes_per_s * COST.efficiency.link)
    return (DP - 1) * (device.link_latency_s + each)


SMALL = 2 * collective(16)
"""Seconds of an all-reduce of 64 bytes."""


def all_parameters() -> float:
    """Seconds of a collective for each parameter, whose rows are padded to be divided."""
    stacks = group_stacks(build_layout(GROUPED, "lm", place(1)).tensors(0))
    rows = [(count_shard_rows(stack, DP), stack[0].numel // stack[0].shape[0]) for stack in stacks]
    return sum(collective(DP * height * width) for height, width in rows)


def data_seconds(name: str, zero: int) -> tuple[float, int]:
    """What a call is charged for data-parallel communication, and its micro-batches."""
    placement = place(zero)
    terms = COST.call(call(name), MODEL, placement, STEP).terms
    work = STEP.work(call(name))
    chunks = split_work(work, placement.strategy).count
    return terms["data"] / (work.minibatches * work.passes), chunks


@pytest.mark.parametrize(("name", "zero", "times"), [("ref.inference", 3, 1), ("actor.train", 3, 3)])
def test_a_pass_gathers_and_reduces_every_parameter_once(name: str, zero: int, times: int) -> None:
    """Forward; in training again for the backward pass, without embedding and head, and reduced after it."""
    seconds, chunks = data_seconds(name, zero)
    found = build_layout(GROUPED, "lm", place(1)).tensors(0)
    outside = group_stacks(tuple(tensor for tensor in found if tensor.spec.layer is None))
    rows = [(count_shard_rows(stack, DP), stack[0].numel // stack[0].shape[0]) for stack in outside]
    ends = sum(collective(DP * height * width) for height, width in rows) if times == 3 else 0.0
    small = (4 if times == 3 else 1) * SMALL
    assert seconds == pytest.approx(chunks * (times * all_parameters() - ends) + small, rel=1e-6)


def test_zero_2_reduces_in_every_micro_batch_and_gathers_once() -> None:
    seconds, chunks = data_seconds("actor.train", 2)
    assert chunks > 1
    assert seconds == pytest.approx((chunks + 1) * all_parameters() + 4 * SMALL, rel=1e-6)


def test_a_model_that_is_shared_out_has_to_be_sent_to_where_it_is_whole() -> None:
    """Estimated bytes are those of routes, but for padding and rows of unequal tensors."""
    source, target = place(3), Placement(Mesh(0, DP), Strategy(tp=DP))
    layouts = [build_layout(GROUPED, "lm", placement) for placement in (source, target)]
    sent = sum(len(group.receivers) * group.elements for group in group_regions(*layouts))
    estimated, _ = COST.moved(MODEL, source, target)
    elements = sum(spec.numel for spec in layouts[0].specs)
    assert estimated == pytest.approx(4 * sent, rel=0.3)
    whole, _ = COST.moved(MODEL, source, replace(target, strategy=Strategy(dp=DP)))
    assert whole == pytest.approx(4 * (DP - 1) * elements, rel=0.02)
    assert COST.moved(MODEL, place(1), target) == (0, 0)
