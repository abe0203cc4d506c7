"""Llama 4, text models (Scout): experts whose inputs are weighed beside a shared one, and layers without rotation.

Attention of layers with rotation is in chunks, and scores of the others are scaled by position. Neither changes
anything in sequences that end before both begin, and longer ones are refused.
"""

from collections.abc import Mapping
from typing import Any

from realrl.config.explain import brief
from realrl.families.decoder import Names, named_decoder
from realrl.families.experts import Mixture
from realrl.families.family import Family
from realrl.families.llamas.unrotated_settings import read_unrotated, write_unrotated
from realrl.families.mixtures.router_settings import ROUTER_LOSS, read_mixture, write_mixture
from realrl.families.options import LayerOptions
from realrl.families.settings import (
    ACTIVATIONS,
    FULL,
    ConfigReader,
    read_sizes,
    write_activation,
    write_sizes,
)
from realrl.families.shape import ModelShape

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
"""Values of Llama4TextConfig for settings that a file may leave out, where they are not the usual ones."""
CHUNKED = "chunked_attention"
FIXED = {"router_jitter_noise": 0.0}
"""Noise that other mixtures add in training, and transformers not to this one."""
MIXTURE = Mixture(experts=16, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=True)
"""That of Llama4TextConfig, of which a file may change the numbers of experts."""
_START = 8192
"""Usual position, counted from 1, after which attention has chunks, and from which scores are scaled."""
_POSITIONS = (
    "max_position_embeddings",
    "attention_chunk_size",
    "layer_types",
    "attn_temperature_tuning",
    "floor_scale",
    "attn_scale",
)
"""Settings of which a shape holds only how long sequences may be that they leave alone."""


def _read(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, DEFAULTS)
    config.fixed(FIXED)
    layers = sizes["layers"]
    _check_layers_alike(config, layers)
    unrotated = read_unrotated(config, layers)
    bias = config.flag("attention_bias", False)
    found = read_mixture(config, experts=MIXTURE.experts, per_token=MIXTURE.per_token, normalised=False)
    return {
        **sizes,
        "max_positions": min([sizes["max_positions"], *_read_starts(config, layers, unrotated)]),
        "unrotated_layers": unrotated,
        "mixture": MIXTURE.model_copy(update={"experts": found.experts, "per_token": found.per_token}),
        "layer": LayerOptions(
            qk_norm="rotated" if config.flag("use_qk_norm", True) else "none",
            qkv_bias=bias,
            out_bias=bias,
            activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        ),
    }


def _check_layers_alike(config: ConfigReader, layers: int) -> None:
    """Check that each layer has experts; UserError if not."""
    given, step = config.read("moe_layers"), config.size("interleave_moe_layer_step", 1)
    if given is None and step != 1:
        what = f"interleave_moe_layer_step={step}"
    elif given not in (None, [*range(layers)]):
        what = f"moe_layers={brief(given)}"
    else:
        return
    raise config.fail(
        f"{what} is not supported: all layers of a model must be alike, as plans take them to be, and have experts"
    )


def _read_starts(config: ConfigReader, layers: int, unrotated: tuple[int, ...]) -> list[int]:
    """Read the lengths up to which sequences are in one chunk, and have scores that are not scaled."""
    kinds = config.read("layer_types")
    if kinds is None:
        kinds = [FULL if layer in unrotated else CHUNKED for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in (FULL, CHUNKED) for k in kinds):
        raise config.fail(
            f"layer_types={brief(kinds)} must be a list of {layers} words, each {CHUNKED} or {FULL}"
        )
    found = []
    if config.has("attention_chunk_size", _START):
        chunk = config.size("attention_chunk_size", _START)
        found += [chunk] if CHUNKED in kinds else []
    floor = config.size("floor_scale", _START, least=2)
    config.number("attn_scale", 0.1)
    tuned = config.read("attn_temperature_tuning", True)
    if type(tuned) not in (bool, int):  # older versions of transformers write numbers
        raise config.fail(f"attn_temperature_tuning={brief(tuned)} is not true or false")
    if tuned and unrotated:
        found.append(floor - 1)
    return found


def _write(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **write_sizes(shape),
        **write_mixture(shape),
        **write_unrotated(shape),
        **FIXED,
        "moe_layers": [*range(shape.layers)],
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": max(_START, shape.max_positions),
        "floor_scale": max(_START, shape.max_positions + 1),
        "use_qk_norm": options.qk_norm == "rotated",
        "attention_bias": options.qkv_bias,
        "hidden_act": write_activation(options),
    }


FAMILY = Family(
    model_type="llama4_text",
    architectures={"lm": "Llama4ForCausalLM", "scalar": "Llama4ForSequenceClassification"},
    read_config=_read,
    write_config=_write,
    layer=LayerOptions(qk_norm="rotated"),
    tensors=named_decoder(
        Names(
            interleaved=True,
            gate="feed_forward.shared_expert.gate_proj",
            up="feed_forward.shared_expert.up_proj",
            down="feed_forward.shared_expert.down_proj",
            router="feed_forward.router",
            expert="feed_forward.experts",
            experts_gate_up="feed_forward.experts.gate_up_proj",
            experts_down="feed_forward.experts.down_proj",
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
