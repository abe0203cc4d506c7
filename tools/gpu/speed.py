"""Measure training, decoding and their operators on one GPU.

The figures are compared with predictions of the planner and with transformers. `run.sh` sets the path for the
imports from bench/.
"""

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import predict
import torch
import torch.nn.functional as F
from model_steps import CONTEXT, LENGTH, LONG, SHORT, count_decoding_bytes, count_training_operations
from parity import time_decode
from results import CPU, PLACE, attempt, over, record, replayed, seconds_of, sync
from torch import Tensor

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation import decode_step
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.families.tensors import Init
from realrl.model.arithmetic.ops import PLAIN
from realrl.model.gpu_logprobs import TokenLogprobs
from realrl.model.group import make_single_rank_group
from realrl.model.logprobs import LogprobOptions
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import find_gpu_kind
from realrl.planner.operators.tables import find_operators
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import OptimizerConfig

TINY = SHAPES["qwen2.5-0.5b"].model_copy(
    update={
        "layers": 2,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
    }
)
SIZES = {"0.5B": "qwen2.5-0.5b", "1.5B": "qwen2.5-1.5b", "7B": "qwen2.5-7b"}
NAME = "cpu" if CPU else torch.cuda.get_device_name(PLACE)
KIND = find_gpu_kind(NAME)
SPEC = ClusterSpec.parse(f"{KIND.name if KIND is not None else 'h100'}:1x1")
PEAKS = {"flops": 1e11, "bandwidth": 1e10}
"""Operations and bytes per second, which `measure_peaks` sets."""


def shape_of(size: str) -> ModelShape:
    return TINY if CPU else SHAPES[SIZES[size]]


def clean() -> None:
    gc.collect()
    if not CPU:
        torch.cuda.empty_cache()


def make(size: str) -> tuple[ModelShape, Model]:
    shape = shape_of(size)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32 if CPU else torch.bfloat16, device=PLACE)
    for part in model.sets.values():
        part.buffer.data.normal_(0.0, 0.02)
    for spec in model.parameters.tensors:
        if spec.init in (Init.ONES, Init.ZEROS):
            model.parameters[spec.name].fill_(float(spec.init is Init.ONES))
    return shape, model


def measure_peaks() -> dict[str, Any]:
    n = 256 if CPU else 8192
    a, b = (torch.randn(n, n, device=PLACE).to(torch.bfloat16) for _ in range(2))
    PEAKS["flops"] = 2 * n**3 / seconds_of(lambda: a @ b, 10)
    source = torch.randn((1 << 20) if CPU else (1 << 29), device=PLACE)
    target = torch.empty_like(source)
    PEAKS["bandwidth"] = 8 * source.numel() / seconds_of(lambda: target.copy_(source), 7)
    found = {"tflops": PEAKS["flops"] / 1e12, "copy_gb_per_s": PEAKS["bandwidth"] / 1e9}
    if CPU:
        return found
    small = torch.zeros(1, device=PLACE)
    begin = time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    found["host_us_per_launch"] = (time.perf_counter() - begin) / 2000 * 1e6
    sync()
    found["graph_us_per_kernel"] = replayed(lambda: small.add_(1), 200) * 1e6
    begin = time.perf_counter()
    for _ in range(200):
        small.item()
    found["us_per_item"] = (time.perf_counter() - begin) / 200 * 1e6
    return {**found, **measure_allocation()}


def measure_allocation() -> dict[str, Any]:
    """Measure the seconds to allocate and to free 20 GiB."""
    found = {}
    clean()
    sync()
    begin = time.perf_counter()
    block = torch.empty(20 << 30, dtype=torch.uint8, device=PLACE)
    sync()
    found["allocate_20_gib_s"] = time.perf_counter() - begin
    del block
    begin = time.perf_counter()
    torch.cuda.empty_cache()
    sync()
    found["free_20_gib_s"] = time.perf_counter() - begin
    return found


class TrainingStep:
    """SFT step on random tokens."""

    def __init__(self, size: str, tokens: int, recompute: bool = False) -> None:
        self.shape, model = make(size)
        self.length, self.tokens = (64, 256) if CPU else (LENGTH, tokens)
        self._recompute = recompute
        self._trainer = Trainer(model, OptimizerConfig())
        count = self.tokens // self.length
        rows = Ragged(torch.randint(0, self.shape.vocab_size, (self.tokens,)), (self.length,) * count)
        masks = Ragged.of([(torch.arange(n) > 0).long() for n in rows.lengths])
        self._batch = Batch(tuple(range(count)), {"tokens": rows, "loss_mask": masks}).to(PLACE)
        self._minibatches = [list(range(count))]

    def run(self) -> None:
        """Train once."""
        self._trainer.train(
            self._batch,
            SFTMethod(),
            self._minibatches,
            lr=1e-6,
            max_tokens=self.tokens,
            recompute=self._recompute,
        )


def measure_training(size: str, tokens: int, recompute: bool = False) -> dict[str, Any]:
    """Measure training steps, and compare them with the planner's prediction."""
    step = TrainingStep(size, tokens, recompute)
    shape, tokens, length = step.shape, step.tokens, step.length
    if not CPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(step.run, 3, 2)
    work = count_training_operations(shape, tokens, length)
    share = predict.predict_training(SPEC, shape, tokens) if not CPU else float("nan")
    predicted = work / share / SPEC.groups[0].device.flops("bfloat16") if not CPU else float("nan")
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": work / seconds / 1e12,
        "of_measured_peak": work / seconds / PEAKS["flops"],
        "predicted_s": predicted,
        "measured_over_predicted": seconds / predicted,
        **({} if CPU else {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}),
    }


def measure_update(size: str) -> dict[str, Any]:
    """Measure the optimizer step alone."""
    _, model = make(size)
    trainer = Trainer(model, OptimizerConfig())
    n = trainer.gradients.data.numel()

    def step() -> None:
        trainer.gradients.data.fill_(1e-3)
        trainer.optimizer.step(1e-6)

    fill = seconds_of(lambda: trainer.gradients.data.fill_(1e-3), 3, 1)
    seconds = seconds_of(step, 3, 1) - fill
    return {
        "parameters": n,
        "seconds": seconds,
        "bytes_per_parameter_at_bandwidth": seconds * PEAKS["bandwidth"] / n,
    }


def run_generate(
    model: Model,
    rows: int,
    context: int,
    new_tokens: int,
    ends: tuple[int, ...] = (3,),
    least: int | None = None,
    samples: int = 1,
) -> Batch:
    shape = model.shape
    prompts = Ragged(torch.randint(4, shape.vocab_size, (rows * context,)), (context,) * rows)
    batch = Batch(tuple(range(rows)), {"prompts": prompts})
    sampling = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens if least is None else least
    )
    return generate(
        model,
        batch,
        "prompts",
        sampling=sampling,
        stop_token_ids=ends,
        seed=SamplingSeed(1, 1),
        kv_capacity=2 * rows * (context + new_tokens),
        samples=samples,
    )


class Captures:
    """Counts and times the captures of CUDA graphs inside a `with` block."""

    def __enter__(self) -> "Captures":
        self.seconds, self.count, self._made = 0.0, 0, decode_step._StepGraph.__init__

        def timed(graph: Any, *arguments: Any) -> None:
            begin = time.perf_counter()
            self._made(graph, *arguments)
            self.seconds += time.perf_counter() - begin
            self.count += 1

        decode_step._StepGraph.__init__ = timed
        return self

    def __exit__(self, *_: object) -> None:
        decode_step._StepGraph.__init__ = self._made


def measure_decoding(model: Model, rows: int) -> dict[str, Any]:
    shape = model.shape
    context, short, long = (16, 4, 12) if CPU else (CONTEXT, SHORT, LONG)

    def time_of(new_tokens: int, repeats: int) -> float:
        times = []
        for _ in range(repeats + 1):
            sync()
            begin = time.perf_counter()
            run_generate(model, rows, context, new_tokens)
            sync()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    with Captures() as captures:
        first, second = time_of(long, 2), time_of(short, 2)
    seconds = (first - second) / (long - short)
    moved = count_decoding_bytes(shape, rows, context + (short + long) / 2)
    predicted = float("nan") if CPU else predict.predict_decoding(SPEC, shape, rows)[0]
    return {
        "ms_per_token": 1e3 * seconds,
        "predicted_ms": 1e3 * predicted,
        "measured_over_predicted": seconds / predicted,
        "of_copy_bandwidth": moved / seconds / PEAKS["bandwidth"],
        "tokens_per_s": rows / seconds,
        "rest_s": second - short * seconds,
        "ms_per_capture": 1e3 * captures.seconds / max(1, captures.count),
    }


def measure_tail(model: Model) -> dict[str, Any]:
    """Measure generation of answers of different lengths, whose number of rows shrinks as answers end.

    Each number of rows has its own CUDA graph.
    """
    rows, context, most = (6, 8, 12) if CPU else (256, 256, 1024)
    ends = tuple(range(4, 4 + max(1, model.shape.vocab_size // 300)))
    run_generate(model, rows, context, most, ends, 0, 8)
    with Captures() as captures:
        sync()
        begin = time.perf_counter()
        out = run_generate(model, rows, context, most, ends, 0, 8)
        sync()
        seconds = time.perf_counter() - begin
    lengths = [n - context for n in out["sequences"].lengths]
    return {
        "seconds": seconds,
        "new_tokens": sum(lengths),
        "tokens_per_s": sum(lengths) / seconds,
        "longest": max(lengths),
        "mean": statistics.mean(lengths),
        "captures": captures.count,
        "share_of_captures": captures.seconds / seconds,
    }


def measure_top_p(model: Model, rows: int) -> dict[str, Any]:
    context, new = (8, 4) if CPU else (128, 64)
    times = {}
    for share in (1.0, 0.95):
        prompts = Ragged(torch.randint(4, model.shape.vocab_size, (rows * context,)), (context,) * rows)
        batch = Batch(tuple(range(rows)), {"prompts": prompts})
        sampling = GenerationConfig(max_new_tokens=new, min_new_tokens=0, top_p=share)
        for _ in range(2):
            sync()
            begin = time.perf_counter()
            generate(
                model,
                batch,
                "prompts",
                sampling=sampling,
                stop_token_ids=(),
                seed=SamplingSeed(1, 1),
                kv_capacity=4 * rows * (context + new),
            )
            sync()
            times[share] = time.perf_counter() - begin
    return {
        "plain_s": times[1.0],
        "top_p_s": times[0.95],
        "more_ms_per_token": (times[0.95] - times[1.0]) / new * 1e3,
    }


def make_other(size: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = shape_of(size)
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    with torch.device(PLACE):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if CPU else torch.bfloat16, attn_implementation="sdpa"
        )


def measure_other_training(size: str) -> dict[str, Any]:
    model = make_other(size)
    rows, length = (2, 64) if CPU else (4, LENGTH)
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=PLACE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not CPU)
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = seconds_of(step, 3, 2)
    work = count_training_operations(shape_of(size), rows * length, length)
    return {"tokens_per_s": rows * length / seconds, "tflops": work / seconds / 1e12}


def measure_other_generating(size: str, rows: int) -> dict[str, Any]:
    model = make_other(size).eval()
    context, new = (8, 4) if CPU else (CONTEXT, 40)
    ids = torch.randint(4, model.config.vocab_size, (rows, context), device=PLACE)

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=count,
                min_new_tokens=count,
            )

    long, short = seconds_of(lambda: run(new), 1, 1), seconds_of(lambda: run(new // 4), 1, 1)
    return {"ms_per_token": (long - short) / (new - new // 4) * 1e3}


class HeadCase:
    """Hidden states, head and targets of a 1.5B model, for log-probabilities and their gradients."""

    tokens, hidden, vocabulary = 8192, 1536, 151936

    def __init__(self) -> None:
        x = torch.randn(self.tokens, self.hidden, device=PLACE) * 0.5
        self.x = x.to(torch.bfloat16).requires_grad_()
        table = torch.randn(self.vocabulary, self.hidden, device=PLACE) * 0.02
        self.table = table.to(torch.bfloat16).requires_grad_()
        self.targets = torch.randint(self.vocabulary, (self.tokens,), device=PLACE)
        self.weights = torch.rand(self.tokens, device=PLACE)

    def run(self, losses: Callable[[], Tensor]) -> None:
        """Compute the gradients of a weighted sum of `losses`."""
        self.x.grad = None
        if self.table.grad is not None and self.table.grad.dtype == torch.bfloat16:
            self.table.grad = None
        (losses() * self.weights).sum().backward()

    def run_ours(self, bits: int) -> Tensor:
        """Compute log-probabilities with chunks of 2^bits logits."""
        size = (1 << bits) // self.vocabulary
        group, targets = make_single_rank_group(), self.targets[:, None]
        options = LogprobOptions(1.0, False, group, self.vocabulary, PLAIN, size, None)
        return TokenLogprobs.apply(self.x, self.table, None, targets, options)[0][:, 0]

    def measure(self, name: str, losses: Callable[[], Tensor]) -> dict[str, Any]:
        """Measure the milliseconds of `losses` with gradients, and the peak GiB above the memory in use before."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        milliseconds = 1e3 * seconds_of(lambda: self.run(losses), 3, 2)
        return {
            f"{name}_ms": milliseconds,
            f"{name}_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
        }


def measure_logprobs() -> dict[str, Any]:
    """Measure log-probabilities and their gradients for chunks of several sizes."""
    if CPU:
        return {"skipped": "CPU"}
    case = HeadCase()
    found = {}
    for bits in (26, 28, 29):
        found |= case.measure(f"chunks_of_2^{bits}", lambda bits=bits: case.run_ours(bits))
    operations = 3 * 2 * case.tokens * case.hidden * case.vocabulary
    return {**found, "ms_of_3_products_at_peak": operations / PEAKS["flops"] * 1e3}


def measure_cut_cross_entropy() -> dict[str, Any]:
    """Measure the cross entropy of the package cut-cross-entropy."""
    if CPU or not find_spec("cut_cross_entropy"):
        return {"skipped": "CPU, or the package is not installed"}
    from cut_cross_entropy import linear_cross_entropy

    case = HeadCase()
    return case.measure(
        "whole", lambda: linear_cross_entropy(case.x, case.table, case.targets, reduction="none")
    )


def measure_liger() -> dict[str, Any]:
    """Measure the cross entropy of the package liger-kernel, which returns the mean over all tokens."""
    if CPU or not find_spec("liger_kernel"):
        return {"skipped": "CPU, or the package is not installed"}
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    case, loss = HeadCase(), LigerFusedLinearCrossEntropyLoss()
    return case.measure("whole", lambda: loss(case.table, case.x, case.targets))


def list_products(shape: ModelShape) -> dict[str, tuple[int, int]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (q + 2 * kv, shape.hidden_size),
        "out": (shape.hidden_size, q),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }


class Ratios:
    """Measured times of operators, compared with the times that the planner's tables predict."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[float]] = {}

    def add(self, kind: str, name: str, predicted: float, measured: float) -> None:
        """Print and record an operator. Times are in seconds."""
        ratio = measured / predicted
        self.by_kind.setdefault(kind, []).append(ratio)
        times = {"predicted_us": predicted * 1e6, "measured_us": measured * 1e6, "ratio": ratio}
        record("operator", f"{kind} {name}", **times)
        print(f"     {kind:18} {name:34} " + " ".join(f"{k}={v:.4g}" for k, v in times.items()), flush=True)

    def summarise(self) -> None:
        """Print and record the geometric mean of each kind of operator."""
        for kind, found in self.by_kind.items():
            mean = math.exp(statistics.mean(map(math.log, found)))
            values = {"mean": mean, "least": min(found), "most": max(found), "points": len(found)}
            print(f"ok   {kind}: measured over predicted {values}", flush=True)
            record("operators", kind, **values)


def time_product(rows: int, outputs: int, inputs: int) -> float:
    """Measure the seconds of a product.

    With few rows, each call uses different weights, so that no cache holds the weights.
    """
    few = rows <= 256
    count = min(64, math.ceil(1.2e8 / (outputs * inputs * 2))) if few and not CPU else 1
    weights = [torch.randn(outputs, inputs, device=PLACE).to(torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, inputs, device=PLACE).to(torch.bfloat16)
    order = itertools.cycle(weights)
    return replayed(lambda: F.linear(x, next(order)), max(4, count), 3)


def measure_operators() -> dict[str, Any]:
    """Measure products and decode attention, and compare them with the planner's tables."""
    operators, ratios = find_operators(SPEC.groups[0].device), Ratios()
    sizes = list(SIZES)[: 1 if CPU else 3]
    for size in sizes:
        for matrix, (outputs, inputs) in list_products(shape_of(size)).items():
            for rows in (2, 5) if CPU else (1, 16, 64, 256, 2048, 8192):
                if over() or rows * outputs * 2 > 8e9:
                    continue
                kind = f"product, {'few' if rows <= 256 else 'many'} rows"
                predicted = float(operators.product(rows, outputs, inputs))
                ratios.add(kind, f"{size} {matrix} {rows}", predicted, time_product(rows, outputs, inputs))
        clean()
    for size in () if CPU else sizes:
        shape = shape_of(size)
        heads = shape.heads, shape.kv_heads, shape.head_dim
        for rows, context in ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (64, 4096)):
            if not over():
                predicted = float(operators.decode(rows, context, *heads))
                measured = time_decode(rows, *heads, context)["us"] / 1e6
                ratios.add("decode attention", f"{size} {rows} rows of {context}", predicted, measured)
        clean()
    ratios.summarise()
    return {"points": sum(map(len, ratios.by_kind.values()))}


def main() -> int:
    good = []

    def measure(name: str, run: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        good.append(attempt("bench", name, run, *arguments))
        clean()

    measure(f"peaks of {NAME}", measure_peaks)
    for size in ("0.5B", "1.5B"):
        measure(f"training {size}", measure_training, size, 16384)
    measure("training 1.5B, recomputed", measure_training, "1.5B", 16384, True)
    measure("update of 1.5B", measure_update, "1.5B")
    for size in ("0.5B", "1.5B"):
        _, model = make(size)
        for rows in (2,) if CPU else (1, 64, 256):
            measure(f"decoding {size}, {rows} rows", measure_decoding, model, rows)
        if size == "0.5B":
            measure("answers of many lengths 0.5B", measure_tail, model)
            measure("top-p 0.5B, 256 rows", measure_top_p, model, 3 if CPU else 256)
        del model
        clean()
    measure("log-probabilities, 8192 tokens", measure_logprobs)
    measure("cut-cross-entropy, 8192 tokens", measure_cut_cross_entropy)
    measure("liger-kernel, 8192 tokens", measure_liger)
    for size in ("0.5B", "1.5B"):
        measure(f"transformers, training {size}", measure_other_training, size)
    measure("transformers, decoding 0.5B, 64 rows", measure_other_generating, "0.5B", 2 if CPU else 64)
    measure("operators beside the tables", measure_operators)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
