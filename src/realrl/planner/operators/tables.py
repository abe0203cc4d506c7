"""Measured seconds of operators, by device kind: products, attention and collectives, interpolated between sizes.

The tables of `measured/` are distilled by `tools/operator_tables.py` from measurements that NVIDIA publishes in the
package aiconfigurator-core (Apache-2.0): of products by torch.nn.functional.linear, attention by the kernels of
vLLM (FlashAttention 2 on A100 and L40S, 3 on H100 and H200, FlashInfer on B200), and collectives of NCCL inside a
node, all in bfloat16.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from realrl.plan.placement import Dtype
from realrl.planner.arrays.arrays import Floats, Real
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.operators.bounds import (
    LEAST_S,
    TablePoint,
    place_collective,
    place_decode,
    place_prefill,
    place_product,
)
from realrl.planner.operators.grid import Grid

Reduction = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Collectives that have tables."""

ROUNDS: dict[Reduction, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How many times a ring passes all parts on."""
TABULATED: Dtype = "bfloat16"
"""Type of the operands of all operators in the tables."""
FLASH3 = frozenset({"h100", "h200"})
"""Tables whose attention is that of FlashAttention 3."""
MOST_RANKS = 8
"""Largest group that has been measured."""


@dataclass(frozen=True)
class Operators:
    """Seconds of operators on a device: bounds by its peaks, times what the tables of its kind say of their ratio.

    Sizes are numbers or arrays.

    Nothing takes less than `LEAST_S`, also where sizes lie outside of tables.
    """

    device: DeviceKind
    grids: Mapping[str, Grid]

    def product(self, rows: Real, outputs: Real, inputs: Real) -> Floats:
        """Time a product of [rows, inputs] and [inputs, outputs]."""
        return self._time("product", place_product(self.device, rows, outputs, inputs))

    @property
    def flash3(self) -> bool:
        """Whether attention was measured with FlashAttention 3."""
        return self.device.measured in FLASH3

    def prefill(
        self,
        tokens: Real,
        squares: Real,
        heads: float,
        kv_heads: float,
        head_dim: float,
        window: int | None = None,
    ) -> Floats:
        """Time causal attention of whole sequences. `squares`: sum of squared lengths."""
        point = place_prefill(self.device, tokens, squares, heads, kv_heads, head_dim, window)
        return self._time("prefill", point)

    def decode(
        self,
        rows: Real,
        context: Real,
        heads: float,
        kv_heads: float,
        head_dim: float,
        window: int | None = None,
    ) -> Floats:
        """Time attention of one new token of each of `rows` sequences that have `context` tokens."""
        point = place_decode(self.device, rows, context, heads, kv_heads, head_dim, window)
        return self._time("decode", point)

    def collective(self, kind: Reduction, ranks: Real, number_bytes: Real) -> Floats:
        """Time a collective of 2 to `MOST_RANKS` ranks of a node.

        `number_bytes`: of the result of an all-gather, of the input of the others.
        """
        return self._time(kind, place_collective(self.device, ROUNDS[kind], ranks, number_bytes))

    def _time(self, table: str, point: TablePoint) -> Floats:
        return np.maximum(LEAST_S, point.bound * np.exp(self.grids[table].at(*point.sizes)))


@lru_cache
def find_operators(device: DeviceKind) -> Operators | None:
    """Read the tables of a device's kind; None if it has none."""
    if device.measured is None:
        return None
    grids = read_tables(device.measured)["grids"]
    return Operators(device, {name: Grid.read(stored) for name, stored in grids.items()})


def read_tables(name: str) -> dict[str, Any]:
    """Read a file of tables: what was measured (`source`), and its `grids` by name."""
    path = files("realrl.planner.operators.measured") / f"{name}.json"
    tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tables
