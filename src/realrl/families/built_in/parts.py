"""Parts of `config.json` that built-in families have in common. Each part reads and writes some settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realrl.families.family import Family
from realrl.families.settings import (
    ConfigReader,
    read_activation,
    read_mixture,
    read_rope_by_layer_type,
    read_sizes,
    read_windows,
    write_activation,
    write_mixture,
    write_rope_by_layer_type,
    write_sizes,
    write_windows,
)
from realrl.families.shape import LayerOptions, ModelShape

Settings = Mapping[str, Any]
LLAMA_LAYER = LayerOptions()


@dataclass(frozen=True)
class Part:
    """Some of the settings in a family's `config.json`."""

    read: Callable[[ConfigReader, Settings, LayerOptions], Settings]
    """Turn settings into fields of `ModelShape`. Changes of layer options are a mapping under `layer`.

    The arguments are the file, the fields that earlier parts have read, and the usual layer options."""
    write: Callable[[ModelShape, LayerOptions], Settings]


def describe(
    model_type: str, name: str, *parts: Part, layer: LayerOptions = LLAMA_LAYER, **others: Any
) -> Family:
    """Describe a family whose `config.json` consists of `parts`.

    The names of the family's classes in transformers begin with `name`. `others`: further fields of `Family`.
    """

    def read(config: ConfigReader) -> Settings:
        fields: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        for part in parts:
            found = part.read(config, fields, layer)
            changes |= found.get("layer", {})
            fields |= found
        return {**fields, "layer": layer.model_copy(update=changes)}

    def write(shape: ModelShape, options: LayerOptions) -> Settings:
        return {key: value for part in parts for key, value in part.write(shape, options).items()}

    classes = {"lm": f"{name}ForCausalLM", "scalar": f"{name}ForSequenceClassification"}
    given = {"architectures": classes, **others}
    return Family(model_type=model_type, read_config=read, write_config=write, layer=layer, **given)


def sizes(defaults: Settings | None = None, *, rotary: bool = True) -> Part:
    """Sizes of the model, see `read_sizes`."""
    return Part(
        lambda config, fields, usual: read_sizes(config, defaults, rotary=rotary),
        lambda shape, options: write_sizes(shape),
    )


def fixed(settings: Settings) -> Part:
    """Settings for which only one value is supported."""

    def read(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
        config.fixed(settings)
        return {}

    return Part(read, lambda shape, options: settings)


def flag(setting: str, *names: str) -> Part:
    """A true-or-false setting that determines all layer options in `names`."""

    def read(config: ConfigReader, fields: Settings, usual: LayerOptions) -> Settings:
        return {"layer": dict.fromkeys(names, config.flag(setting, getattr(usual, names[0])))}

    return Part(read, lambda shape, options: {setting: getattr(options, names[0])})


ATTENTION_BIAS = flag("attention_bias", "qkv_bias", "out_bias")
MLP_BIAS = flag("mlp_bias", "mlp_bias")


def activation(setting: str = "hidden_act") -> Part:
    """Activation of the feed-forward block."""
    return Part(
        lambda config, fields, usual: {
            "layer": {"activation": read_activation(config, usual.activation, setting)}
        },
        lambda shape, options: {setting: write_activation(options)},
    )


def one_window(default: int | None) -> Part:
    """One window for all layers, unless `layer_types` names some of them."""
    return Part(
        lambda config, fields, usual: read_windows(config, fields["layers"], lambda _: True, default),
        lambda shape, options: {"sliding_window": shape.window},
    )


def windows(usual: Callable[[int], bool], default: int) -> Part:
    """A window in some layers, see `read_windows`."""
    return Part(
        lambda config, fields, _: read_windows(config, fields["layers"], usual, default),
        lambda shape, options: write_windows(shape),
    )


def rope_by_layer_type(defaults: Settings, windowed: str | None) -> Part:
    """Rotary settings by type of layer, see `read_rope_by_layer_type`."""
    return Part(
        lambda config, fields, usual: read_rope_by_layer_type(config, fields["head_dim"], defaults, windowed),
        lambda shape, options: write_rope_by_layer_type(shape, windowed),
    )


def mixture(*, experts: int, per_token: int, normalised: bool) -> Part:
    """Numbers of experts, see `read_mixture`."""
    return Part(
        lambda config, fields, usual: {
            "mixture": read_mixture(config, experts=experts, per_token=per_token, normalised=normalised)
        },
        lambda shape, options: write_mixture(shape),
    )
