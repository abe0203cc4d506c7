"""Sampling groups of answers that share their prompts, beside the same answers with every prompt by itself.

Both paths draw the same tokens with the same weights, in one process, in turns; either may go first. Answers have a
fixed length, or end at random (a share of the vocabulary ends them), so that most are short and a few are long.
Reported are the ratio of times (median of the ratios of the turns; of wall time, and of the processor's time, which
other processes disturb less), the bytes of the KV cache, and the peak of all allocations of a call, which another,
untimed run of it counts.

Besides, a cache for 64 rows serves 512 prompts whose answers end at random: continuous batching, beside the same
prompts in eight calls of 64, each of which waits for its longest answer.

    python bench/group_sampling.py [--shape 5M|50M] [--prompts N] [--samples N] [--turns N] [--threads N]
        [--dtype float32|bfloat16] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from realrl.data.batch import Batch, Ragged
from realrl.engine.dtypes import find_products
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout.kv_blocks import BLOCK_TOKENS, count_blocks, count_prompt_blocks
from realrl.planner.memory.kv_cache import kv_cache_bytes
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.measure.step_timer import count_allocations

SHAPES = {
    "5M": ModelShape(
        vocab_size=4096, hidden_size=256, intermediate_size=704, layers=4, heads=8, kv_heads=4, head_dim=32
    ),
    "50M": ModelShape(
        vocab_size=8192, hidden_size=640, intermediate_size=1728, layers=8, heads=10, kv_heads=5, head_dim=64
    ),
}
LENGTHS = (32, 128, 512)
NEW_TOKENS = 64


SLOTS, SERVED = 64, 512
"""Rows for which a cache has room, and prompts that it serves."""


class Case:
    """Answers to prompts of one length, sampled in either way."""

    def __init__(self, model: Model, length: int, *, prompts: int, samples: int, tailed: bool) -> None:
        self._model = model
        self._samples = samples
        generator = torch.Generator().manual_seed(length)
        rows = torch.randint(256, model.shape.vocab_size, (prompts, length), generator=generator)
        rows = rows.repeat_interleave(samples, 0)
        self._batch = Batch(tuple(range(len(rows))), {"prompts": Ragged.of(list(rows))})
        # One token in 16 would end an answer of a model without preferences.
        self._ends = tuple(range(model.shape.vocab_size // 16)) if tailed else ()

    def run(self, shared: bool) -> Batch:
        """Sample all answers; with `shared`, those of a prompt together."""
        return generate(
            self._model,
            self._batch,
            "prompts",
            sampling=GenerationConfig(max_new_tokens=NEW_TOKENS),
            stop_token_ids=self._ends,
            seed=SamplingSeed(1, 1),
            kv_capacity=1 << 30,
            samples=self._samples if shared else 1,
        )

    def count_peak(self, shared: bool) -> int:
        """Count the bytes allocated at the peak of a call."""
        with count_allocations() as found:
            self.run(shared)
        assert found.peak is not None
        return found.peak


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Run both ways in turns."""
    by_itself, shared = case.run(False), case.run(True)
    same = [
        a.equal(b) for a, b in zip(by_itself["sequences"].rows(), shared["sequences"].rows(), strict=True)
    ]
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        for way in (False, True) if turn % 2 else (True, False):
            begin = time.perf_counter(), time.process_time()
            case.run(way)
            wall[way].append(time.perf_counter() - begin[0])
            processor[way].append(time.process_time() - begin[1])
    ratios = [a / b for a, b in zip(wall[False], wall[True], strict=True)]
    return {
        "seconds_by_itself": round(statistics.median(wall[False]), 4),
        "seconds_shared": round(statistics.median(wall[True]), 4),
        "speedup": round(statistics.median(ratios), 2),
        "speedup_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "processor_speedup": round(
            statistics.median(a / b for a, b in zip(processor[False], processor[True], strict=True)), 2
        ),
        "same_sequences": f"{sum(same)} of {len(same)}",
        "peak_by_itself": case.count_peak(False),
        "peak_shared": case.count_peak(True),
    }


def serve(model: Model, length: int, turns: int) -> dict[str, Any]:
    """Serve many prompts with a cache for few, in one call and in calls of as many as it has room for."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randint(256, model.shape.vocab_size, (SERVED, length), generator=generator)
    batch = Batch(tuple(range(SERVED)), {"prompts": Ragged.of(list(rows))})
    capacity = SLOTS * BLOCK_TOKENS * (count_prompt_blocks(length) + count_blocks(NEW_TOKENS))

    def run(first: int, count: int) -> list[torch.Tensor]:
        found = generate(
            model,
            batch.select(range(first, first + count)),
            "prompts",
            sampling=GenerationConfig(max_new_tokens=NEW_TOKENS),
            stop_token_ids=tuple(range(model.shape.vocab_size // 16)),
            seed=SamplingSeed(1, 1),
            kv_capacity=capacity,
        )
        return found["sequences"].rows()

    ways = {
        "calls": lambda: [row for first in range(0, SERVED, SLOTS) for row in run(first, SLOTS)],
        "one call": lambda: run(0, SERVED),
    }
    drawn = [way() for way in ways.values()]
    same = sum(a.equal(b) for a, b in zip(*drawn, strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            begin = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        "prompt": length,
        "slots": SLOTS,
        "served": SERVED,
        "seconds_in_calls": round(statistics.median(times["calls"]), 4),
        "seconds_in_one_call": round(statistics.median(times["one call"]), 4),
        "speedup": round(statistics.median(ratios), 2),
        "speedup_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "same_sequences": f"{same} of {SERVED}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="5M")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, dtype = SHAPES[arguments.shape], getattr(torch, arguments.dtype)
    cpu = torch.device("cpu")
    products = find_products(arguments.dtype, cpu)
    model = make_unsharded_model(shape, "lm", dtype=dtype, device=cpu, products=products)
    initialise(model.parameters, model.layout.specs, shape, 1)
    rows = arguments.prompts * arguments.samples
    results = []
    for length in LENGTHS:
        cache = [
            kv_cache_bytes(
                LocalSizes(shape, "lm", 1),
                tokens=copies * length + rows * NEW_TOKENS,
                layers=shape.layers,
                element_bytes=dtype.itemsize,
            )
            for copies in (rows, arguments.prompts)
        ]
        for tailed in (False, True):
            case = Case(model, length, prompts=arguments.prompts, samples=arguments.samples, tailed=tailed)
            found = measure(case, arguments.turns)
            kind = "tailed" if tailed else "fixed"
            results.append(
                {
                    "prompt": length,
                    "answers": kind,
                    "cache_by_itself": cache[0],
                    "cache_shared": cache[1],
                    **found,
                }
            )
            print(
                f"prompts of {length:3} tokens, {kind:6} answers: {found['seconds_by_itself']:.3f} s by itself,"
                f" {found['seconds_shared']:.3f} s shared: {found['speedup']} x {found['speedup_range']},"
                f" of processor time {found['processor_speedup']} x;"
                f" cache {cache[0] / 2**20:.1f} -> {cache[1] / 2**20:.1f} MiB,"
                f" peak {found['peak_by_itself'] / 2**20:.1f} -> {found['peak_shared'] / 2**20:.1f} MiB;"
                f" equal sequences: {found['same_sequences']}",
                flush=True,
            )
    served = [serve(model, length, arguments.turns) for length in LENGTHS[:2]]
    for found in served:
        print(
            f"{SERVED} prompts of {found['prompt']:3} tokens in a cache for {SLOTS} rows:"
            f" {found['seconds_in_calls']:.3f} s in calls of {SLOTS}, {found['seconds_in_one_call']:.3f} s in one:"
            f" {found['speedup']} x {found['speedup_range']}; equal sequences: {found['same_sequences']}",
            flush=True,
        )
    if arguments.json is not None:
        setting = {name: value for name, value in vars(arguments).items() if name != "json"}
        about = {
            "date": date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
        }
        report = {**about, **setting, "new_tokens": NEW_TOKENS, "results": results, "served": served}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
