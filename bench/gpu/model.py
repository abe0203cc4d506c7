"""The model path on one GPU: training against peak arithmetic, decoding against peak memory bandwidth.

Training counts 6 operations per parameter and token, plus attention; decoding counts the bytes of the weights and
of the keys and values read per step. Peaks are measured in the same run: a large matrix product, a large copy.

    python bench/gpu/model.py [--layers N] [--json FILE]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from realrl.algorithms.sft.method import SFTTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import ModelShape
from realrl.model.cache import KVCache
from realrl.model.init import initialise
from realrl.model.packing import Packing
from realrl.recipe.model import OptimizerConfig

TOKENS, LENGTH = 16384, 2048
ROWS, CONTEXT = 128, 1024


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call, after two that warm up."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def peaks() -> tuple[float, float]:
    """Operations per second of a bfloat16 product, and bytes per second of a copy (read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    arithmetic = 2 * 8192**3 / seconds(lambda: a @ b)
    return arithmetic, 2 * source.numel() / seconds(lambda: target.copy_(source))


def training(model: Model) -> float:
    """Operations per second of forward, backward and update on packed sequences."""
    trainer = Trainer(model, OptimizerConfig())
    count = TOKENS // LENGTH
    rows = Ragged(torch.randint(0, model.shape.vocab_size, (TOKENS,)), (LENGTH,) * count)
    masks = Ragged.of([(torch.arange(n) > 0).long() for n in rows.lengths])
    batch = Batch(tuple(range(count)), {"tokens": rows, "loss_mask": masks})
    everything = [list(range(count))]
    elapsed = seconds(lambda: trainer.train(batch, SFTTrain(), everything, lr=1e-5, max_tokens=TOKENS), 5)
    shape = model.shape
    attention = 6 * shape.layers * shape.heads * shape.head_dim * LENGTH * TOKENS
    return (6 * model.sets["base"].buffer.data.numel() * TOKENS + attention) / elapsed


@torch.no_grad()
def decoding(model: Model) -> float:
    """Bytes of weights, keys and values read per second while one token is decoded for each of ROWS rows."""
    shape, device = model.shape, model.device
    cache = KVCache(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rows=ROWS,
        max_tokens=CONTEXT + 64,
        dtype=torch.bfloat16,
        device=device,
    )
    cache.start(Packing.of([CONTEXT] * ROWS, device))
    tokens = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def step() -> None:
        model.transformer.compute_logits(model.transformer.decode(tokens, cache))

    elapsed = seconds(step, 20)
    values = 2 * shape.layers * ROWS * CONTEXT * shape.kv_heads * shape.head_dim
    return 2 * (model.sets["base"].buffer.data.numel() + values) / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here; nothing measured")
        return
    shape = ModelShape(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, layers=arguments.layers, heads=32,
        kv_heads=8, head_dim=64, tied_embeddings=True, max_positions=8192, rope_theta=500000.0,
    )  # fmt: skip
    model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=torch.device("cuda"))
    initialise(model.parameters, model.layout.specs, shape, 1)
    arithmetic, bandwidth = peaks()
    decoded, trained = decoding(model), training(model)
    result = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": model.sets["base"].buffer.data.numel(),
        "matmul_tflops": round(arithmetic / 1e12, 1),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "training_tflops": round(trained / 1e12, 1),
        "training_over_matmul": round(trained / arithmetic, 3),
        "decoding_gb_per_s": round(decoded / 1e9, 1),
        "decoding_over_copy": round(decoded / bandwidth, 3),
    }
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
