"""Small models beside their twins in transformers, and token rows for them."""

from itertools import accumulate

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from realrl.engine.flat import FlatBuffer
from realrl.families.config_json import shape_to_hf
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape, RopeScaling
from realrl.families.tensors import Init
from realrl.layout.shard import Shard
from realrl.model.group import alone
from realrl.model.transformer import Transformer

SHAPES = {
    "plain": ModelShape(
        vocab_size=64, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=4, head_dim=8
    ),
    "grouped-tied": ModelShape(
        vocab_size=97, hidden_size=48, intermediate_size=40, layers=3, heads=6, kv_heads=2, head_dim=8,
        tied_embeddings=True, rope_theta=500.0,
    ),
    "wide-heads": ModelShape(
        vocab_size=51, hidden_size=24, intermediate_size=20, layers=1, heads=3, kv_heads=1, head_dim=16,
        norm_eps=1e-6,
    ),
    "llama3": ModelShape(
        vocab_size=101, hidden_size=32, intermediate_size=56, layers=2, heads=4, kv_heads=2, head_dim=16,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
        ),
    ),
    "qwen2": ModelShape(
        family="qwen2", vocab_size=90, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=2,
        head_dim=8, tied_embeddings=True, norm_eps=1e-6,
    ),
    "qwen3": ModelShape(
        family="qwen3", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6,
    ),
}  # fmt: skip


Twins = tuple[Transformer, FlatBuffer, PreTrainedModel]


def make_theirs(shape: ModelShape, head: Head) -> PreTrainedModel:
    """The model of transformers, with its own initial weights."""
    settings = shape_to_hf(shape, head, "float32", {"pad_token_id": 0})
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    found = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    theirs = found.from_config(config)
    assert [type(theirs).__name__] == settings["architectures"]
    return theirs


def make_twins(shape: ModelShape, head: Head) -> Twins:
    """Our model and the transformers one with the same random weights."""
    torch.manual_seed(0)
    theirs = make_theirs(shape, head).eval()
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    state = theirs.state_dict()
    with torch.no_grad():
        for tensor in tensors:
            source = state[tensor.name]
            # Norms of 1, biases of 0 and tiny weights would hide mistakes.
            source.copy_(torch.randn(tensor.shape) * 0.2 + float(tensor.init is Init.ONES))
            buffer[tensor.name].copy_(source)
    return Transformer(Shard(shape, head), buffer.fused, alone()), buffer, theirs


def pack(rows: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Rows back to back, and their lengths."""
    return torch.cat(rows), [len(row) for row in rows]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows padded on the right with token 0, and the attention mask."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask


def random_rows(vocab: int, lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Token rows without token 0, which is padding."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(1, vocab, (sum(lengths),), generator=generator)
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]
