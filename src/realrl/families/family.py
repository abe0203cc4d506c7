"""Description of a model family, which one file gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from realrl.config.errors import DescriptionError
from realrl.families.decoder import decoder_tensors
from realrl.families.settings import ConfigReader
from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape
from realrl.families.tensors import Parameter, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its `config.json` both ways, its tensors, and the options of its layers."""

    model_type: str
    """What `config.json` calls it."""
    architectures: Mapping[Head, str]
    """Classes of transformers: that of language models and, with one label, that of sequence classifiers."""
    read_config: Callable[[ConfigReader], Mapping[str, Any]]
    """Settings of a `config.json` -> fields of `ModelShape`, without `family`. Raises UserError for settings that
    models here have no other value for. A setting that it does not read, and that is neither usual nor untouched,
    is refused."""
    write_config: Callable[[ModelShape, LayerOptions], Mapping[str, Any]]
    """The settings of `config.json` that follow from a shape and the options of its layers; `read_config` must read
    these from them."""
    layer: LayerOptions = field(default_factory=LayerOptions)
    """What layers compute where a shape does not say it."""
    tensors: Callable[[ModelShape, Head, LayerOptions], Sequence[TensorSpec]] = decoder_tensors
    """All tensors of a model in storage order, under their names in Hugging Face files."""
    mixture: bool = False
    """Whether its feed-forward blocks are mixtures of experts, so that shapes have a `mixture`."""
    position_bounds: str = ""
    """What makes sequences of shapes shorter than their files declare, where something does, for error messages."""
    untouched: tuple[str, ...] = ()
    """Settings of `config.json` besides the usual ones that a shape does not hold and training leaves as they
    are."""
    buffers: tuple[str, ...] = ()
    """Endings of names of stored tensors that are computed anew instead of read."""


_REQUIRED: frozenset[Parameter] = frozenset({"embedding", "qkv", "out", "norm"})
_FEED_FORWARD: Mapping[bool, frozenset[Parameter]] = {
    False: frozenset({"gate_up", "down"}),
    True: frozenset({"router", "experts_gate_up", "experts_down"}),
}
"""Matrices of a feed-forward block, and of a mixture."""
_NORMS: Mapping[str, frozenset[Parameter]] = {
    "before": frozenset({"attention_norm", "mlp_norm"}),
    "after": frozenset({"attention_post_norm", "mlp_post_norm"}),
    "around": frozenset({"attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"}),
}
"""Norms of a layer, by where they are."""

_LAYERS = 16
"""Layers of the model that is checked: enough to show patterns such as a different layer among every eight."""


def check_family(family: Family) -> None:
    """Check that the transformer can be made of a family's tensors, and that all layers are alike.

    DescriptionError if not. The planner counts on equal layers.
    """
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
            raise DescriptionError(f"there is no tensor for parameter {min(missing)}")
        _check_parameters(specs)
        _check_layers(family, specs)
        parameters = {spec.parameter for spec in specs}
        if ("q_norm" in parameters) != ("k_norm" in parameters):
            raise DescriptionError("queries and keys must both be normalised, or neither")
        if family.layer.norm == "rms" and any(name.endswith("norm_bias") for name in parameters):
            raise DescriptionError("RMSNorm has no bias; LayerNorm is LayerOptions(norm='layer')")


def _check_layers(family: Family, specs: Sequence[TensorSpec]) -> None:
    """Check that all layers have equal tensors but for names and initial values; DescriptionError if not."""
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
                f"layer {layer} has other tensors than layer 0; all layers of a model"
                " must be alike, as plans take them to be"
            )


def _check_parameters(specs: Sequence[TensorSpec]) -> None:
    """Check that parameters are known, and parts of one neighbours; DescriptionError if not."""
    seen: set[tuple[object, str]] = set()
    names: set[str] = set()
    previous = None
    for spec in specs:
        if spec.name in names:
            raise DescriptionError(f"tensor {spec.name} is listed twice")
        if spec.parameter not in get_args(Parameter):
            known = ", ".join(get_args(Parameter))
            raise DescriptionError(
                f"tensor {spec.name} is part of {spec.parameter!r}, which is none of {known}"
            )
        key = (spec.place, spec.parameter)
        if key in seen and key != previous:
            raise DescriptionError(f"tensor {spec.name} must follow the other tensors of {spec.parameter}")
        names.add(spec.name)
        seen.add(key)
        previous = key
