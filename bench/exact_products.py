"""Cost of `exact: true` on a CPU: products, a generate call and a train step, in turns with the fast ones.

A generate call continues 32 prompts of 64 tokens by 64 tokens; a train step learns the sequences that it has made.
Reported are medians of the turns' ratios, of wall time and of the processor's time, which other processes disturb
less, and the largest difference of a log-probability of the sampler and the trainer.

    python bench/exact_products.py [--turns N] [--threads N] [--dtype float32|mixed|bfloat16] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from group_sampling import SHAPES
from results_file import ResultsFile

from realrl.algorithms.sft.method import SFTTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.dtypes import find_products, find_torch_dtype
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.huggingface.initial_weights import initialise
from realrl.model.arithmetic.ops import Products
from realrl.model.packing import Packing
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import OptimizerConfig

ROWS, PROMPT, NEW_TOKENS = 32, 64, 64
SIZES = [(1, 768, 256), (32, 768, 256), (32, 4096, 256), (4096, 768, 256), (4096, 256, 704)]
"""Rows, columns and depth of products of a model of 5 M parameters, in decode steps and in training."""


def compare(functions: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Time two functions in turns. -> median ratios of the second to the first"""
    wall: list[list[float]] = []
    used: list[list[float]] = []
    for function in functions.values():
        function()
    for _ in range(turns):
        begins = []
        for function in functions.values():
            begin = time.perf_counter(), time.process_time()
            function()
            begins.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        wall.append([seconds for seconds, _ in begins])
        used.append([seconds for _, seconds in begins])
    return {
        "seconds": round(statistics.median(turn[0] for turn in wall), 5),
        "exact_seconds": round(statistics.median(turn[1] for turn in wall), 5),
        "ratio": round(statistics.median(turn[1] / turn[0] for turn in wall), 2),
        "processor_ratio": round(statistics.median(turn[1] / turn[0] for turn in used), 2),
    }


def make_model(dtype: str, *, exact: bool) -> Model:
    cpu, shape = torch.device("cpu"), SHAPES["5M"]
    products = find_products(dtype, cpu, exact=exact)  # type: ignore[arg-type]
    torch_dtype = find_torch_dtype(dtype)  # type: ignore[arg-type]
    model = make_unsharded_model(shape, "lm", dtype=torch_dtype, device=cpu, products=products)
    initialise(model.parameters, model.layout.specs, shape, 1)
    return model


def sample(model: Model) -> Batch:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 4096, (PROMPT,), generator=generator) for _ in range(ROWS)]
    batch = Batch(tuple(range(ROWS)), {"prompts": Ragged.of(prompts)})
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS)
    return generate(
        model,
        batch,
        "prompts",
        sampling=settings,
        stop_token_ids=(),
        seed=SamplingSeed(1, 1),
        kv_capacity=10**5,
    )


@torch.no_grad()
def find_mismatch(model: Model, sampled: Batch) -> float:
    """Find the largest difference of a log-probability of the sampler and the trainer."""
    rows = sampled["sequences"]
    packing = Packing.of(rows.lengths, "cpu")
    found = model.compute_output(model.forward(rows, packing, None), rows, packing).logprobs
    assert found is not None
    answered = packing.positions >= PROMPT
    return float((found - sampled["logprobs"].values)[answered].abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "mixed", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = ResultsFile(arguments.json)
    name = f"{arguments.dtype}, {arguments.threads} threads"
    if arguments.dtype == "float32":
        exact = Products(exact=True)
        for rows, columns, depth in SIZES:
            x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
            ways = {
                "fast": lambda x=x, weight=weight: Products().matmul_nt(x, weight),
                "exact": lambda x=x, weight=weight: exact.forward_nt(x, weight),
            }
            found = compare(ways, 10 * arguments.turns)
            print(f"product of {rows} x {depth} and {depth} x {columns}: {found}", flush=True)
            results.add(f"product {rows} {columns} {depth}, {name}", found)
    models = {name: make_model(arguments.dtype, exact=name == "exact") for name in ("fast", "exact")}
    found = compare({name: lambda of=of: sample(of) for name, of in models.items()}, arguments.turns)
    found |= {f"mismatch_{name}": find_mismatch(of, sample(of)) for name, of in models.items()}
    print(f"generate: {found}", flush=True)
    results.add(f"generate, {name}", found)
    sequences = sample(models["fast"])["sequences"]
    mask = Ragged.of([torch.arange(n) >= PROMPT for n in sequences.lengths])
    batch = Batch(tuple(range(ROWS)), {"tokens": sequences, "loss_mask": mask})
    trainers = {name: Trainer(of, OptimizerConfig(lr=1e-6)) for name, of in models.items()}
    steps = {
        name: lambda of=of: of.train(batch, SFTTrain(), [list(range(ROWS))], lr=1e-6, max_tokens=8192)
        for name, of in trainers.items()
    }
    found = compare(steps, arguments.turns)
    print(f"train step: {found}", flush=True)
    results.add(f"train step, {name}", found)


if __name__ == "__main__":
    main()
