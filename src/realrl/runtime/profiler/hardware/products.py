"""Comparison of ways to multiply float32 matrices on this machine's processor.

    python -m realrl.runtime.profiler.hardware.products

prints the fastest as JSON, for `realrl.config.machine.processor`.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from realrl.config.machine.processor import ProductChoice
from realrl.model.ops import Products

_SHAPES = ((1024, 256, 1024), (2048, 768, 2048), (64, 512, 2048))
"""Rows, inputs and outputs: micro-batches of small models, and a decode step."""
_CLEARLY = 1.2
"""Ratio from which a way counts as faster: less is within what machines vary by."""
_SECONDS = 0.08
"""Time per way and shape."""


def compare_products() -> ProductChoice:
    """Measure each way in turns, and choose."""
    if not torch.backends.mkldnn.is_available():
        return ProductChoice()
    # One thread's processor time is what it is on a busy machine, too.
    torch.set_num_threads(1)
    plain, other, rounded = Products(), Products(onednn=True), Products(bfloat16=True)
    onednn = _compare(other, plain) > _CLEARLY
    return ProductChoice(onednn=onednn, bfloat16=_compare(rounded, other if onednn else plain) > _CLEARLY)


def _compare(way: Products, beside: Products) -> float:
    """Measure how many times as fast a way is, as the geometric mean over shapes."""
    logs = []
    for rows, inputs, outputs in _SHAPES:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        fastest = [math.inf, math.inf]
        end = time.thread_time() + 2 * _SECONDS
        while time.thread_time() < end or math.inf in fastest:
            for i, products in enumerate((way, beside)):
                fastest[i] = min(fastest[i], _time(partial(products.matmul_nt, x, weight)))
        logs.append(math.log(fastest[1] / fastest[0]))
    return math.exp(sum(logs) / len(logs))


def _time(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


if __name__ == "__main__":
    print(json.dumps(asdict(compare_products())))
