"""Settings of `config.json`: a reader that lists settings that were never read, and the settings that most families
share."""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, TypeVar

from realrl.config.errors import UserError, join
from realrl.config.explain import brief
from realrl.families.shape import (
    MOST_EXPERTS,
    MOST_LAYERS,
    OPTIONAL_SCALING_FIELDS,
    SCALING_FIELDS,
    Activation,
    LayerOptions,
    Mixture,
    ModelShape,
)

_T = TypeVar("_T")

_FILE = (
    "architectures model_type auto_map _name_or_path name_or_path transformers_version dtype torch_dtype"
    " use_bfloat16 torchscript tf_legacy_loss tokenizer_class prefix _attn_implementation"
    " _attn_implementation_autoset attn_implementation _commit_hash use_cache output_attentions"
    " output_hidden_states return_dict chunk_size_feed_forward gradient_checkpointing base_model_tp_plan"
    " base_model_pp_plan pretraining_tp is_llama_config transformers.js_config unsloth_fixed unsloth_version"
)
"""Settings about the file itself, or about how a program runs the model."""
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id"
"""Special tokens, which concern sampling and tokenizers."""
_CLASSES = "id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params"
"""Classes of a classifier and their loss. Models here have one class, and algorithms have their own losses."""
_DROPOUT = (
    "attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop residual_dropout embedding_dropout"
    " classifier_dropout attention_probs_dropout_prob hidden_dropout_prob"
)
"""Dropout, which is always off here."""
_GENERATION = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature"
    " top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size"
    " encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate"
    " forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty"
    " suppress_tokens begin_suppress_tokens"
)
"""Generation settings, which recipes replace by their own."""
IRRELEVANT = frozenset(" ".join((_FILE, _TOKENS, _CLASSES, _DROPOUT, _GENERATION)).split())
"""Settings that do not change the result of a forward pass."""

FIXED = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_bidirectional_attention": False,
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Settings of any family for which only this value is supported."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Name of an activation in files -> activation."""

_ACTIVATION_NAMES: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "clamped_silu": "silu",  # files of gpt-oss say "silu"
}


class ConfigReader:
    """Reader of a `config.json` that remembers which settings were read. `where` names the file in errors."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where
        self._read: set[str] = set()

    def read(self, key: str, default: Any = None) -> Any:
        """Read a setting of any type; the default if it is absent or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def has(self, key: str, default: Any = None) -> bool:
        """Return whether a setting has a value: its own, or a default if it is absent. An explicit null is not a
        value."""
        self._read.add(key)
        return self._config[key] is not None if key in self._config else default is not None

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = 10**9) -> int:
        """Read a whole number from `least` to `most`. Raises UserError if it is missing and has no default."""
        value = self.read(key, default)
        if value is None:
            raise self.fail(f"{key} is missing")
        if type(value) is not int or value < least:
            raise self.fail(f"{key}={brief(value)} is not a whole number above {least - 1}")
        if value > most:
            raise self.fail(f"{key}={brief(value)} must be at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """Read a finite number. Raises UserError for anything else."""
        value = self.read(key, default)
        if type(value) not in (int, float) or not _is_finite(value):
            raise self.fail(f"{key}={brief(value)} is not a finite number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """Read a number above 0 whose reciprocal is finite. Raises UserError for anything else."""
        value = self.number(key, default)
        if value <= 0 or not _is_finite(1 / value):
            raise self.fail(f"{key}={value:g} is not a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false. Raises UserError for anything else."""
        value = self.read(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key}={brief(value)} is not true or false")
        return value

    def choice(self, key: str, meanings: Mapping[str, _T], default: str) -> _T:
        """Read one of the words in `meanings`, and return its meaning. Raises UserError for any other word."""
        value = self.read(key, default)
        if not isinstance(value, str) or value not in meanings:
            accepted = join([*meanings], "or")
            raise self.fail(f"{key}={brief(value)} is not supported; it must be {accepted}")
        return meanings[value]

    def by_layer(self, key: str, default: list[_T], one: _T, other: _T) -> list[_T]:
        """Read a list as long as the default, with one of two values for each layer.

        Raises UserError for anything else.
        """
        value = self.read(key, default)
        if (
            not isinstance(value, list)
            or len(value) != len(default)
            or any(v not in (one, other) for v in value)
        ):
            kind = "words" if isinstance(one, str) else "numbers"
            raise self.fail(
                f"{key}={brief(value)} must be a list of {len(default)} {kind}, each {one} or {other}"
            )
        return value

    def fixed(self, settings: Mapping[str, Any]) -> None:
        """Read settings that, if given, must have these values. Raises UserError for other values."""
        for key, wanted in settings.items():
            value = self.read(key, wanted)
            if value != wanted or type(value) is not type(wanted):
                raise self.fail(f"{key}={brief(value)} is not supported; it must be {brief(wanted)}")

    def skip(self, *keys: str) -> None:
        """Count settings as read, because they change nothing here."""
        self._read.update(keys)

    def section(self, key: str) -> "ConfigReader":
        """Read a nested section, empty if it is absent. Raises UserError if it is not a section."""
        value = self.read(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(f"{key}={brief(value)} is not a section of keys")
        return ConfigReader(value, f"{self.where}: {key}")

    def fail(self, problem: str) -> UserError:
        return UserError(f"{self.where}: {problem}")

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._config

    @property
    def keys(self) -> Iterable[str]:
        """Names of settings that are not null, in the order of the file."""
        return [key for key, value in self._config.items() if value is not None]

    def check_all_read(self, irrelevant: Iterable[str] = ()) -> None:
        """Raise UserError unless every setting was read or is known to be irrelevant."""
        self.fixed(FIXED)
        if "quantization_config" not in self._read and self.read("quantization_config") is not None:
            raise self.fail(
                "quantization_config is not supported; give a model whose weights are not quantised"
            )
        for key in self.unread(irrelevant):
            raise self.fail(
                f"{key}={brief(self._config[key])} is an unknown setting that may change the model; if it does"
                " not, remove it from the file"
            )

    def unread(self, irrelevant: Iterable[str] = ()) -> list[str]:
        """List the settings that were not read and are not known to be irrelevant."""
        known = self._read | IRRELEVANT | {*FIXED, *irrelevant}
        return [key for key in self.keys if key not in known]


def _is_finite(value: int | float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # of a whole number that no float can hold
        return False


def read_sizes(
    config: ConfigReader, defaults: Mapping[str, Any] | None = None, *, rotary: bool = True
) -> dict[str, Any]:
    """Read the fields of `ModelShape` that most families share.

    `defaults`: defaults of the family's configuration class, by setting, if they differ from the defaults of this
    function. If `partial_rotary_factor` is one of them, files may rotate part of each head. With `rotary=False`,
    the family reads rotary settings itself. Raises UserError for missing or unsupported settings.
    """
    given = dict(defaults or {})
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.has("head_dim", given.get("head_dim")):
        head_dim = config.size("head_dim", given.get("head_dim"))
    elif hidden < heads:
        raise config.fail(
            f"hidden_size={hidden} is below num_attention_heads={heads}, and head_dim is missing"
        )
    else:
        head_dim = hidden // heads
    fields = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.size("intermediate_size"),
        "layers": config.size("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", given.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "max_positions": config.size("max_position_embeddings", given.get("max_position_embeddings", 2048)),
        "norm_eps": config.number("rms_norm_eps", given.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": config.flag("tie_word_embeddings", given.get("tie_word_embeddings", False)),
        "init_std": config.number("initializer_range", 0.02),
    }
    return fields | (read_rope(config, head_dim, given) if rotary else {})


def write_sizes(shape: ModelShape) -> dict[str, Any]:
    """Write the settings that `read_sizes` reads, with rotary settings in the forms of transformers 4 and 5."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": shape.init_std,
        **write_rope(shape),
    }


WINDOWED, FULL = "sliding_attention", "full_attention"
"""Words of `layer_types`."""


def read_windows(
    config: ConfigReader, layers: int, usual: Callable[[int], bool], default: int | None
) -> dict[str, Any]:
    """Read the window, and the layers that have it. Without `layer_types`, these are the layers for which `usual`
    returns true. `default` is the window of the family's configuration class, for files that do not name one."""
    window = config.size("sliding_window", default) if config.has("sliding_window", default) else None
    default_kinds = [WINDOWED if window is not None and usual(layer) else FULL for layer in range(layers)]
    kinds = config.by_layer("layer_types", default_kinds, WINDOWED, FULL)
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)
    if windowed and window is None:
        raise config.fail("layer_types has sliding_attention, but sliding_window is missing")
    return {"window": window, "windowed_layers": windowed} if windowed else {}


def write_windows(shape: ModelShape) -> dict[str, Any]:
    windowed = set(shape.windowed_layers)
    return {
        "sliding_window": shape.window,
        "layer_types": [WINDOWED if layer in windowed else FULL for layer in range(shape.layers)],
    }


def read_rope(config: ConfigReader, head_dim: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary settings, from `rope_parameters` (transformers 5) or the older `rope_scaling` and
    `rope_theta`."""
    older, rope = config.section("rope_scaling"), config.section("rope_parameters")
    if older.keys:  # transformers also prefers the older section
        rope = older
    return _read_rotation(config, rope, head_dim, defaults)


def read_rope_by_layer_type(
    config: ConfigReader, head_dim: int, defaults: Mapping[str, Any], windowed: str | None
) -> dict[str, Any]:
    """Read rotary settings of a family whose windowed layers may have another base; nothing else may differ.

    `windowed` is the setting that held this base in older files; None if older files had one base for all layers.
    """
    given = config.section("rope_parameters")
    full, sliding = (given.section(kind) for kind in (FULL, WINDOWED))
    if not (full.keys or sliding.keys):
        full = given
    older = config.section("rope_scaling")
    if older.keys:
        full = ConfigReader({**full.settings, **older.settings}, full.where)
    fields = _read_rotation(config, full, head_dim, defaults)
    usual = defaults.get("windowed_rope_theta", fields["rope_theta"])
    theta = sliding.number("rope_theta", usual if windowed is None else config.number(windowed, usual))
    sliding.fixed({"rope_type": "default"})
    sliding.check_all_read()
    same = theta == fields["rope_theta"] and fields["rope_scaling"] is None
    return {**fields, "windowed_rope_theta": None if same else theta}


def write_rope_by_layer_type(shape: ModelShape, windowed: str | None) -> dict[str, Any]:
    written = write_rope(shape)
    theta = shape.windowed_rope_theta or shape.rope_theta
    kinds = {FULL: written["rope_parameters"], WINDOWED: {"rope_type": "default", "rope_theta": theta}}
    older = {} if windowed is None else {windowed: theta}
    return {**written, "rope_parameters": kinds, **older}


def _read_rotation(
    config: ConfigReader, rope: ConfigReader, head_dim: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    theta = rope.number("rope_theta", config.number("rope_theta", defaults.get("rope_theta", 10000.0)))
    usual = defaults.get("partial_rotary_factor")
    share = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 1.0 if usual is None else usual)
    )
    if not 0 < share <= 1:
        raise config.fail(f"partial_rotary_factor={share:g} must be above 0 and at most 1")
    if usual is None and share != 1:
        raise config.fail(f"partial_rotary_factor={share:g} is not supported; it must be 1")
    rotated = int(head_dim * share)
    fields: dict[str, Any] = {"rope_theta": theta, "rotary_dim": None if rotated == head_dim else rotated}
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", _SCALINGS, "default")
    rope.skip("type")
    fields["rope_scaling"] = None if kind == "default" else _read_scaling(config, rope, kind)
    rope.check_all_read()
    return fields


_SCALINGS = {"default": "default", **{kind: kind for kind in SCALING_FIELDS}, "su": "longrope"}
"""Names of kinds of rotary embeddings in files; older Phi-3 files say `su` for `longrope`."""


def _read_scaling(config: ConfigReader, rope: ConfigReader, kind: str) -> dict[str, Any]:
    """Read the fields of `RopeScaling` that a kind of scaling has."""
    fields: dict[str, Any] = {"kind": kind}
    original, longest = (
        config.size(key) if config.has(key) else None
        for key in ("original_max_position_embeddings", "max_position_embeddings")
    )
    # transformers computes a missing factor in this way, for Phi-3 and other models.
    factor = rope.read("factor", longest / original if original and longest else None)
    if factor is None:
        raise config.fail(f"factor is missing from the {kind} rotary settings")
    for name in (*SCALING_FIELDS[kind], *OPTIONAL_SCALING_FIELDS.get(kind, ())):
        value = rope.read(name)
        if name == "original_max_position_embeddings":
            # transformers looks for the original length in this order.
            value = original or value or longest
        if value is None and name in SCALING_FIELDS[kind]:
            raise config.fail(f"{name} is missing from the {kind} rotary settings")
        if value is not None:
            fields[name] = tuple(value) if isinstance(value, list) else value
    rope.skip("original_max_position_embeddings", "finetuned")
    return {**fields, "factor": factor}


def write_rope(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        names = ("factor", *SCALING_FIELDS[scaling.kind], *OPTIONAL_SCALING_FIELDS.get(scaling.kind, ()))
        given = {name: getattr(scaling, name) for name in names if getattr(scaling, name) is not None}
        rope = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()} | {
            "rope_type": scaling.kind
        }
    partial = {}
    if shape.rotary_dim is not None:
        partial = {"partial_rotary_factor": shape.rotary_dim / shape.head_dim}
    return {
        "rope_parameters": {**rope, **partial, "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        **partial,
    }


def write_partial_rotary(shape: ModelShape) -> dict[str, Any]:
    """Write the rotary settings of a family whose default is to rotate part of each head. The rotated share is
    always written, even if it is 1."""
    share = {"partial_rotary_factor": (shape.rotary_dim or shape.head_dim) / shape.head_dim}
    return {**share, "rope_parameters": {**write_rope(shape)["rope_parameters"], **share}}


def read_layer(config: ConfigReader, usual: LayerOptions | None = None, **others: Any) -> LayerOptions:
    """Read layer options that most families share: `attention_bias` of all projections, and the activation.

    `usual`: options of the family's layers, by default Llama's. `others`: options that the family reads itself.
    """
    usual = LayerOptions() if usual is None else usual
    bias = config.flag("attention_bias", usual.qkv_bias)
    activation = others.get("activation") or read_activation(config, usual.activation)
    return usual.model_copy(update={"qkv_bias": bias, "out_bias": bias, **others, "activation": activation})


def write_layer(options: LayerOptions) -> dict[str, Any]:
    return {"attention_bias": options.qkv_bias, "hidden_act": write_activation(options)}


def read_activation(config: ConfigReader, usual: Activation = "silu", key: str = "hidden_act") -> Activation:
    """Read the activation of the feed-forward block; `usual` if the file does not name it."""
    return config.choice(key, _ACTIVATIONS, _ACTIVATION_NAMES[usual])


def write_activation(options: LayerOptions) -> str:
    return _ACTIVATION_NAMES[options.activation]


ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Settings of the auxiliary loss of transformers; recipes have their own, `models.ROLE.router_loss`."""

_NAMES = "num_local_experts", "num_experts"
"""Names of the number of experts; transformers 5 writes the first for all families and reads both."""


def read_mixture(
    config: ConfigReader,
    *,
    experts: int,
    per_token: int,
    normalised: bool,
    names: tuple[str, ...] = _NAMES,
) -> Mixture:
    """Read the numbers of experts. `experts` and `per_token` are the defaults of the family, and `names` the
    settings that may hold the number of experts."""
    counts = {name: config.size(name, most=MOST_EXPERTS) for name in names if config.has(name)}
    if len({*counts.values()}) > 1:
        raise config.fail(" and ".join(f"{name}={count}" for name, count in counts.items()) + " differ")
    found = next(iter(counts.values()), experts)
    chosen = config.size("num_experts_per_tok", per_token, most=MOST_EXPERTS)
    if chosen > found:
        raise config.fail(f"num_experts_per_tok={chosen} is more than the {found} experts")
    return Mixture(experts=found, per_token=chosen, normalised=normalised)


def write_mixture(shape: ModelShape, names: tuple[str, ...] = _NAMES) -> dict[str, Any]:
    mixture = shape.mixture
    assert mixture is not None, "`check_writing` refuses such shapes"
    return {**dict.fromkeys(names, mixture.experts), "num_experts_per_tok": mixture.per_token}


def read_dense_layers(config: ConfigReader, layers: int, dense: Iterable[int], width: int) -> dict[str, Any]:
    """Make the fields of the layers of a mixture that have no experts. `dense` may contain them in any order, and
    other numbers; `width` is that of their blocks. Raises UserError if no layer has experts."""
    found = tuple(sorted({*dense} & {*range(layers)}))
    if len(found) == layers:
        raise config.fail(f"none of the {layers} layers has experts; a mixture needs at least one that does")
    return {"dense_layers": found, "dense_size": width} if found else {}


def read_unrotated(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """Read which layers have no rotary embeddings: layers with a 0 in `no_rope_layers` or, if it is absent, every
    `no_rope_layer_interval`-th layer. Files of Llama 4 have an empty list, which counts as absent."""
    interval = config.size("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in range(layers)]
    rotated = usual if config.read("no_rope_layers") == [] else config.by_layer("no_rope_layers", usual, 0, 1)
    return tuple(layer for layer, on in enumerate(rotated) if not on)


def write_unrotated(shape: ModelShape) -> dict[str, Any]:
    """Write `no_rope_layers`, which makes `no_rope_layer_interval` unnecessary."""
    return {"no_rope_layers": [int(layer not in shape.unrotated_layers) for layer in range(shape.layers)]}
