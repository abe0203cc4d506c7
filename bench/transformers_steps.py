"""Generation and supervised fine-tuning beside plain `transformers` on a CPU, and shares of its product peak.

Both sides have the same weights, prompts and texts, and take turns in one process, so that a noisy machine disturbs
both alike.

- `fixed`: 64 prompts of 128 tokens are continued by 128 tokens each.
- `tails`: by log-normal numbers of tokens, of at most 512, the same on both sides.
- `groups`: 8 prompts of 512 tokens have 8 answers of 128 tokens each; `transformers` prefills every row.
- `sft`: 64 texts of log-normal lengths, of the larger models 32 and 8, which `transformers` pads.

The product peak is that of the fastest of a few large products, with any library that realrl may choose. A share is
the arithmetic of a step's products (attention's not counted) beside what the peak would do in its time; rows of a
decode step are few, so that their products are slower.

    python bench/transformers_steps.py [--cases NAME ...] [--rounds 5] [--json FILE]

A name is CASE-SIZE-DTYPE, such as fixed-5M-float32. The type is that of realrl: float32, or mixed (float32 with
products of bfloat16 operands); `transformers` computes in float32, or for `mixed` in the faster of float32 and
bfloat16.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from results_file import ResultsFile
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from realrl.algorithms.sft.method import SFTTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.dtypes import find_products
from realrl.engine.generation.decode_step import DecodeStep
from realrl.engine.generation.generator import generate
from realrl.engine.generation.row_buffers import BufferedRows
from realrl.engine.generation.sampling import SamplingNoise, SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.initial_weights import initialise
from realrl.model.arithmetic.ops import Products
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import OptimizerConfig

CPU = torch.device("cpu")
SHAPES = {
    "5M": ModelShape(
        vocab_size=4096, hidden_size=256, intermediate_size=704, layers=4, heads=8, kv_heads=4, head_dim=32
    ),
    "50M": ModelShape(
        vocab_size=8192, hidden_size=640, intermediate_size=1728, layers=8, heads=10, kv_heads=5, head_dim=64
    ),
    "100M": ModelShape(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        layers=12,
        heads=12,
        kv_heads=12,
        head_dim=64,
    ),
}
TEXTS = {"5M": 64, "50M": 32, "100M": 8}
ROWS, PROMPT, ANSWER, LONGEST, LONG_PROMPT, GROUP = 64, 128, 128, 512, 512, 8
END = 1
"""The token that ends an answer."""
MICRO_BATCH_TOKENS = 4096
NAMES = [
    f"{case}-{size}-{dtype}"
    for dtype in ("float32", "mixed")
    for size, cases in (
        ("5M", ("fixed", "tails", "groups", "sft")),
        ("50M", ("fixed", "sft")),
        ("100M", ("sft",)),
    )
    for case in cases
]


@dataclass(frozen=True)
class Side:
    """One side of a case: a step, and the multiplications and additions of its products."""

    step: Callable[[], object]
    tokens: int
    """Tokens of a step that are no padding."""
    flops: float = 0.0


def draw_lengths(count: int, *, median: float, sigma: float, most: int) -> list[int]:
    """Draw log-normal lengths."""
    rng = random.Random(7)
    return [max(4, min(most, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def count_weights(shape: ModelShape) -> int:
    """Count the weights that a token is multiplied by, those of the head included."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden_size * shape.intermediate_size) + (
        shape.vocab_size * shape.hidden_size
    )


def end_answers(lengths: Sequence[int]) -> Callable[[], None]:
    """End realrl's n-th row after so many tokens, instead of where the model would; returns what undoes it."""
    run, make_keys = DecodeStep.run, SamplingNoise.make_keys
    by_key: dict[int, int] = {}

    def note_keys(self: SamplingNoise, items: Tensor) -> Tensor:
        keys = make_keys(self, items)
        by_key.update(zip(keys.tolist(), (lengths[item] for item in items.tolist()), strict=True))
        return keys

    def run_and_end(self: DecodeStep, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        tokens = run(self, rows, hidden)
        ending = torch.tensor([by_key[key] for key in rows.keys.tolist()]) == rows.cached.own_lengths
        tokens = tokens.masked_fill(tokens == END, END + 1).masked_fill_(ending, END)
        rows.sampled[0] = rows.tokens.copy_(tokens)
        return tokens

    def undo() -> None:
        SamplingNoise.make_keys = make_keys  # type: ignore[method-assign]
        DecodeStep.run = run  # type: ignore[method-assign]

    SamplingNoise.make_keys = note_keys  # type: ignore[method-assign]
    DecodeStep.run = run_and_end  # type: ignore[method-assign]
    return undo


class EndAnswers(transformers.LogitsProcessor):
    """Ends the n-th row of `transformers` after so many tokens."""

    def __init__(self, lengths: Sequence[int], prompt: int) -> None:
        self._lengths, self._prompt = torch.tensor(lengths), prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ending = self._lengths == input_ids.shape[1] - self._prompt + 1
        scores[:, END] = -torch.inf
        scores[ending] = -torch.inf
        scores[ending, END] = 0.0
        return scores


def make_generation(case: str, model: Model, theirs: Any) -> tuple[Side, Side]:
    """Make both sides of sampling answers."""
    samples = GROUP if case == "groups" else 1
    length = LONG_PROMPT if case == "groups" else PROMPT
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(8, model.shape.vocab_size, (ROWS // samples, length), generator=generator)
    prompts = prompts.repeat_interleave(samples, 0)
    most = LONGEST if case == "tails" else ANSWER
    lengths = draw_lengths(ROWS, median=64, sigma=1.0, most=most) if case == "tails" else [most] * ROWS
    batch = Batch(tuple(range(ROWS)), {"prompts": Ragged.of(list(prompts))})

    # Ending answers takes either side time that is not its own.
    ends = case == "tails"

    def ours() -> Batch:
        undo = end_answers(lengths) if ends else lambda: None
        drawn = generate(
            model,
            batch,
            "prompts",
            sampling=GenerationConfig(max_new_tokens=most),
            stop_token_ids=(END,) if ends else (),
            seed=SamplingSeed(1, 1),
            kv_capacity=1 << 30,
            samples=samples,
        )
        undo()
        assert [n - length for n in drawn["sequences"].lengths] == lengths
        return drawn

    # Temperature 1, and neither top-k nor top-p.
    config = transformers.GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=most,
        eos_token_id=END if ends else None,
        pad_token_id=0,
        use_cache=True,
    )
    processors = transformers.LogitsProcessorList([EndAnswers(lengths, length)] if ends else [])
    mask = torch.ones_like(prompts)

    def other() -> Tensor:
        with torch.no_grad():
            return theirs.generate(
                prompts, attention_mask=mask, generation_config=config, logits_processor=processors
            )

    head = model.shape.vocab_size * model.shape.hidden_size
    weights = count_weights(model.shape)
    prefilled = len(prompts) // samples * (length - 1)
    flops = 2 * (sum(lengths) * weights + prefilled * (weights - head))
    return Side(ours, sum(lengths), flops), Side(other, sum(lengths))


def make_training(size: str, model: Model, theirs: Any) -> tuple[Side, Side]:
    """Make both sides of supervised fine-tuning."""
    lengths = draw_lengths(TEXTS[size], median=128, sigma=0.8, most=LONGEST)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(8, model.shape.vocab_size, (n,), generator=generator) for n in lengths]
    tokens = Ragged.of(texts)
    learnt = torch.ones(len(tokens.values), dtype=torch.int64)
    learnt[list(tokens.offsets[:-1])] = 0
    batch = Batch(tuple(range(len(texts))), {"tokens": tokens, "loss_mask": Ragged(learnt, tokens.lengths)})
    trainer = Trainer(model, OptimizerConfig(lr=1e-6))
    everything = [list(range(len(texts)))]
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-6, fused=True)
    rows = pad_sequence(texts, batch_first=True)
    mask = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
    # As many rows at a time as realrl has tokens.
    at_once = max(1, MICRO_BATCH_TOKENS // rows.shape[1])

    def other() -> None:
        order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__))
        for part in order.split(at_once):
            longest = max(lengths[i] for i in part.tolist())
            ids, there = rows[part, :longest], mask[part, :longest]
            labels = ids.masked_fill(~there, -100)
            loss = theirs(input_ids=ids, attention_mask=there.long(), labels=labels).loss
            (loss * len(part) / len(lengths)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> object:
        return trainer.train(batch, SFTTrain(), everything, lr=1e-6, max_tokens=MICRO_BATCH_TOKENS)

    flops = 6 * sum(lengths) * count_weights(model.shape)
    return Side(ours, sum(lengths), flops), Side(other, sum(lengths))


def measure_peak(products: Sequence[Products]) -> float:
    """Measure the fastest of a few large products, in operations per second."""
    best = 0.0
    for way in products:
        for rows, inputs, outputs in ((4096, 1024, 1024), (2048, 2048, 2048), (4096, 2048, 2048)):
            x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
            for _ in range(6):
                start = time.perf_counter()
                way.matmul_nt(x, weight)
                best = max(best, 2 * rows * inputs * outputs / (time.perf_counter() - start))
    return best


def take_turns(ours: Side, other: Side, rounds: int) -> dict[str, Any]:
    """Time both sides in turns, after one that is not counted."""
    seconds: dict[str, list[float]] = {"realrl": [], "transformers": []}
    for turn in range(rounds + 1):
        sides = [("realrl", ours), ("transformers", other)]
        for name, side in sides if turn % 2 else sides[::-1]:
            start = time.perf_counter()
            side.step()
            seconds[name].append(time.perf_counter() - start)
    mine, their = seconds["realrl"][1:], seconds["transformers"][1:]
    ratios = [b / a for a, b in zip(mine, their, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "seconds": round(statistics.median(mine), 3),
        "transformers_seconds": round(statistics.median(their), 3),
        "tokens": ours.tokens,
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure a case."""
    case, size, dtype = name.split("-")
    shape = SHAPES[size]
    products = find_products("mixed" if dtype == "mixed" else "float32", CPU)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=CPU, products=products)
    initialise(model.parameters, model.layout.specs, shape, 1)
    with tempfile.TemporaryDirectory() as directory:
        model_files.save(Path(directory) / "model", shape, "lm", model.parameters, None, torch.float32)
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, f"{directory}/model")
        theirs = {"float32": load(dtype=torch.float32)}
        if dtype == "mixed":
            theirs["bfloat16"] = load(dtype=torch.bfloat16)
    make = partial(make_training, size) if case == "sft" else partial(make_generation, case)
    sides = {kind: make(model, other) for kind, other in theirs.items()}
    found = {kind: take_turns(*pair, rounds) for kind, pair in sides.items()}
    kind = max(found, key=lambda kind: -found[kind]["transformers_seconds"])
    ways = [products] if dtype == "mixed" else [Products(), Products(onednn=True)]
    peak = measure_peak(ways)
    (ours, _), result = sides[kind], found[kind]
    return {
        **result,
        "theirs": kind,
        "threads": torch.get_num_threads(),
        "onednn": products.onednn,
        "peak_gflops": round(peak / 1e9),
        "share_of_peak": round(ours.flops / result["seconds"] / peak, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="NAME", default=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = ResultsFile(arguments.json, ("torch", "transformers"))
    transformers.utils.logging.set_verbosity_error()
    for name in arguments.cases:
        found = measure(name, arguments.rounds)
        results.add(name, found)
        print(
            f"{name}: {found['seconds']} s, {found['tokens'] / found['seconds']:.0f} tokens/s;"
            f" transformers ({found['theirs']}) {found['transformers_seconds']} s: {found['ratio']} x"
            f" {found['ratio_range']}; {found['share_of_peak']:.0%} of {found['peak_gflops']} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
