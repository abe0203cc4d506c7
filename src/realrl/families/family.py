"""The description of a model family, and the check of its tensor table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from realrl.config.errors import DescriptionError
from realrl.families.decoder_tensors import decoder_tensors
from realrl.families.settings import ConfigReader
from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape
from realrl.families.tensors import Parameter, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: how it reads and writes `config.json`, its tensors, and what its layers compute."""

    model_type: str
    """`model_type` in `config.json`."""
    architectures: Mapping[Head, str]
    """Classes of transformers by head: the language model, and the sequence classifier with one label."""
    read_config: Callable[[ConfigReader], Mapping[str, Any]]
    """Turn the settings of a `config.json` into fields of `ModelShape`, without `family`.

    Raises UserError for values that models here do not support. Settings that this function does not read are
    refused, unless they are in `IRRELEVANT` or `untouched`.
    """
    write_config: Callable[[ModelShape, LayerOptions], Mapping[str, Any]]
    """Turn a shape and its layer options into settings of `config.json`, from which `read_config` makes the same
    shape."""
    layer: LayerOptions = field(default_factory=LayerOptions)
    """Options of layers, unless the shape has its own options."""
    tensors: Callable[[ModelShape, Head, LayerOptions], Sequence[TensorSpec]] = decoder_tensors
    """List all tensors of a model in storage order, named as in Hugging Face files."""
    mixture: bool = False
    """Whether feed-forward blocks are mixtures of experts; if so, every shape has a `mixture`."""
    further_layers: bool = False
    """Whether files may have further layers after the last one, which predict tokens further ahead. They are not
    read."""
    position_bounds: str = ""
    """For error messages: the settings that limit sequences to less than the declared length, if the family has
    any."""
    untouched: tuple[str, ...] = ()
    """Settings of `config.json` that a shape does not hold, and that are copied unchanged from the opened model to
    saved models. They come in addition to the settings that are copied for all families."""
    buffers: tuple[str, ...] = ()
    """Endings of the names of file tensors that are not read, because they are computed when needed."""


_REQUIRED: frozenset[Parameter] = frozenset({"embedding", "qkv", "out", "norm"})
_FEED_FORWARD: Mapping[bool, frozenset[Parameter]] = {
    False: frozenset({"gate_up", "down"}),
    True: frozenset({"router", "experts_gate_up", "experts_down"}),
}
"""Matrices that a feed-forward block needs (False), and matrices that a mixture needs (True)."""
_NORMS: Mapping[str, frozenset[Parameter]] = {
    "before": frozenset({"attention_norm", "mlp_norm"}),
    "after": frozenset({"attention_post_norm", "mlp_post_norm"}),
    "around": frozenset({"attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"}),
}
"""Norms that a layer needs, by `LayerOptions.norm_place`."""

_LAYERS = 16
"""Number of layers of the checked sample. It is enough to find a pattern such as one different layer in eight."""


def check_family(family: Family) -> None:
    """Check that a family's tensors make a transformer, and that all layers of one kind are alike, as the planner
    assumes. Raises DescriptionError if not."""
    sample = ModelShape(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        layers=_LAYERS,
        heads=4,
        kv_heads=2,
        head_dim=2,
        mixture=Mixture(experts=4, per_token=2) if family.mixture else None,
    )
    if set(family.architectures) != set(get_args(Head)):
        raise DescriptionError(f"architectures must have exactly the keys {', '.join(get_args(Head))}")
    for head in get_args(Head):
        specs = family.tensors(sample, head, family.layer)
        required = _REQUIRED | _NORMS[family.layer.norm_place] | _FEED_FORWARD[family.mixture]
        required |= {"lm_head" if head == "lm" else "scalar_head"}
        missing = required - {spec.parameter for spec in specs}
        if missing:
            raise DescriptionError(f"parameter {min(missing)} has no tensor")
        _check_parameters(specs)
        _check_layers(family, specs)
        parameters = {spec.parameter for spec in specs}
        if ("q_norm" in parameters) != ("k_norm" in parameters):
            raise DescriptionError("queries and keys must both be normalised, or neither")
        if family.layer.norm == "rms" and any(name.endswith("norm_bias") for name in parameters):
            raise DescriptionError("RMSNorm has no bias; LayerNorm is LayerOptions(norm='layer')")


def _check_layers(family: Family, specs: Sequence[TensorSpec]) -> None:
    """Raise DescriptionError unless all layers have the same tensors, apart from names and initial values."""
    layers: dict[int, list[tuple[object, ...]]] = {layer: [] for layer in range(_LAYERS)}
    for spec in specs:
        if spec.layer is None:
            continue
        if spec.layer not in layers:
            raise DescriptionError(f"tensor {spec.name} is in layer {spec.layer} of {_LAYERS} layers")
        layers[spec.layer].append(
            (spec.parameter, spec.shape, spec.expert, spec.partition, spec.partial_gradient)
        )
    for layer, tensors in layers.items():
        if tensors != layers[0]:
            raise DescriptionError(
                f"layer {layer} has other tensors than layer 0; plans need layers that are all alike"
            )


def _check_parameters(specs: Sequence[TensorSpec]) -> None:
    """Raise DescriptionError for unknown parameters, repeated names, or a parameter whose tensors are not
    neighbours."""
    seen: set[tuple[object, str]] = set()
    names: set[str] = set()
    previous = None
    for spec in specs:
        if spec.name in names:
            raise DescriptionError(f"tensor {spec.name} is listed twice")
        if spec.parameter not in get_args(Parameter):
            known = ", ".join(get_args(Parameter))
            raise DescriptionError(
                f"tensor {spec.name} is part of {spec.parameter!r}, which is not a parameter; known are {known}"
            )
        key = (spec.place, spec.parameter)
        if key in seen and key != previous:
            raise DescriptionError(f"tensor {spec.name} must follow the other tensors of {spec.parameter}")
        names.add(spec.name)
        seen.add(key)
        previous = key
