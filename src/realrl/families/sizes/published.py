"""Shapes of published models, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from realrl.families.shape import LayerOptions, Mixture, ModelShape, RopeScaling


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
    mixture: Mixture | None = None,
) -> ModelShape:
    return ModelShape(
        family=family,
        mixture=mixture,
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


_QWEN_EXPERTS = Mixture(experts=128, per_token=8)
_LLAMA_4: Mapping[str, Any] = {
    "rope_theta": 5e5,
    "rope_scaling": RopeScaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
    ),
    "unrotated_layers": tuple(range(3, 48, 4)),
    "mixture": Mixture(
        experts=16, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=True
    ),
}

_LLAMA_3_SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def _shape(
    family: str,
    vocabulary: int,
    hidden: int,
    ffn_dim: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    max_positions: int,
    **more: Any,
) -> ModelShape:
    """Make a shape. heads: of queries, and of keys and values."""
    return ModelShape(
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn_dim,
        layers=layers,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        max_positions=max_positions,
        **more,
    )


def _gpt2(hidden: int, layers: int, heads: int) -> ModelShape:
    return _shape(
        "gpt2", 50257, hidden, 4 * hidden, layers, (heads, heads), hidden // heads, 1024, tied_embeddings=True
    )


def _pythia(vocabulary: int, hidden: int, layers: int, heads: int) -> ModelShape:
    dim = hidden // heads
    return _shape(
        "gpt_neox", vocabulary, hidden, 4 * hidden, layers, (heads, heads), dim, 2048, rotary_dim=dim // 4
    )


def _mixtral(hidden: int, ffn_dim: int, layers: int, heads: int, max_positions: int) -> ModelShape:
    sizes = 32000, hidden, ffn_dim, layers, (heads, 8), 128, max_positions
    return _shape("mixtral", *sizes, rope_theta=1e6, mixture=Mixture(experts=8, per_token=2))


def _granite(hidden: int, ffn_dim: int, head_dim: int, theta: float, scale: float) -> ModelShape:
    options = LayerOptions(
        embedding_scale=12.0, residual_scale=0.22, attention_scale=1 / head_dim, logit_scale=scale
    )
    return _shape(
        "granite", 49155, hidden, ffn_dim, 40, (32, 8), head_dim, 131072,
        rope_theta=theta, tied_embeddings=True, layer=options,
    )  # fmt: skip


def _gemma2(
    hidden: int,
    ffn_dim: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    options: LayerOptions | None = None,
) -> ModelShape:
    return _shape(
        "gemma2", 256000, hidden, ffn_dim, layers, heads, head_dim, 8192, norm_eps=1e-6, tied_embeddings=True,
        window=4096, windowed_layers=tuple(range(0, layers, 2)), layer=options,
    )  # fmt: skip


_GEMMA_2_27B = LayerOptions(
    norm_offset=True,
    norm_place="around",
    activation="gelu_tanh",
    embedding_scale="root",
    attention_scale=144**-0.5,
    attention_cap=50.0,
    logit_cap=30.0,
)
"""Options of the only Gemma 2 whose scores are scaled by other than the size of a head."""

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
        # arXiv 2407.21783 and config.json of meta-llama/Llama-3.1-8B, -70B, -405B.
        "llama-3.1-8b": _shape(
            "llama",
            128256,
            4096,
            14336,
            32,
            (32, 8),
            128,
            131072,
            rope_theta=5e5,
            rope_scaling=_LLAMA_3_SCALING,
        ),
        "llama-3.1-70b": _shape(
            "llama",
            128256,
            8192,
            28672,
            80,
            (64, 8),
            128,
            131072,
            rope_theta=5e5,
            rope_scaling=_LLAMA_3_SCALING,
        ),
        "llama-3.1-405b": _shape(
            "llama",
            128256,
            16384,
            53248,
            126,
            (128, 8),
            128,
            131072,
            rope_theta=5e5,
            rope_scaling=_LLAMA_3_SCALING,
        ),
        "llama-3.2-3b": _shape(
            "llama",
            128256,
            3072,
            8192,
            28,
            (24, 8),
            128,
            131072,
            rope_theta=5e5,
            rope_scaling=_LLAMA_3_SCALING.model_copy(update={"factor": 32.0}),
            tied_embeddings=True,
        ),
        # arXiv 2310.06825 and config.json of mistralai/Mistral-7B-v0.3 and Mistral-Nemo-Instruct-2407.
        "mistral-7b": _shape("mistral", 32768, 4096, 14336, 32, (32, 8), 128, 32768, rope_theta=1e6),
        "mistral-nemo-12b": _shape("mistral", 131072, 5120, 14336, 40, (32, 8), 128, 131072, rope_theta=1e6),
        # arXiv 2403.08295 and config.json of google/gemma-2b, -7b.
        "gemma-2b": _shape(
            "gemma", 256000, 2048, 16384, 18, (8, 1), 256, 8192, norm_eps=1e-6, tied_embeddings=True
        ),
        "gemma-7b": _shape(
            "gemma", 256000, 3072, 24576, 28, (16, 16), 256, 8192, norm_eps=1e-6, tied_embeddings=True
        ),
        # arXiv 2408.00118 and config.json of google/gemma-2-2b, -9b, -27b.
        "gemma-2-2b": _gemma2(2304, 9216, 26, (8, 4), 256),
        "gemma-2-9b": _gemma2(3584, 14336, 42, (16, 8), 256),
        "gemma-2-27b": _gemma2(4608, 36864, 46, (32, 16), 128, _GEMMA_2_27B),
        # arXiv 2503.19786 and config.json of google/gemma-3-1b-pt.
        "gemma-3-1b": _shape(
            "gemma3_text",
            262144,
            1152,
            6912,
            26,
            (4, 1),
            256,
            32768,
            rope_theta=1e6,
            windowed_rope_theta=1e4,
            norm_eps=1e-6,
            tied_embeddings=True,
            window=512,
            windowed_layers=tuple(layer for layer in range(26) if layer % 6 != 5),
        ),
        # config.json of mistralai/Ministral-8B-Instruct-2410.
        "ministral-8b": _shape(
            "mistral",
            131072,
            4096,
            12288,
            36,
            (32, 8),
            128,
            32768,
            rope_theta=1e8,
            window=32768,
            windowed_layers=tuple(range(36)),
        ),
        # arXiv 2412.08905 and config.json of microsoft/phi-4.
        "phi-4": _shape("phi3", 100352, 5120, 17920, 40, (40, 10), 128, 16384, rope_theta=250000.0),
        # arXiv 2501.00656 and config.json of allenai/OLMo-2-1124-7B, -13B.
        "olmo-2-7b": _shape(
            "olmo2", 100352, 4096, 11008, 32, (32, 32), 128, 4096, rope_theta=5e5, norm_eps=1e-6
        ),
        "olmo-2-13b": _shape(
            "olmo2", 100352, 5120, 13824, 40, (40, 40), 128, 4096, rope_theta=5e5, norm_eps=1e-6
        ),
        # config.json of zai-org/GLM-4-9B-0414.
        "glm-4-9b": _shape("glm4", 151552, 4096, 13696, 40, (32, 2), 128, 32768, rotary_dim=64),
        # config.json of ibm-granite/granite-3.1-2b-base, -8b-base.
        "granite-3.1-2b": _granite(2048, 8192, 64, 5e6, 1 / 8),
        "granite-3.1-8b": _granite(4096, 12800, 128, 1e7, 1 / 16),
        # arXiv 2401.04088 and config.json of mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1.
        "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32768),
        "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 65536),
        # text_config in config.json of meta-llama/Llama-4-Scout-17B-16E and -Instruct.
        "llama-4-scout": _shape("llama4_text", 202048, 5120, 8192, 48, (40, 8), 128, 8191, **_LLAMA_4),
        # arXiv 2505.09388 and config.json of Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B.
        "qwen3-30b-a3b": _qwen("qwen3_moe", 2048, 768, 48, 32, 4, max_positions=40960, mixture=_QWEN_EXPERTS),
        "qwen3-235b-a22b": _qwen(
            "qwen3_moe", 4096, 1536, 94, 64, 4, max_positions=40960, mixture=_QWEN_EXPERTS
        ),
        # config.json of HuggingFaceTB/SmolLM3-3B.
        "smollm3-3b": _shape(
            "smollm3",
            128256,
            2048,
            11008,
            36,
            (16, 4),
            128,
            65536,
            rope_theta=5e6,
            norm_eps=1e-6,
            tied_embeddings=True,
            unrotated_layers=tuple(range(3, 36, 4)),
        ),
        # Radford et al. 2019 and config.json of openai-community/gpt2, -medium, -large, -xl.
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
        # arXiv 2304.01373 and config.json of EleutherAI/pythia-410m to -12b.
        "pythia-410m": _pythia(50304, 1024, 24, 16),
        "pythia-1b": _pythia(50304, 2048, 16, 8),
        "pythia-1.4b": _pythia(50304, 2048, 24, 16),
        "pythia-2.8b": _pythia(50304, 2560, 32, 32),
        "pythia-6.9b": _pythia(50432, 4096, 32, 32),
        "pythia-12b": _pythia(50688, 5120, 36, 40),
    }
)
"""Name -> shape."""
