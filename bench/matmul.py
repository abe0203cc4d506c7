"""float32 matrix products on a CPU: torch's own choice of library beside oneDNN, in one run, taking turns.

python bench/matmul.py
"""

import statistics
import time

import torch
import torch.nn.functional as F

from realrl.config.hardware import choose_products

SIZES = ((4096, 192, 576), (4096, 192, 1024), (4096, 512, 192), (2048, 192, 2048))
"""Rows, inputs, outputs: the products of the demo's model."""


def main() -> None:
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, realrl's choice: {choose_products()}"
    )
    for rows, inputs, outputs in SIZES:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        ratios = []
        for _ in range(40):
            start = time.perf_counter()
            F.linear(x, weight)
            middle = time.perf_counter()
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            ratios.append((middle - start) / (time.perf_counter() - middle))
        ratio = statistics.median(ratios[5:])
        print(f"[{rows}, {inputs}] x [{inputs}, {outputs}]: oneDNN is {ratio:.2f} x as fast")


if __name__ == "__main__":
    main()
