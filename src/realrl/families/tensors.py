"""The global tensors of a model: names, shapes and storage order. No torch."""

from dataclasses import dataclass
from math import prod

from realrl.families.shape import Head, ModelShape

EMBEDDING, LM_HEAD, SCALAR_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
"""Tensors outside the layers; a scalar head gives a reward model or a critic its numbers."""


@dataclass(frozen=True)
class TensorSpec:
    """A named global tensor; `layer` is None for those outside the decoder layers."""

    name: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def model_tensors(shape: ModelShape, head: Head) -> tuple[TensorSpec, ...]:
    """All tensors of a model in storage order, under their Hugging Face names.

    Matrices are [output rows, input columns]. Query, key and value of a layer are neighbours, and so are
    gate and up, so that each group is one matrix when stored back to back. A language-model head is listed
    only where it is not the embedding table; a scalar head is `score.weight` [1, hidden].
    """
    hidden = shape.hidden_size
    tensors = [TensorSpec(EMBEDDING, (shape.vocab_size, hidden))]
    for i in range(shape.layers):
        tensors += _layer_tensors(shape, i)
    tensors.append(TensorSpec("model.norm.weight", (hidden,)))
    if head == "scalar":
        tensors.append(TensorSpec(SCALAR_HEAD, (1, hidden)))
    elif not shape.tied_embeddings:
        tensors.append(TensorSpec(LM_HEAD, (shape.vocab_size, hidden)))
    return tuple(tensors)


def _layer_tensors(shape: ModelShape, layer: int) -> list[TensorSpec]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return [TensorSpec(f"model.layers.{layer}.{name}.weight", size, layer) for name, size in sizes.items()]
