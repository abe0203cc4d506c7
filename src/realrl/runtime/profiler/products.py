"""Compare methods to multiply float32 matrices on this machine's processor.

python -m realrl.runtime.profiler.products

prints the fastest as JSON, for `realrl.config.hardware`.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from realrl.config.hardware import ProductChoice
from realrl.model.arithmetic.ops import Products

_SHAPES = ((1024, 256, 1024), (2048, 768, 2048), (64, 512, 2048))
"""Rows, inputs and outputs of products, as in micro-batches of small models and in a decode step."""
_FEW_ROWS = ((64, 256, 1024), (64, 768, 2048), (16, 512, 2048))
"""Rows, inputs and outputs of products, as in decode steps."""
_WEIGHTS = 1 << 21
"""Minimum number of elements in the weights that are used in turn, because decode steps find no weights in the
caches of the processor."""
_CLEARLY = 1.2
"""Minimum ratio of speeds at which a method counts as faster. Smaller ratios are within noise."""
_PACKED = 1.1
"""Minimum ratio for packed weights. It is lower, because their advantage grows with the number of threads."""
_SECONDS = 0.08
"""Seconds to measure each method and shape."""

WeightProduct = Callable[[Tensor], Tensor]
"""Product with a fixed weight. [N, K] -> [N, M]"""


def compare_products() -> ProductChoice:
    """Measure the methods in turn, and choose the fastest."""
    # The processor time of one thread is reliable even on a busy machine.
    torch.set_num_threads(1)
    if not torch.backends.mkldnn.is_available():
        return ProductChoice(packed=_compare(_pack, _use(Products()), _FEW_ROWS) > _PACKED)
    plain, other, rounded = (
        _use(products) for products in (Products(), Products(onednn=True), Products(bfloat16=True))
    )
    onednn = _compare(other, plain, _SHAPES) > _CLEARLY
    fastest = other if onednn else plain
    return ProductChoice(
        onednn=onednn,
        bfloat16=_compare(rounded, fastest, _SHAPES) > _CLEARLY,
        packed=_compare(_pack, fastest, _FEW_ROWS) > _PACKED,
    )


def _use(products: Products) -> Callable[[Tensor], WeightProduct]:
    return lambda weight: lambda x: products.matmul_nt(x, weight)


def _pack(weight: Tensor) -> WeightProduct:
    products = Products(packed=True)
    panels = products.pack(weight)
    return lambda x: products.multiply_packed(x, panels)


def _compare(
    way: Callable[[Tensor], WeightProduct],
    beside: Callable[[Tensor], WeightProduct],
    shapes: Sequence[tuple[int, int, int]],
) -> float:
    """Measure the speed of a method relative to another method, as the geometric mean over shapes."""
    logs = []
    for rows, inputs, outputs in shapes:
        x = torch.randn(rows, inputs)
        weights = [torch.randn(outputs, inputs) for _ in range(-(-_WEIGHTS // (inputs * outputs)))]
        sides = [[make(weight) for weight in weights] for make in (way, beside)]
        for products in sides:  # the first call loads or compiles code
            products[0](x)
        fastest = [math.inf, math.inf]
        end = time.thread_time() + 2 * _SECONDS
        while time.thread_time() < end or math.inf in fastest:
            for i, products in enumerate(sides):
                fastest[i] = min(fastest[i], _time(products, x))
        logs.append(math.log(fastest[1] / fastest[0]))
    return math.exp(sum(logs) / len(logs))


def _time(products: Sequence[WeightProduct], x: Tensor) -> float:
    start = time.thread_time()
    for multiply in products:
        multiply(x)
    return time.thread_time() - start


if __name__ == "__main__":
    print(json.dumps(asdict(compare_products())))
