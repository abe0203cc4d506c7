"""Supervised fine-tuning, packed against padded: our engine beside plain transformers, in one process and run.

Both start from the same weights and take the same batches of the demo's sentences with the same optimizer, so
that they learn the same; they take turns, step by step, so that a noisy machine disturbs both alike.

    python demo/prepare.py && python bench/sft_throughput.py [--steps N] [--json FILE]
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from realrl.algorithms.sft.config import SFTExperiment
from realrl.algorithms.sft.method import SFTTrain
from realrl.data.batch import Batch
from realrl.data.dataset import Dataset
from realrl.data.order import Order
from realrl.engine.dtypes import find_products
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.huggingface import model_files
from realrl.huggingface.initial_weights import initialise
from realrl.huggingface.tokenizers import load_tokenizer, train_tokenizer
from realrl.recipe.load import load_experiment


def ours(model: Model, recipe: SFTExperiment) -> Any:
    """A function that takes a training step and returns its loss."""
    trainer, method = Trainer(model, recipe.models.actor.optimizer), SFTTrain()

    def step(batch: Batch, lr: float) -> float:
        everything = [list(range(len(batch)))]
        metrics = trainer.train(batch, method, everything, lr=lr, max_tokens=recipe.micro_batch_tokens)
        return metrics.result()["loss"]

    return step


def theirs(directory: str, recipe: SFTExperiment, pad: int) -> Any:
    """The same with transformers: batches padded to their longest sequence, the loss masked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = recipe.models.actor.optimizer
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )

    def step(batch: Batch, lr: float) -> float:
        rows = batch["tokens"].rows()
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        lengths = torch.tensor(batch["tokens"].lengths)[:, None]
        mask = torch.arange(tokens.shape[1]) < lengths
        learnt = torch.nn.utils.rnn.pad_sequence(batch["loss_mask"].rows(), batch_first=True)
        labels = tokens.masked_fill(learnt == 0, -100)
        loss = model(input_ids=tokens, attention_mask=mask.long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    recipe = load_experiment("recipes/demo/sft.yaml", [])
    assert isinstance(recipe, SFTExperiment) and recipe.models.actor.shape is not None
    shape = recipe.models.actor.shape
    with tempfile.TemporaryDirectory() as directory:
        train_tokenizer(recipe.data.train, directory, shape.vocab_size)
        tokenizer = load_tokenizer(directory)
    keys, ends = ("tokens", "loss_mask"), (tokenizer.eos_token_id,)
    records = Dataset.load(recipe.data.train, "answer", keys, tokenizer, recipe.data, recipe.seed, ends)
    order = Order(len(records), recipe.data.batch, recipe.seed)

    cpu = torch.device("cpu")
    products = find_products("float32", cpu)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=cpu, products=products)
    initialise(model.parameters, model.layout.specs, shape, recipe.seed)
    with tempfile.TemporaryDirectory() as directory:
        model_files.save(Path(directory) / "model", shape, "lm", model.parameters, tokenizer, torch.float32)
        steps = {
            "realrl": ours(model, recipe),
            "transformers": theirs(f"{directory}/model", recipe, tokenizer.pad_token_id),
        }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(arguments.steps):
        batch = records.batch(order.indices(index))
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step(batch, recipe.models.actor.optimizer.lr * min(1, (index + 1) / 20)))
            rates[name].append(sum(batch["tokens"].lengths) / (time.perf_counter() - start))
    report(rates, losses, arguments.json)


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def report(rates: dict[str, list[float]], losses: dict[str, list[float]], file: Path | None) -> None:
    """Print medians over all steps but the first three, which warm up."""
    tokens = {name: statistics.median(values[3:]) for name, values in rates.items()}
    ratio = statistics.median(
        a / b for a, b in zip(rates["realrl"][3:], rates["transformers"][3:], strict=True)
    )
    apart = max(abs(a - b) for a, b in zip(losses["realrl"], losses["transformers"], strict=True))
    result = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens_per_second": {name: round(value) for name, value in tokens.items()},
        "ratio": round(ratio, 2),
        "last_loss": {name: round(values[-1], 4) for name, values in losses.items()},
        "largest_loss_difference": apart,
    }
    print(json.dumps(result, indent=2))
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
