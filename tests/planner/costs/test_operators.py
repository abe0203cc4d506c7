"""Tables of measured operators: rows that no table has seen, and what a cost model makes of them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realrl.families.shape import ModelShape
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DEVICES, DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.network import Network, Ring
from realrl.planner.cost.roofline import Roofline
from realrl.planner.operators.tables import LEAST_S, ROUNDS, Grid, Operators, find_operators, read_tables
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from tests.planner.problems import SMALL, place

HELD_OUT = json.loads((Path(__file__).parents[3] / "bench/reference/operators.json").read_text())["held_out"]
KINDS = {"a100": "a100-80g", "h100": "h100", "h200": "h200", "b200": "b200", "l40s": "l40s"}


def operators_of(name: str) -> Operators:
    found = find_operators(DEVICES[name])
    assert found is not None
    return found


def predict(operators: Operators, table: str, sizes: list[float]) -> float:
    if table == "product":
        return operators.product(*sizes)
    if table in ("prefill", "decode"):
        batch, length, heads, kv_heads, head_dim, _ = sizes
        if table == "decode":
            return operators.decode(batch, length, heads, kv_heads, head_dim)
        return operators.prefill(batch * length, batch * length**2, heads, kv_heads, head_dim)
    return operators.collective(next(kind for kind in ROUNDS if kind == table), int(sizes[0]), sizes[1])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("table", ["product", "prefill", "decode", *ROUNDS])
def test_tables_predict_operators_that_they_have_not_seen(name: str, table: str) -> None:
    errors = []
    for *sizes, seconds in HELD_OUT[name][table]:
        if table not in ("prefill", "decode") or sizes[-1] == 0:
            errors.append(abs(predict(operators_of(KINDS[name]), table, sizes) / seconds - 1))
    # All rows that are held out stay below 5 and 15 % for products, 10 and 25 % for others; here are some of them.
    half, most = (0.05, 0.18) if table == "product" else (0.10, 0.30)
    assert len(errors) > (50 if table not in ROUNDS else 3)
    assert np.quantile(errors, 0.5) < half and np.quantile(errors, 0.9) < most


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_windows_are_derived_from_attention_without_any(name: str) -> None:
    operators = operators_of(name)
    for table in ("prefill", "decode"):
        errors = []
        for batch, length, heads, kv_heads, head_dim, window, seconds in HELD_OUT[name][table]:
            if window and length > window:
                shape = heads, kv_heads, head_dim, int(window)
                if table == "decode":
                    found = operators.decode(batch, length, *shape)
                else:
                    found = operators.prefill(batch * length, batch * length**2, *shape)
                errors.append(abs(found / seconds - 1))
        assert len(errors) > 10 and np.median(errors) < 0.2


def test_tables_say_what_they_are_made_of_and_stay_small() -> None:
    for name in KINDS:
        tables = read_tables(name)
        assert "aiconfigurator-core" in tables["source"] and set(tables["grids"]) == set(tables["spread"])
        assert all(0 < spread < 0.3 for spread in tables["spread"].values())
        assert len(json.dumps(tables)) < 200_000
    assert {kind.measured for kind in DEVICES.values()} - {None} == set(KINDS)


@pytest.mark.parametrize("name", KINDS.values())
def test_larger_products_take_longer_and_none_is_faster_than_the_device(name: str) -> None:
    """Kernels are chosen by size, so that a larger product may take less than a very small one."""
    operators, device = operators_of(name), DEVICES[name]
    sizes = [16.0, 100.0, 1000.0, 9000.0, 100_000.0]
    for rows, outputs, inputs in itertools.product(sizes, sizes, sizes):
        seconds = operators.product(rows, outputs, inputs)
        assert seconds > 0.97 * 2 * rows * outputs * inputs / device.bf16_flops
        assert seconds >= LEAST_S
        for grown in ((4 * rows, outputs, inputs), (rows, 4 * outputs, inputs), (rows, outputs, 4 * inputs)):
            assert operators.product(*grown) > (0.6 if seconds < 10e-6 else 0.8) * seconds


def test_a_grid_is_linear_in_logarithms_and_constant_outside() -> None:
    grid = Grid(((1.0, 4.0), (2.0, 8.0, 16.0)), (0.0, 1.0, 2.0, 10.0, 11.0, 12.0))
    assert grid.at(1, 2) == 0 and grid.at(4, 16) == 12 and grid.at(2, 4) == pytest.approx(5.5)
    assert grid.at(0.1, 1) == 0 and grid.at(100, 100) == 12 and grid.at(1, 8) == 1
    assert Grid.read(json.loads(json.dumps(grid.write()))) == grid
    with pytest.raises(ValueError, match="5 values"):
        Grid(grid.axes, (0.0,) * 5)


def test_times_follow_the_peaks_of_a_device_whose_tables_are_borrowed() -> None:
    """A kind of a cluster file is like another one, but for its peaks."""
    device = DEVICES["h100"]
    half = replace(device, bf16_flops=device.bf16_flops / 2, link_bytes_per_s=device.link_bytes_per_s / 2)
    ours, theirs = operators_of("h100"), find_operators(half)
    assert theirs is not None
    assert theirs.product(8192, 8192, 8192) / ours.product(8192, 8192, 8192) == pytest.approx(2, rel=0.01)
    large = 1e9
    assert theirs.collective("all_reduce", 8, large) / ours.collective(
        "all_reduce", 8, large
    ) == pytest.approx(2, rel=0.01)


def layers(device: DeviceKind, dtype: str = "bfloat16", shape: ModelShape = SMALL) -> Roofline:
    sizes = LocalSizes(shape, "lm", 1)
    return Roofline(device=device, efficiency=Efficiency(), sizes=sizes, dtype=dtype)  # type: ignore[arg-type]


def test_a_layer_is_the_sum_of_its_operators_and_what_streams_through_memory() -> None:
    device, shape = DEVICES["h100"], SMALL
    operators, model, tokens, length = operators_of("h100"), layers(device), 8192.0, 1024.0
    head = shape.head_dim
    matrices = LocalSizes(shape, "lm", 1).matmul_shapes
    products = sum(operators.product(tokens, *matrix) for matrix in matrices)
    # Tables of the H100 are of FlashAttention 3, torch's is the second.
    attention = 1.65 * operators.prefill(tokens, tokens * length, shape.heads, shape.kv_heads, head)
    rest = model.layer(tokens, tokens * length) - products - attention
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * head, shape.kv_heads * head
    # A norm, a sum with its norm, and a sum; rotation in place; SwiGLU.
    vectors = (2 + 4 + 3) * hidden + 2 * (queries + keys) + 3 * inner
    assert rest == pytest.approx(stream(device, tokens * vectors))
    backward = sum(
        operators.product(tokens, inputs, outputs) + operators.product(outputs, inputs, tokens)
        for outputs, inputs in matrices
    )
    rest_backward = model.layer_backward(tokens, tokens * length) - backward - 2.5 * attention
    vectors = (4 + 3 + 3) * hidden + 2 * 2 * (queries + 2 * keys) + 5 * inner
    assert rest_backward == pytest.approx(stream(device, tokens * vectors))


def stream(device: DeviceKind, numbers: float) -> float:
    """Seconds of bfloat16 numbers that are read or written."""
    return 2 * numbers / (0.85 * device.memory_bytes_per_s)


def test_a_decode_step_of_few_rows_takes_the_time_of_its_kernels() -> None:
    few, many = (layers(DEVICES["h100"]).decode(rows, 1000.0) for rows in (1.0, 8.0))
    matrices = LocalSizes(SMALL, "lm", 1).matmul_shapes
    read = sum(2 * outputs * inputs for outputs, inputs in matrices) / DEVICES["h100"].memory_bytes_per_s
    # Matrices at 75 to 100 % of the bandwidth, and at least 2 µs for each of some 15 other kernels.
    assert 1.1 * read + 24e-6 < few < 1.5 * read + 60e-6
    assert many < 1.3 * few


def test_other_types_and_devices_without_tables_are_computed_from_data_sheets() -> None:
    assert find_operators(DEVICES["rtx-4090"]) is None and find_operators(DEVICES["cpu"]) is None
    device = DEVICES["h100"]
    assert layers(device, "float32").operators is None and layers(device).operators is not None
    bare = layers(replace(device, measured=None), "float32")
    assert layers(device, "float32").layer(1000.0, 1e6) == bare.layer(1000.0, 1e6)


def ring(spec: str, tp: int) -> Ring:
    placement = place(1, tp)
    site = ClusterSpec.parse(spec).site(placement.mesh)
    return Network((site,), Strategies.of([placement.strategy]), Efficiency()).group("tp")


def test_collectives_inside_a_node_are_tabulated_and_others_computed() -> None:
    operators, size = operators_of("h100"), 1e6
    assert ring("h100:2x8", 8).all_reduce(size) == operators.collective("all_reduce", 8, size)
    assert ring("h100:2x8", 4).all_gather(size) == operators.collective("all_gather", 4, size)
    between = ring("h100:2x8", 16)
    assert between.all_reduce(size) == pytest.approx(
        2 * 15 * (between.hop_s + size / 16 / between.bytes_per_s)
    )
    assert ring("h100:1x16", 16).operators is not None and ring("h100:1x16", 16).all_reduce(size) > 0
    assert ring("rtx-4090:1x8", 8).operators is None
