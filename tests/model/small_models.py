"""Small models beside their twins in transformers, and token rows for them."""

import re
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from realrl.engine.buffers import FlatBuffer
from realrl.families.built_in.llama import LLAMA4_MIXTURE
from realrl.families.config_json import shape_to_hf
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape, RopeScaling
from realrl.families.tensors import Init, TensorSpec
from realrl.huggingface.tensor_conversion import join_tensors, read_parts
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
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
    "gemma": ModelShape(
        family="gemma", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, tied_embeddings=True,
    ),
    "glm4": ModelShape(
        family="glm4", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, rotary_dim=6,
    ),
    "gpt2": ModelShape(
        family="gpt2", vocab_size=85, hidden_size=48, intermediate_size=56, layers=2, heads=6, kv_heads=6,
        head_dim=8, tied_embeddings=True, max_positions=200,
    ),
    "gpt_neox": ModelShape(
        family="gpt_neox", vocab_size=85, hidden_size=48, intermediate_size=56, layers=2, heads=6, kv_heads=6,
        head_dim=8, rotary_dim=2,
    ),
    "granite": ModelShape(
        family="granite", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6,
        layer=LayerOptions(
            embedding_scale=3.0, residual_scale=0.3, attention_scale=0.1, logit_scale=0.25, mlp_bias=True
        ),
    ),
    "olmo2": ModelShape(
        family="olmo2", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6,
    ),
    "phi3": ModelShape(
        family="phi3", vocab_size=85, hidden_size=96, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=16, norm_eps=1e-6, rotary_dim=12,
        rope_scaling=RopeScaling(
            kind="longrope", factor=4.0, original_max_position_embeddings=512,
            short_factor=(1.0, 1.1, 1.3, 1.7, 2.0, 2.2), long_factor=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        ),
    ),
    "gemma2": ModelShape(
        family="gemma2", vocab_size=85, hidden_size=48, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, tied_embeddings=True, window=7, windowed_layers=(0,),
        layer=LayerOptions(
            norm_offset=True, norm_place="around", activation="gelu_tanh", embedding_scale="root",
            attention_cap=2.0, logit_cap=3.0, attention_scale=0.25,
        ),
    ),
    "gemma3": ModelShape(
        family="gemma3_text", vocab_size=85, hidden_size=48, intermediate_size=48, layers=3, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, tied_embeddings=True, window=10, windowed_layers=(0, 2), rope_theta=1e6,
        windowed_rope_theta=100.0, rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "olmo3": ModelShape(
        family="olmo3", vocab_size=85, hidden_size=48, intermediate_size=48, layers=3, heads=6, kv_heads=3,
        head_dim=8, norm_eps=1e-6, window=12, windowed_layers=(0, 1), windowed_rope_theta=10000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "mistral-window": ModelShape(
        family="mistral", vocab_size=85, hidden_size=48, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, window=9, windowed_layers=(0, 1),
    ),
    "ministral": ModelShape(
        family="ministral", vocab_size=85, hidden_size=48, intermediate_size=48, layers=3, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, window=9, windowed_layers=(1,),
    ),
    "smollm3": ModelShape(
        family="smollm3", vocab_size=85, hidden_size=40, intermediate_size=48, layers=3, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, unrotated_layers=(1,),
    ),
    "starcoder2": ModelShape(
        family="starcoder2", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, tied_embeddings=True,
    ),
    "mistral-linear": ModelShape(
        family="mistral", vocab_size=85, hidden_size=40, intermediate_size=48, layers=2, heads=6, kv_heads=3,
        head_dim=12, rope_scaling=RopeScaling(kind="linear", factor=3.0),
    ),
    "biased-yarn": ModelShape(
        vocab_size=85, hidden_size=48, intermediate_size=48, layers=2, heads=6, kv_heads=3, head_dim=12,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32),
        layer=LayerOptions(qkv_bias=True, out_bias=True, mlp_bias=True, activation="gelu"),
    ),
    "mixtral": ModelShape(
        family="mixtral", vocab_size=85, hidden_size=40, intermediate_size=28, layers=2, heads=6, kv_heads=3,
        head_dim=12, mixture=Mixture(experts=5, per_token=2), window=9, windowed_layers=(0, 1),
    ),
    "qwen3_moe": ModelShape(
        family="qwen3_moe", vocab_size=85, hidden_size=40, intermediate_size=20, layers=2, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, mixture=Mixture(experts=7, per_token=3, normalised=False),
        tied_embeddings=True,
    ),
    "qwen3_moe-dense": ModelShape(
        family="qwen3_moe", vocab_size=85, hidden_size=40, intermediate_size=20, layers=3, heads=6, kv_heads=3,
        head_dim=12, norm_eps=1e-6, mixture=Mixture(experts=7, per_token=3), dense_layers=(0, 2), dense_size=36,
    ),
    "glm4_moe": ModelShape(
        family="glm4_moe", vocab_size=85, hidden_size=40, intermediate_size=20, layers=3, heads=6, kv_heads=3,
        head_dim=12, rotary_dim=6, rope_theta=500.0, dense_layers=(0,), dense_size=44,
        mixture=Mixture(
            experts=8, per_token=3, scores="sigmoid", correction=True, groups=4, groups_per_token=2, scale=1.7,
            shared=2,
        ),
        layer=LayerOptions(qkv_bias=True, qk_norm="heads"),
    ),
    "llama4": ModelShape(
        family="llama4_text", vocab_size=85, hidden_size=40, intermediate_size=28, layers=2, heads=6, kv_heads=3,
        head_dim=12, rope_theta=500.0, unrotated_layers=(1,),
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
        mixture=LLAMA4_MIXTURE.model_copy(update={"experts": 5, "per_token": 2}),
    ),
    "gpt_oss": ModelShape(
        family="gpt_oss", vocab_size=85, hidden_size=40, intermediate_size=28, layers=3, heads=6, kv_heads=3,
        head_dim=12, window=9, windowed_layers=(0, 2), rope_theta=500.0,
        rope_scaling=RopeScaling(
            kind="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False
        ),
        mixture=Mixture(experts=5, per_token=2),
    ),
    "dynamic": ModelShape(
        vocab_size=85, hidden_size=48, intermediate_size=48, layers=2, heads=6, kv_heads=3, head_dim=12,
        max_positions=200, rope_scaling=RopeScaling(kind="dynamic", factor=4.0),
    ),
}  # fmt: skip


RENAMED = {"embed_out.weight": "lm_head.weight"}
"""Names in files beside those that transformers has for the same tensors in its models."""

EXPERT = re.compile(r"(.*\.)(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")


def find_theirs(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of a name in files, among those of a model of transformers, which stacks those of experts."""
    expert = EXPERT.fullmatch(name)
    if expert is None:
        return tensors[RENAMED.get(name, name).replace("block_sparse_moe.", "mlp.")]
    layer, _, number, matrix = expert.groups()
    if matrix in ("down_proj", "w2"):
        return tensors[f"{layer}mlp.experts.down_proj"][int(number)]
    gate, up = tensors[f"{layer}mlp.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if matrix in ("gate_proj", "w1") else up


Twins = tuple[Transformer, FlatBuffer, PreTrainedModel]


def make_theirs(shape: ModelShape, head: Head) -> PreTrainedModel:
    """The model of transformers, with its own initial weights."""
    settings = shape_to_hf(shape, head, "float32", {"pad_token_id": 0})
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    found = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if shape.mixture is not None:
        config._experts_implementation = "eager"  # torch's kernel for others wants widths of 16 bytes
    theirs = found.from_config(config)
    assert [type(theirs).__name__] == settings["architectures"]
    return theirs


def make_twins(shape: ModelShape, head: Head) -> Twins:
    """Our model and the transformers one with the same random weights."""
    torch.manual_seed(0)
    return make_twin(shape, head, make_theirs(shape, head).eval())


def make_twin(shape: ModelShape, head: Head, theirs: PreTrainedModel) -> Twins:
    """Our model of a shape, and one of transformers, which get the same random weights."""
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    state = theirs.state_dict()
    with torch.no_grad():
        for tensor in tensors:
            # Norms of 1, biases of 0 and tiny weights would hide mistakes.
            buffer[tensor.name].copy_(torch.randn(tensor.shape) * 0.2 + float(tensor.init is Init.ONES))
        for name, values in join_tensors(tensors, buffer).items():
            find_theirs(state, name).copy_(values)
    return Transformer(Shard(shape, head), buffer.fused, make_single_rank_group()), buffer, theirs


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


def read_whole(stored: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Read all of a model's tensor from that of a file."""
    return torch.cat([values for _, values in read_parts(stored, spec)])
