"""Layers with a sliding window, caps and sinks cost what an independent count of their keys says."""

from dataclasses import replace

import numpy as np
import pytest

from realrl.dataflow.call import Kind
from realrl.families.shape import LayerOptions, ModelShape
from realrl.families.sizes import count_layer_weights
from realrl.layout.sets import TrainablePart
from realrl.plan.placement import Strategy
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.memory.layer import LayerMemory
from realrl.planner.workload.flops import count_pass_flops
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.memory import StoredModel
from realrl.runtime.profiler.passes import LayerMix

WINDOW = 300
SHAPE = ModelShape(
    family="gemma3_text", vocab_size=1000, hidden_size=64, intermediate_size=100, layers=6, heads=4, kv_heads=2,
    head_dim=16, max_positions=8192, window=WINDOW, windowed_layers=(0, 1, 2, 4),
)  # fmt: skip
WIDE = SHAPE.model_copy(update={"windowed_layers": ()})


def count_keys(length: int, window: int | None) -> int:
    """Keys that all queries of a sequence see, one query after the other."""
    return sum(min(i + 1, window or length) for i in range(length))


def count_attention(length: int, layers: range) -> int:
    """Products and sums of attention, of scores and of values."""
    of_layer = {
        layer: count_keys(length, WINDOW if layer in SHAPE.windowed_layers else None) for layer in layers
    }
    return sum(2 * 2 * SHAPE.heads * SHAPE.head_dim * keys for keys in of_layer.values())


@pytest.mark.parametrize("length", [100, 300, 301, 1000, 4000])
@pytest.mark.parametrize("trained", [None, 0, 2, 6])
def test_flops_of_attention_are_those_of_the_keys_that_are_seen(trained: int | None, length: int) -> None:
    part = TrainablePart() if trained is None else TrainablePart(last_layers=trained)
    model = StoredModel(SHAPE, "lm", "bfloat16", trained is not None, part)
    kind = Kind.INFERENCE if trained is None else Kind.TRAIN
    got = count_pass_flops(model, kind, tokens=3 * length, scored=0, squares=3 * length**2)
    expected = 0
    for layers, times in ((range(6), 1), (range(6 - (trained or 0), 6), 0 if trained is None else 2)):
        matrices = 2 * len(layers) * count_layer_weights(SHAPE) * length
        expected += times * 3 * (matrices + count_attention(length, layers))
    # Of each query the key of itself is counted as half of one.
    assert got == pytest.approx(expected, rel=2 / min(length, WINDOW))


def time_layers(shape: ModelShape, *, cpu: bool, **changes: float) -> Roofline:
    device = replace(DEVICES["cpu" if cpu else "h100"], measured=None)
    return Roofline(
        device=device,
        efficiency=Efficiency(**changes),
        sizes=LocalSizes(shape, "lm", 1),
        dtype="float32" if cpu else "bfloat16",
    )


@pytest.mark.parametrize("cpu", [True, False])
def test_a_layer_takes_the_time_of_the_keys_that_are_seen_and_of_the_rest(cpu: bool) -> None:
    times = []
    for shape in (SHAPE, WIDE):
        model = time_layers(shape, cpu=cpu)
        rest = model.layer(4000, 0.0), model.layer_backward(4000, 0.0)
        squares = 4000.0**2
        times.append((model.layer(4000, squares) - rest[0], model.layer_backward(4000, squares) - rest[1]))
    keys = [count_keys(4000, WINDOW if layer in SHAPE.windowed_layers else None) for layer in range(6)]
    share = sum(keys) / (6 * count_keys(4000, None))
    for windowed, wide in zip(*times, strict=True):
        assert windowed / wide == pytest.approx(share, rel=0.01)


def test_a_decode_step_reads_no_more_of_the_cache_than_the_window() -> None:
    rows, context = 8, 2000.0
    found = [time_layers(shape, cpu=False).decode(rows, context) for shape in (SHAPE, WIDE)]
    unread = rows * 2 * 2 * SHAPE.kv_heads * SHAPE.head_dim * (context - WINDOW) * 4 / 6  # keys and values
    device, efficiency = DEVICES["h100"], Efficiency()
    saved = unread / (device.memory_bytes_per_s * efficiency.memory)
    assert found[1] - found[0] == pytest.approx(saved)
    inside = [time_layers(shape, cpu=False).decode(rows, WINDOW) for shape in (SHAPE, WIDE)]
    assert inside[0] == inside[1]


CAPPED = SHAPE.model_copy(
    update={
        "layer": LayerOptions(norm_place="around", activation="gelu_tanh", attention_cap=50.0, logit_cap=30.0)
    }
)


def test_scores_in_memory_take_the_time_of_their_traffic_on_a_gpu_alone() -> None:
    tokens, squares = 4000, 4000.0**2
    plain = SHAPE.model_copy(update={"layer": CAPPED.layer.model_copy(update={"attention_cap": None})})
    keys = [count_keys(4000, WINDOW if layer in SHAPE.windowed_layers else None) for layer in range(6)]
    due = 100 * SHAPE.heads * sum(keys) / 6 / (DEVICES["h100"].memory_bytes_per_s * Efficiency().memory)
    for cpu, times in ((False, 1), (True, 0)):
        capped, usual = (
            time_layers(shape, cpu=cpu, score_bytes=100.0).layer(tokens, squares) for shape in (CAPPED, plain)
        )
        assert capped - usual == pytest.approx(times * due, rel=0.01, abs=1e-15)


def test_logits_with_a_cap_are_computed_again_on_a_cpu() -> None:
    plain = CAPPED.model_copy(update={"layer": CAPPED.layer.model_copy(update={"logit_cap": None})})
    for cpu, times in ((True, 1), (False, 0)):
        capped, usual = (time_layers(shape, cpu=cpu) for shape in (CAPPED, plain))
        again = usual.matmul(100, SHAPE.vocab_size, SHAPE.hidden_size)
        assert capped.head_backward(100) - usual.head_backward(100) == pytest.approx(times * again)


def test_memory_of_scores_grows_with_lengths_up_to_those_of_a_block() -> None:
    def measure(shape: ModelShape, length: int, *, element_bytes: int = 2, backward: bool = False) -> int:
        layer = LayerMemory(
            sizes=LocalSizes(shape, "lm", 1),
            strategies=Strategies.of([Strategy()]),
            element_bytes=element_bytes,
            cpu=False,
            lengths=[(length,)],
        )
        return int(np.max(layer.score_bytes(length, backward=backward)))

    assert measure(CAPPED, 512) == 4 * 512**2 * (4 + 2)
    assert measure(CAPPED, 512, backward=True) == 4 * 512**2 * (4 * 4 + 2)
    assert measure(CAPPED, 8192) == 2**24 * (4 + 2)
    assert measure(SHAPE, 512) == 0 and measure(WIDE, 512, element_bytes=4) == 0
    assert measure(SHAPE, 512, element_bytes=4, backward=True) == 4 * 512**2 * 3 * 4


def test_fewer_layers_keep_about_the_share_of_windows() -> None:
    assert [len(SHAPE.with_layers(n).windowed_layers) for n in (1, 2, 3, 6, 12)] == [1, 1, 2, 4, 8]
    assert WIDE.with_layers(2).windowed_layers == ()
    few, most = (SHAPE.model_copy(update={"windowed_layers": layers}) for layers in ((4,), (0, 1, 2, 3, 4)))
    for shape in (few, SHAPE, most):
        for layers in (3, 4, 6):
            measured = shape.with_layers(layers).windowed_layers
            assert 1 in measured and 2 not in measured


@pytest.mark.parametrize("windowed", [(4,), (0, 1, 2, 4), (0, 1, 2, 3, 4)])
def test_an_average_layer_has_the_share_of_windows_of_the_whole_model(windowed: tuple[int, ...]) -> None:
    """Of four measured layers the first takes 5 s more, and backward the last one 7 s more."""
    shape = SHAPE.model_copy(update={"windowed_layers": windowed})
    share = len(windowed) / 6
    expected = share * 1.0 + (1 - share) * 3.0
    mix = LayerMix.of(shape.with_layers(4), share)
    alone = [1.0 if kind else 3.0 for kind in mix.windowed]
    forward = [alone[0] + 5.0, *alone[1:]]
    assert mix.average(alone) == mix.typical(forward) == mix.typical(forward[:3]) == pytest.approx(expected)
    assert mix.first_extra(forward) == mix.first_extra(forward[:3]) == 5.0
    assert mix.typical_backward([alone[3] + 7.0, *alone[2::-1]]) == pytest.approx(expected)


def test_layers_that_are_alike_are_averaged() -> None:
    mix = LayerMix.of(WIDE.with_layers(2))
    assert (mix.typical([9.0, 2.0]), mix.first_extra([9.0, 2.0]), mix.typical_backward([8.0, 3.0])) == (
        2,
        7,
        3,
    )
