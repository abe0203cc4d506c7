"""Make `src/realrl/planner/operators/measured/*.json` from NVIDIA's published measurements of operators.

    pip install aiconfigurator-core==0.12.0
    python tools/operator_tables.py

A tenth of the rows of each table, chosen by a hash of their sizes, is held out. The script prints the errors of the
tables on these rows, and writes some of the rows to `bench/reference/operators.json`, for tests.
It needs numpy and pyarrow, which the project requires anyway.
"""

import hashlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import parquet

from realrl.planner.cluster.devices import DEVICES, DeviceKind
from realrl.planner.operators.tables import (
    ROUNDS,
    Grid,
    TablePoint,
    place_collective,
    place_decode,
    place_prefill,
    place_product,
)

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "src/realrl/planner/operators/measured"
SAMPLE = ROOT / "bench/reference/operators.json"

POWERS = [float(1 << n) for n in range(18)]
FOLDERS = {
    "a100-80g": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
}
"""Folders of the package with the measurements of a device kind."""
ATTENTION = {"prefill": "context", "decode": "generation"}
HELD_OUT = 10
"""One in this many rows is held out."""
SAMPLED = 150
"""Number of held-out rows of each table in the sample, approximately."""

Sizes = tuple[float, ...]
Floats = NDArray[np.float64]


@dataclass
class Rows:
    """Measured seconds of an operator, by arguments. Several frameworks may have measured the same arguments."""

    seconds: dict[Sizes, list[float]] = field(default_factory=lambda: defaultdict(list))
    sources: set[str] = field(default_factory=set)

    def add(self, sizes: Sizes, row: Mapping[str, Any]) -> None:
        """Add a row of the package, whose latency is in milliseconds."""
        self.seconds[sizes].append(row["latency"] / 1e3)
        self.sources.add(row["source"])

    def medians(self) -> dict[Sizes, float]:
        """Return the median seconds for each set of arguments."""
        return {sizes: float(np.median(found)) for sizes, found in self.seconds.items()}


def read(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """Read the rows of all files of a folder whose paths match."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        sys.exit(f"{folder}: nothing matches {pattern}; another version of aiconfigurator-core?")
    for path in paths:
        source = " ".join(path.parts[-3:-1])
        yield from (row | {"source": source} for row in parquet.read_table(path).to_pylist())


def read_products(folder: Path) -> Rows:
    """Read the products of all frameworks. All call the same function of torch, so the median has less noise."""
    rows = Rows()
    for row in read(folder, "gemm/*/*/gemm_perf.parquet"):
        if row["gemm_dtype"] == "bfloat16":
            rows.add((row["m"], row["n"], row["k"]), row)
    return rows


def read_attention(folder: Path, kind: str) -> Rows:
    """Read the attention of vLLM for heads of 64, 128 and 256 dimensions. Other heads have different kernels."""
    rows = Rows()
    for row in read(folder, f"attention/vllm/*/{kind}_attention_perf.parquet"):
        if row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16" and row["head_dim"] in (64, 128, 256):
            length = row["isl"] + (row["step"] if kind == "generation" else 0)
            names = "num_heads", "num_key_value_heads", "head_dim"
            heads = tuple(row[name] for name in names)
            rows.add((row["batch_size"], length, *heads, row.get("window_size", 0)), row)
    return rows


def read_collectives(folder: Path, kind: str) -> Rows:
    """Read the collectives of NCCL, whose sizes are in elements of two bytes."""
    rows = Rows()
    for row in read(folder, "comm/nccl/*/nccl_perf.parquet"):
        if row["nccl_dtype"] == "half" and row["op_name"] == kind:
            rows.add((row["num_gpus"], 2 * row["message_size"]), row)
    return rows


def place(device: DeviceKind, table: str, sizes: Sizes) -> TablePoint:
    """Find the place of a row in its table, and the bound on its seconds."""
    if table == "product":
        return place_product(device, *sizes)
    if table in ATTENTION:
        batch, length, heads, kv_heads, head_dim, window = sizes
        shape = heads, kv_heads, head_dim, int(window) or None
        if table == "decode":
            return place_decode(device, batch, length, *shape)
        return place_prefill(device, batch * length, batch * length**2, *shape)
    rounds = next(count for kind, count in ROUNDS.items() if kind == table)
    return place_collective(device, rounds, int(sizes[0]), sizes[1])


def whole(table: str, sizes: Sizes) -> bool:
    """Return whether grids are fitted to a row. Attention with a window is derived from attention without one."""
    return table not in ATTENTION or not sizes[-1]


def held_out(table: str, sizes: Sizes) -> bool:
    """Return whether a row is held out, so that no table is fitted to it."""
    text = " ".join([table, *(f"{size:g}" for size in sizes)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % HELD_OUT == 0


def fit(axes: Sequence[Sequence[float]], points: Sequence[Sizes], values: Floats) -> Grid:
    """Fit a smooth grid to values at points, with least absolute deviations by reweighted least squares.

    Second differences along each axis have the weight 0.3 relative to deviations. They determine grid points
    without rows nearby. Conjugate gradients solve each least-squares problem.
    """
    frame = Grid(tuple(tuple(axis) for axis in axes), (0.0,) * int(np.prod([len(axis) for axis in axes])))
    index, weight = _corners(frame, points)
    bend, coefficient = _second_differences(frame)
    number = len(frame.values)
    found = np.zeros(number)
    importance = np.ones(len(values))
    for _ in range(6):

        def normal(x: Floats, importance: Floats = importance) -> Floats:
            deviations = importance * (x[index] * weight).sum(1)
            bends = 0.09 * (x[bend] * coefficient).sum(1)
            return _add(index, weight, deviations, number) + _add(bend, coefficient, bends, number)

        found = _solve(normal, _add(index, weight, importance * values, number), found)
        deviation = np.abs((found[index] * weight).sum(1) - values)
        importance = 1 / np.maximum(deviation, 0.02)
        importance /= importance.mean()
    return Grid(frame.axes, tuple(found.tolist()))


def _corners(frame: Grid, points: Sequence[Sizes]) -> tuple[NDArray[np.int64], Floats]:
    """Return the grid points from which each point is interpolated, and their weights, [N, 2^axes] each."""
    most = 1 << len(frame.axes)
    index = np.zeros((len(points), most), dtype=np.int64)
    weight = np.zeros((len(points), most))
    for i, point in enumerate(points):
        for j, (corner, share) in enumerate(frame.weights(point)):
            index[i, j], weight[i, j] = corner, share
    return index, weight


def _second_differences(frame: Grid) -> tuple[NDArray[np.int64], Floats]:
    """Return triples of neighbouring grid points, and the weights that compute their second differences, [M, 3]."""
    shape = [len(axis) for axis in frame.axes]
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    index, weight = [], []
    for axis, sizes in enumerate(frame.axes):
        for i in range(1, len(sizes) - 1):
            before, here, after = np.log2(sizes[i - 1 : i + 2])
            share = (here - before) / (after - before)
            index.append(np.stack([numbers.take(i + j, axis).ravel() for j in (-1, 0, 1)], axis=1))
            weight.append(np.tile([share - 1, 1, -share], (len(index[-1]), 1)))
    return np.concatenate(index), np.concatenate(weight)


def _add(index: NDArray[np.int64], weight: Floats, values: Floats, number: int) -> Floats:
    return np.bincount(index.ravel(), (weight * values[:, None]).ravel(), number)


def _solve(normal: Callable[[Floats], Floats], target: Floats, start: Floats) -> Floats:
    """Solve normal(x) = target by conjugate gradients."""
    x = start
    residual = target - normal(x)
    direction = residual
    square = residual @ residual
    for _ in range(500):
        image = normal(direction)
        step = square / (direction @ image)
        x = x + step * direction
        residual = residual - step * image
        square, last = residual @ residual, square
        if square < 1e-10 * (target @ target):
            break
        direction = residual + square / last * direction
    return x


def choose_axes(table: str, asked: Iterable[Sizes]) -> list[list[float]]:
    """Choose the points of a grid along each axis: sizes that were measured, or powers of two among them."""
    columns = [sorted(set(column)) for column in zip(*asked, strict=True)]
    if table == "product":
        # One row more than a power of two needs one tile more.
        rows = [*POWERS[:16], 17.0, 33.0, 65.0, 129.0, 192.0, 257.0, 513.0, 768.0]
        return [sorted(rows), columns[1], columns[2]]
    if table in ATTENTION:
        lengths, sequences = [1.0, 16.0, *POWERS[5 if table == "prefill" else 6 :]], POWERS[:15]
        groups = [1.0, 4.0, 16.0, 64.0] if table == "prefill" else [1.0, 2.0, 4.0, 8.0, 16.0, 64.0]
        return [[n for n in lengths if n <= columns[0][-1]], sequences, groups, columns[3]]
    return columns


def distil(device: DeviceKind, table: str, rows: Mapping[Sizes, float]) -> tuple[Grid, float]:
    """Fit a table to the rows that are not held out. Also returns the spread of its errors on held-out rows."""
    seen = [sizes for sizes in rows if whole(table, sizes) and not held_out(table, sizes)]
    placed = [place(device, table, sizes) for sizes in seen]
    points = [point.sizes for point in placed]
    values = [log(rows[sizes] / point.bound) for sizes, point in zip(seen, placed, strict=True)]
    grid = Grid.read(fit(choose_axes(table, points), points, np.array(values)).write())
    return grid, report(device, table, grid, rows)


def report(device: DeviceKind, table: str, grid: Grid, rows: Mapping[Sizes, float]) -> float:
    """Print the errors of held-out rows. Returns the 68.3 % quantile of |ln(measured / predicted)|."""

    def off(sizes: Sizes, seconds: float) -> float:
        point = place(device, table, sizes)
        return log(seconds / point.bound) - grid.at(*point.sizes)

    spread = 0.0
    for windows in (False, True):
        errors = [
            off(sizes, seconds)
            for sizes, seconds in rows.items()
            if held_out(table, sizes) and whole(table, sizes) is not windows
        ]
        if not errors:
            continue
        sizes_of = np.abs(np.expm1(-np.array(errors)))
        median, tenth = 100 * np.quantile(sizes_of, [0.5, 0.9])
        name = table + (", windows" if windows else "")
        print(f"{device.name:9} {name:17} {len(errors):5} rows held out: {median:4.1f} % {tenth:5.1f} %")
        if not windows:
            spread = float(np.quantile(np.abs(errors), 0.683))
    return spread


def main() -> None:
    """Write all tables, and the sample."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("install aiconfigurator-core, whose measurements are distilled")
    data = Path(spec.submodule_search_locations[0]) / "systems/data"
    package = f"aiconfigurator-core {version('aiconfigurator-core')} (Apache-2.0)"
    sample: dict[str, Any] = {}
    for name, folder in FOLDERS.items():
        device = DEVICES[name]
        assert device.measured is not None
        tables = {"product": read_products(data / folder)}
        tables |= {table: read_attention(data / folder, kind) for table, kind in ATTENTION.items()}
        tables |= {kind: read_collectives(data / folder, kind) for kind in ROUNDS}
        grids, spreads, sources = {}, {}, {}
        for table, rows in tables.items():
            medians = rows.medians()
            grid, spreads[table] = distil(device, table, medians)
            grids[table] = grid.write()
            sources[table] = ", ".join(sorted(rows.sources))
            held = [[*sizes, seconds] for sizes, seconds in medians.items() if held_out(table, sizes)]
            step = max(1, len(held) // SAMPLED)
            sample.setdefault(device.measured, {})[table] = list(
                itertools.islice(sorted(held), 0, None, step)
            )
        path = TABLES / f"{device.measured}.json"
        write(path, {"source": package, "measured_by": sources, "spread": spreads, "grids": grids})
        print(f"{path.name}: {path.stat().st_size // 1000} KB")
    write(SAMPLE, {"source": package, "held_out": sample})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON. Long lists of numbers have 100 numbers per line."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def lines(value: Any, indent: str) -> str:
        if isinstance(value, Mapping):
            inner = indent + " "
            parts = [f"{inner}{json.dumps(key)}: {lines(item, inner)}" for key, item in value.items()]
            return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
        if isinstance(value, list) and len(value) > 100:
            chunks = [value[i : i + 100] for i in range(0, len(value), 100)]
            return "[" + ",\n".join(json.dumps(chunk, separators=(",", ":"))[1:-1] for chunk in chunks) + "]"
        if isinstance(value, float):
            return f"{value:.4g}"
        return json.dumps(value, separators=(",", ":"))

    path.write_text(lines(content, "") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
