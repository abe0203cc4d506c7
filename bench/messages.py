"""Waiting times of two ranks on a CPU for each other.

With threads that preempt each other and with such that wait to be scheduled (`runtime.processes.process`), and with
receives that are posted when their messages are needed and such that are posted ahead (`engine.pipeline`).

An all-reduce of 16 KiB follows half a millisecond of products, as in tensor-parallel decoding. A pipeline of two
stages has two decode batches under way; a step computes for two milliseconds on each stage, and what it takes
beyond that is shown. Variants take turns; figures are medians of their means.

    OMP_NUM_THREADS=1 python bench/messages.py [--json FILE] [--rounds 5]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from realrl.engine.pipeline.messages import Pipeline, prefetch_receives
from realrl.runtime.processes import process
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE, leave
from realrl.runtime.processes.process import Process, connect

ROWS, WIDTH, STEPS = 32, 128, 200
SQUARE = torch.ones(64, 64)


def compute(products: int) -> None:
    for _ in range(products):
        SQUARE @ SQUARE


def products_in(seconds: float) -> int:
    """How many take so long."""
    compute(1000)
    begin = time.perf_counter()
    compute(5000)
    return max(1, round(5000 * seconds / (time.perf_counter() - begin)))


def all_reduce(one: Process) -> float:
    """Seconds, on average, on the first rank."""
    group = one.groups({(0, 1): frozenset({"tensor"})})[0, 1]
    tensor, products, waited = torch.ones(ROWS, WIDTH), products_in(0.5e-3), 0.0
    for _ in range(STEPS):
        compute(products)
        begin = time.perf_counter()
        group.sum(tensor)
        waited += time.perf_counter() - begin
    return waited / STEPS


def measure_step(one: Process, *, ahead: bool) -> float:
    """Seconds of a decode step beyond what each stage computes in it."""
    groups = one.groups({(0, 1): frozenset({"pipeline"}), (1, 0): frozenset({"reverse_pipeline"})})
    pair = Pipeline(
        groups[0, 1], groups[1, 0], hidden_size=WIDTH, dtype=torch.float32, device=torch.device("cpu")
    )
    products, hidden = products_in(2e-3), torch.ones(ROWS, WIDTH)
    begin = time.perf_counter()
    for _ in range(STEPS):
        compute(products)
    computed = time.perf_counter() - begin
    one.gather(None)
    begin = time.perf_counter()
    post_recv = pair.post_recv_gradient if pair.first else pair.post_recv
    sizes = [ROWS] * STEPS
    received = prefetch_receives(post_recv, sizes) if ahead else (post_recv(rows).wait() for rows in sizes)
    for i in range(STEPS):
        if not pair.first or i >= 2:
            next(received)
        compute(products)
        (pair.send if pair.first else pair.send_gradient)(hidden)
    for _ in received:
        pass
    pair.wait_sends()
    return (time.perf_counter() - begin - computed) / STEPS


def rank(variant: str) -> None:
    if variant == "preempting":
        process.wait_to_be_scheduled = lambda: None
    torch.set_num_threads(1)
    with connect("cpu") as one:
        figures = {
            "all_reduce_s": all_reduce(one),
            "step_posted_late_s": measure_step(one, ahead=False),
            "step_posted_ahead_s": measure_step(one, ahead=True),
        }
    if one.rank == 0:
        print(json.dumps(figures), flush=True)
    leave(0)


def run(variant: str) -> dict[str, float]:
    """Figures of two ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        ranks = []
        for i in range(2):
            environment = {
                **os.environ,
                "RANK": str(i),
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "lo",
                STORE_VARIABLE: str(Path(scratch) / "store"),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            command = [sys.executable, __file__, "--variant", variant]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        texts = [one.communicate()[0] for one in ranks]
    found: dict[str, float] = json.loads(texts[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", choices=("preempting", "waiting"), help="be one of the ranks")
    arguments = parser.parse_args()
    if arguments.variant is not None:
        rank(arguments.variant)
    found: dict[str, list[dict[str, float]]] = {"preempting": [], "waiting": []}
    for _ in range(arguments.rounds):
        for variant, rows in found.items():
            rows.append(run(variant))
    figures = {
        variant: {name: round(statistics.median(row[name] for row in rows), 6) for name in rows[0]}
        for variant, rows in found.items()
    }
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        result = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__, **figures}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
