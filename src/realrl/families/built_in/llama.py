"""Llama from the second generation on, and the text models of Llama 4 (Scout and Maverick)."""

from realrl.config.explain import brief
from realrl.families.built_in.parts import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Part,
    Settings,
    activation,
    describe,
    fixed,
    sizes,
)
from realrl.families.decoder_tensors import Names, named_decoder
from realrl.families.settings import (
    FULL,
    ROUTER_LOSS,
    ConfigReader,
    read_dense_layers,
    read_mixture,
    read_unrotated,
    write_mixture,
    write_unrotated,
)
from realrl.families.shape import LayerOptions, Mixture, ModelShape

LLAMA = describe(
    "llama", "Llama", sizes(), ATTENTION_BIAS, activation(), MLP_BIAS, buffers=("rotary_emb.inv_freq",)
)

_LLAMA4_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
LLAMA4_MIXTURE = Mixture(
    experts=16, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=1
)
"""Defaults of Llama4TextConfig; a file may change `experts` and `per_token`."""
_CHUNKED = "chunked_attention"
_START = 8192
"""Default of `attention_chunk_size` and of `floor_scale`, in tokens.

Attention of rotated layers is cut into chunks of `attention_chunk_size`. Scores of unrotated layers are scaled from
position `floor_scale` on. Models here support neither, so their sequences must end before either begins."""
_POSITIONS = (
    "max_position_embeddings",
    "attention_chunk_size",
    "layer_types",
    "attn_temperature_tuning",
    "floor_scale",
    "attn_scale",
)
"""Settings that a shape replaces by `max_positions`, the longest sequence for which they change nothing."""


def _read_llama4(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
    layers = fields["layers"]
    unrotated = read_unrotated(config, layers)
    default = LLAMA4_MIXTURE
    found = read_mixture(config, experts=default.experts, per_token=default.per_token, normalised=False)
    return {
        "max_positions": min([fields["max_positions"], *_read_starts(config, layers, unrotated)]),
        "unrotated_layers": unrotated,
        "mixture": default.model_copy(update={"experts": found.experts, "per_token": found.per_token}),
        **_read_dense(config, layers),
        "layer": {"qk_norm": "rotated" if config.flag("use_qk_norm", True) else "none"},
    }


def _read_dense(config: ConfigReader, layers: int) -> Settings:
    """Read which layers have no experts: those that `moe_layers` does not name or, if it is absent, all except
    every `interleave_moe_layer_step`-th layer (Maverick)."""
    step = config.size("interleave_moe_layer_step", 1)
    mixed = config.read("moe_layers", [*range(step - 1, layers, step)])
    if not isinstance(mixed, list) or any(type(layer) is not int for layer in mixed):
        raise config.fail(f"moe_layers={brief(mixed)} is not a list of whole numbers")
    width = config.size("intermediate_size_mlp", 16384)
    return read_dense_layers(config, layers, (n for n in range(layers) if n not in mixed), width)


def _read_starts(config: ConfigReader, layers: int, unrotated: tuple[int, ...]) -> list[int]:
    """Read the sequence lengths beyond which attention is cut into chunks or scores are scaled, see `_START`."""
    usual = [FULL if layer in unrotated else _CHUNKED for layer in range(layers)]
    kinds = config.by_layer("layer_types", usual, _CHUNKED, FULL)
    found = []
    if config.has("attention_chunk_size", _START):
        chunk = config.size("attention_chunk_size", _START)
        found += [chunk] if _CHUNKED in kinds else []
    floor = config.size("floor_scale", _START, least=2)
    config.number("attn_scale", 0.1)
    tuned = config.read("attn_temperature_tuning", True)
    if type(tuned) not in (bool, int):  # older versions of transformers write numbers
        raise config.fail(f"attn_temperature_tuning={brief(tuned)} is not true or false")
    if tuned and unrotated:
        found.append(floor - 1)
    return found


def _write_llama4(shape: ModelShape, options: LayerOptions) -> Settings:
    return {
        **write_mixture(shape),
        **write_unrotated(shape),
        "moe_layers": [n for n in range(shape.layers) if n not in shape.dense_layers],
        "interleave_moe_layer_step": 1,
        **({"intermediate_size_mlp": shape.dense_size} if shape.dense_size else {}),
        "attention_chunk_size": max(_START, shape.max_positions),
        "floor_scale": max(_START, shape.max_positions + 1),
        "use_qk_norm": options.qk_norm == "rotated",
    }


LLAMA4 = describe(
    "llama4_text",
    "Llama4",
    sizes(_LLAMA4_DEFAULTS),
    fixed({"router_jitter_noise": 0.0}),
    Part(_read_llama4, _write_llama4),
    ATTENTION_BIAS,
    activation(),
    layer=LayerOptions(qk_norm="rotated"),
    tensors=named_decoder(
        Names(
            interleaved=True,
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            shared_gate="feed_forward.shared_expert.gate_proj",
            shared_up="feed_forward.shared_expert.up_proj",
            shared_down="feed_forward.shared_expert.down_proj",
            router="feed_forward.router",
            expert="feed_forward.experts",
            experts_gate_up="feed_forward.experts.gate_up_proj",
            experts_down="feed_forward.experts.down_proj",
            experts="feed_forward.experts",
            experts_misread=True,
        )
    ),
    mixture=True,
    position_bounds="its attention_chunk_size and floor_scale, beyond which attention is not supported",
    untouched=(
        *_POSITIONS,
        "no_rope_layer_interval",
        "intermediate_size_mlp",
        "for_llm_compressor",
        *ROUTER_LOSS,
    ),
)
