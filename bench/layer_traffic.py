"""Memory traffic of a decoder layer of transformers, operation by operation, beside what the planner counts.

Of a Qwen3 layer in bfloat16 under full checkpointing, all operations but products, attention and views are counted,
by the bytes that each reads and writes: so many are moved where nothing fuses them. The planner counts the kernels
of this engine. Both are of one token, forward and backward with recomputation. Measures nothing.

    python bench/layer_traffic.py
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.workload.shard_sizes import LocalSizes

MODELS = ("qwen3-0.6b", "qwen3-4b")
TOKENS = 512
UNCOUNTED = {
    "_unsafe_view",
    "detach",
    "empty_like",
    "mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""Products, attention, and what moves nothing, of what is not a view by its schema."""


class TrafficCounter(TorchDispatchMode):
    """Counts bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.number_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in UNCOUNTED:
            self.number_bytes += count_bytes([args, list((kwargs or {}).values()), result])
        return result


def count_bytes(values: Any) -> int:
    """Count the bytes of all tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(count_bytes, values)) if isinstance(values, list | tuple) else 0


def count_eager(shape: ModelShape) -> float:
    """Count the bytes of a token in a layer of transformers."""
    config = Qwen3Config(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        attn_implementation="sdpa",
    )  # fmt: skip
    layer = checkpoint_wrapper(Qwen3DecoderLayer(config, 0).bfloat16(), preserve_rng_state=False)
    hidden = torch.randn(1, TOKENS, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotation = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    with TrafficCounter() as counter:
        result = layer(hidden, position_embeddings=rotation, attention_mask=None)
        result.backward(torch.ones_like(result))
    return counter.number_bytes / TOKENS


def count_planned(shape: ModelShape) -> float:
    """Count the bytes of a token in a layer of this engine, as the planner does."""
    roofline = Roofline(
        device=DEVICES["h100"], efficiency=Efficiency(), sizes=LocalSizes(shape, "lm", 1), dtype="bfloat16"
    )
    times: tuple[Callable[[float], Any], ...] = (roofline._elementwise, roofline._elementwise_backward)
    tokens = 1 << 20
    forward, backward = (float(time(tokens)) for time in times)
    return (2 * forward + backward) / tokens * DEVICES["h100"].memory_bytes_per_s * Efficiency().memory


def main() -> None:
    for name in MODELS:
        eager, planned = count_eager(SHAPES[name]), count_planned(SHAPES[name])
        print(f"{name}: {eager / 1e3:,.0f} kB a token and layer, planned {planned / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
