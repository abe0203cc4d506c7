"""Shapes of published models, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from realrl.families.shape import ModelShape, RopeScaling


def _qwen(
    family: str,
    hidden: int,
    ffn_dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocabulary: int = 151936,
    head_dim: int = 128,
    max_positions: int = 32768,
    tied: bool = False,
) -> ModelShape:
    return ModelShape(
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn_dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=tied,
    )


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        # arXiv 2307.09288 and config.json of meta-llama/Llama-2-7b-hf, -13b-hf, -70b-hf.
        "llama-2-7b": ModelShape(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            layers=32,
            heads=32,
            kv_heads=32,
            head_dim=128,
            max_positions=4096,
        ),
        "llama-2-13b": ModelShape(
            vocab_size=32000,
            hidden_size=5120,
            intermediate_size=13824,
            layers=40,
            heads=40,
            kv_heads=40,
            head_dim=128,
            max_positions=4096,
        ),
        # arXiv 2308.12950 and config.json of codellama/CodeLlama-34b-hf.
        "codellama-34b": ModelShape(
            vocab_size=32000,
            hidden_size=8192,
            intermediate_size=22016,
            layers=48,
            heads=64,
            kv_heads=8,
            head_dim=128,
            max_positions=16384,
            rope_theta=1e6,
        ),
        "llama-2-70b": ModelShape(
            vocab_size=32000,
            hidden_size=8192,
            intermediate_size=28672,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            max_positions=4096,
        ),
        # arXiv 2407.21783 and config.json of meta-llama/Meta-Llama-3-8B, -70B, Llama-3.2-1B.
        "llama-3-8b": ModelShape(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            max_positions=8192,
            rope_theta=5e5,
        ),
        "llama-3-70b": ModelShape(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            max_positions=8192,
            rope_theta=5e5,
        ),
        "llama-3.2-1b": ModelShape(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            max_positions=131072,
            rope_theta=5e5,
            rope_scaling=RopeScaling(
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            tied_embeddings=True,
        ),
        # arXiv 2412.15115 and config.json of Qwen/Qwen2.5-0.5B to -72B.
        "qwen2.5-0.5b": _qwen("qwen2", 896, 4864, 24, 14, 2, head_dim=64, tied=True),
        "qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2, tied=True),
        "qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, 16, 2, tied=True),
        "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, vocabulary=152064),
        "qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, vocabulary=152064),
        "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, vocabulary=152064),
        "qwen2.5-72b": _qwen("qwen2", 8192, 29568, 80, 64, 8, vocabulary=152064),
        # arXiv 2505.09388 and config.json of Qwen/Qwen3-0.6B to -32B.
        "qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, max_positions=40960, tied=True),
        "qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, max_positions=40960, tied=True),
        "qwen3-4b": _qwen("qwen3", 2560, 9728, 36, 32, 8, max_positions=40960, tied=True),
        "qwen3-8b": _qwen("qwen3", 4096, 12288, 36, 32, 8, max_positions=40960),
        "qwen3-14b": _qwen("qwen3", 5120, 17408, 40, 40, 8, max_positions=40960),
        "qwen3-32b": _qwen("qwen3", 5120, 25600, 64, 64, 8, max_positions=40960),
    }
)
"""Name -> shape."""
