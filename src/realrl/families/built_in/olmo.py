"""OLMo 2 and OLMo 3: norms at the outputs of blocks, and of all heads of queries and keys together."""

from collections.abc import Mapping
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_layer,
    read_rope_by_layer_type,
    read_sizes,
    read_windows,
    write_layer,
    write_rope_by_layer_type,
    write_sizes,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

_LAYER = LayerOptions(norm_place="after", qk_norm="all")


def _read_olmo2(config: ConfigReader) -> dict[str, Any]:
    return {**read_sizes(config, {"rms_norm_eps": 1e-5}), "layer": read_layer(config, _LAYER)}


def _write_olmo2(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {**write_sizes(shape), **write_layer(options)}


OLMO2 = Family(
    model_type="olmo2",
    architectures={"lm": "Olmo2ForCausalLM", "scalar": "Olmo2ForSequenceClassification"},
    read_config=_read_olmo2,
    write_config=_write_olmo2,
    layer=_LAYER,
)


_OLMO3_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}


def _read_olmo3(config: ConfigReader) -> dict[str, Any]:
    sizes = read_sizes(config, _OLMO3_DEFAULTS, rotary=False)
    # Layers with a window have the same rotary base as the others, but their frequencies are not scaled.
    rope = read_rope_by_layer_type(config, sizes["head_dim"], _OLMO3_DEFAULTS, None)
    windows = read_windows(config, sizes["layers"], lambda layer: (layer + 1) % 4 != 0, 4096)
    return {**sizes, **rope, **windows, "layer": read_layer(config, _LAYER)}


def _write_olmo3(shape: ModelShape, options: LayerOptions) -> Mapping[str, Any]:
    return {
        **_write_olmo2(shape, options),
        **write_rope_by_layer_type(shape, None),
        **write_windows(shape),
    }


OLMO3 = Family(
    model_type="olmo3",
    architectures={"lm": "Olmo3ForCausalLM", "scalar": "Olmo3ForSequenceClassification"},
    read_config=_read_olmo3,
    write_config=_write_olmo3,
    layer=_LAYER,
)
