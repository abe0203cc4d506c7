"""Steps of one model: training beside peak arithmetic, decoding beside peak bandwidth."""

from typing import Any

import torch
from device import Device

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.families.sizes import count_matrix_weights
from realrl.huggingface.initial_weights import initialise
from realrl.planner.workload.flops import count_head_weights
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig

BATCHES = (1, 16, 64, 256)
"""Rows of a decode step."""
LENGTH, CONTEXT, SHORT, LONG = 2048, 1024, 32, 160
"""Tokens of a training sequence, of a prompt, of the shorter answers and of the longer answers."""


def make_model(device: Device, shape: ModelShape) -> Model:
    """Make a bfloat16 model with random weights."""
    model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=device.place)
    initialise(model.parameters, model.layout.specs, shape, 1)
    return model


def count_multiplied(shape: ModelShape) -> int:
    """Count the parameters of all matrices that multiply activations, the head's included."""
    return count_matrix_weights(shape) + count_head_weights(shape, "lm")


def count_training_tokens(layers: int | None) -> int:
    """Count the tokens of a training step that fits on one device."""
    return 16384 if layers is None else 8192


def count_training_operations(shape: ModelShape, tokens: int, length: int) -> int:
    """Count 6 operations per token and parameter of a product, plus half of full attention, since it is causal."""
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length * tokens
    return 6 * count_multiplied(shape) * tokens + attention


def count_decoding_bytes(shape: ModelShape, rows: int, cached: float) -> float:
    """Count the bytes of all weights, plus keys and values of `cached` tokens per row."""
    keys_and_values = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return 2 * (count_multiplied(shape) + rows * cached * keys_and_values)


def measure_training(device: Device, size: str, *, layers: int | None = None) -> dict[str, Any]:
    """Measure forward, backward and update on packed sequences of 2,048 tokens.

    Operations are counted as in Chowdhery et al. 2022, appendix B, with half of attention because it is causal and
    without recomputation. `layers` cuts the model, so that its optimizer state fits.
    """
    shape = device.shape(size)
    if layers is not None and not device.tiny:
        shape = shape.model_copy(update={"layers": layers})
    tokens, length = (256, 64) if device.tiny else (count_training_tokens(layers), LENGTH)
    model = make_model(device, shape)
    trainer = Trainer(model, OptimizerConfig())
    count = tokens // length
    rows = Ragged(torch.randint(0, shape.vocab_size, (tokens,)), (length,) * count)
    masks = Ragged.of([(torch.arange(n) > 0).long() for n in rows.lengths])
    batch = Batch(tuple(range(count)), {"tokens": rows, "loss_mask": masks}).to(device.place)

    def step() -> None:
        trainer.train(batch, SFTMethod(), [list(range(count))], TrainOptions(max_tokens=tokens), lr=1e-6)

    seconds = device.seconds(step)
    achieved = count_training_operations(shape, tokens, length) / seconds
    return {
        "parameters": sum(tensor.numel for tensor in model.parameters.tensors),
        "layers": shape.layers,
        "tokens": tokens,
        "seconds": seconds,
        "tflops": achieved / 1e12,
        "share_of_product_peak": achieved / device.flops,
    }


def measure_decoding(device: Device, size: str, rows: int) -> dict[str, Any]:
    """Measure a decode step as the difference of two lengths of generation, sampling and bookkeeping included."""
    shape = device.shape(size)
    context, short, long = (16, 4, 12) if device.tiny else (CONTEXT, SHORT, LONG)
    model = make_model(device, shape)
    prompts = Ragged(torch.randint(4, shape.vocab_size, (rows * context,)), (context,) * rows)
    batch = Batch(tuple(range(rows)), {"prompts": prompts})

    def run(new_tokens: int) -> float:
        return device.seconds(lambda: sample(model, batch, new_tokens), 3)

    seconds = (run(long) - run(short)) / (long - short)
    moved = count_decoding_bytes(shape, rows, context + (short + long) / 2) / seconds
    return {
        "rows": rows,
        "context": context,
        "seconds_per_token": seconds,
        "tokens_per_second": rows / seconds,
        "gb_per_s": moved / 1e9,
        "share_of_copy_bandwidth": moved / device.bandwidth,
    }


def sample(model: Model, batch: Batch, new_tokens: int) -> Batch:
    """Continue every prompt by exactly `new_tokens` tokens."""
    sampling = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    rooms = sum(batch["prompts"].lengths) + len(batch) * new_tokens
    return generate(
        model, batch, "prompts", sampling=sampling, stop_token_ids=(3,), seed=SamplingSeed(1, 1),
        kv_capacity=2 * rooms,
    )  # fmt: skip
