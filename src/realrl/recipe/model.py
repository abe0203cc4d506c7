"""Settings of each model of a run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from realrl.config.base import DERIVED, Settings
from realrl.config.explain import CONSEQUENCE, brief
from realrl.config.paths import PathOrName, local_path
from realrl.families.adapters import LowRank
from realrl.families.config_json import check_writing
from realrl.families.registry import find_family
from realrl.families.shape import ModelShape, Size
from realrl.families.sizes import SHAPES, find_shape
from realrl.families.tensors import Quantisation

Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""How much of a moving average stays per step."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate. An update moves every weight by about this, and weights are well below 1."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)  # YAML has lists, not tuples
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases. Each step takes `lr * weight_decay` of a
    weight away, which must be less than all of it."""
    grad_clip: PositiveFloat | None = 1.0
    """Global gradient norm is scaled down to this; null for no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Training steps over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after warm-up, over the remaining training steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this fraction of `lr`."""

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr={self.lr:g} times weight_decay={self.weight_decay:g} must be below 1; each step would take"
                " away all of every weight"
            )
        return self


class ModelConfig(Settings):
    """Source of a role's weights."""

    path: PathOrName | None = None
    """A Hugging Face directory or hub name to load weights, shape and tokenizer from."""
    family: str | None = None
    """File of a model family of your own, FILE.py, that the model is of; null where its `config.json` or its shape
    names a registered family."""
    shape: ModelShape | None = Field(
        default=None,
        description="Sizes of a model to initialise from scratch, when there is no `path`: each of them, a Hugging"
        " Face `config.json` or a directory that holds one, or the name of a published model. Names are "
        + ", ".join(SHAPES)
        + ".",
    )
    tokenizer: PathOrName | None = None
    """Tokenizer directory or hub name; taken from `path` when not given."""
    vocab_size: Size | None = None
    """Number of tokens to which the embeddings and the head of the model in `path` grow when they are read, for a
    tokenizer that has more tokens than the model. Each new row is the mean of the old ones. null keeps the model's
    own number."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "int8", "fp8"] = "auto"
    """Type of the weights in computation. `mixed`, for CPUs, is float32 with matrix products that round their
    operands to bfloat16 and add up in float32. `auto` is bfloat16 on GPUs, and on CPUs `mixed` where the processor
    multiplies faster so, which is measured once and kept, else float32. Trained bfloat16 models keep float32 master
    weights. `int8` and `fp8` are for roles that are not trained: they store the matrices of layers in a byte per
    number, which saves memory and takes time, and compute in what `auto` is."""
    computes_in: Literal["float32", "mixed", "bfloat16"] | None = Field(
        default=None, exclude=True, json_schema_extra=DERIVED
    )
    """What `auto` is for a role whose matrices are quantised."""

    @property
    def quantised(self) -> Quantisation | None:
        """Numbers that the matrices of layers are stored as; None where they have the type of all else."""
        return next((name for name in get_args(Quantisation) if name == self.dtype), None)

    @property
    def compute_dtype(self) -> str:
        """Type of the computation, and of all weights but quantised ones; `auto` until that has been replaced."""
        return self.computes_in or self.dtype

    @property
    def has_source(self) -> bool:
        """Whether it says where the weights come from."""
        return self.path is not None or self.shape is not None

    def starts_like(self, other: "ModelConfig") -> bool:
        """Tell whether both models start from the same values; fresh weights depend on sizes and seed alone."""
        mine, theirs = (
            (m.path, m.shape if m.path is None else None, m.vocab_size, m.dtype) for m in (self, other)
        )
        return mine == theirs

    @field_validator("shape", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "":
            raise ValueError("must not be empty")
        if isinstance(value, int | float | list):
            raise ValueError(
                f"{brief(value)} is neither the name of a published model, nor a config.json, nor a section of"
                " sizes"
            )
        if value is not None and "family" not in info.data:
            raise PydanticCustomError(CONSEQUENCE, "the family is not known")
        family = info.data.get("family")
        if isinstance(value, str):
            return find_shape(value, family)
        if isinstance(value, dict):
            given = value.get("family", family)
            if isinstance(given, str):
                given = _check_family(given)
            if family is not None and given != family:
                raise ValueError(f"its family={brief(given)} is not the role's family={family}")
            return value if given is None else {**value, "family": given}
        return value

    @field_validator("shape")
    @classmethod
    def _can_be_saved(cls, value: ModelShape | None) -> ModelShape | None:
        if value is not None:
            if value.lora is not None:
                raise ValueError("adapters are settings of a role: write models.ROLE.lora")
            if value.quantised is not None:
                raise ValueError("how a role stores its matrices is its own setting: write models.ROLE.dtype")
            if value.grown_from is not None:
                raise ValueError("growth is a setting of a role: write models.ROLE.vocab_size")
            check_writing(value)
        return value

    @model_validator(mode="after")
    def _grows_a_model(self) -> Self:
        if self.vocab_size is not None and self.path is None:
            raise ValueError(
                f"vocab_size={self.vocab_size} needs a path: it grows the vocabulary of the model there;"
                " a model that starts from scratch has shape.vocab_size"
            )
        return self

    @field_validator("computes_in")
    @classmethod
    def _is_derived(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("follows from dtype and the device")
        return value

    @field_validator("family")
    @classmethod
    def _is_family(cls, value: str | None) -> str | None:
        return None if value is None else _check_family(value)


def _check_family(reference: str) -> str:
    """Make the path of a family's file absolute; UserError where there is no such family."""
    find_family(reference)
    return str(local_path(reference).resolve()) if reference.endswith(".py") else reference


class TrainedModelConfig(ModelConfig):
    """A role whose parameters the run updates."""

    optimizer: OptimizerConfig = OptimizerConfig()
    trainable_layers: int | None = Field(default=None, ge=0, le=10**4)
    """Train only the last so many decoder layers, the final norm and, where it is not tied to the embeddings, the
    head, and freeze all below them, the embeddings included, and with them a tied head; null trains all layers. 0
    trains only the final norm and such a head."""
    freeze_embeddings: bool = False
    """Keep the embedding table as it is; a head that is tied to it stays as it is, too."""
    lora: LowRank | None = None
    """Freeze the whole model, and train low-rank adapters of its matrices (LoRA), and a scalar head; null trains
    the model itself. `lora: {}` takes the defaults."""
    router_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss of mixtures of experts that keeps routers from preferring a few: of each sequence and
    layer, the number of experts times the sum over them of the share of tokens that chose one times its mean
    probability (Switch Transformer, by sequence), averaged over sequences and layers. Frozen layers learn nothing
    of it."""
    router_replay: bool | None = None
    """Whether a mixture of experts that samples uses, where it is trained on its samples or infers on them, the
    experts that were chosen while they were sampled (router replay, R3); null for yes. Else rounding may have a
    token pass through other experts in training than it did in sampling."""

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        if self.lora is not None:
            for name in ("trainable_layers", "freeze_embeddings"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"lora and {name} exclude each other: adapters leave the model as it is")
            if self.vocab_size is not None:
                raise ValueError(
                    "lora and vocab_size exclude each other: adapters are saved without the embeddings; grow the"
                    " model with transformers' resize_token_embeddings first"
                )
        if self.router_loss and (self.lora is not None or self.trainable_layers == 0):
            setting = "lora" if self.lora is not None else "trainable_layers=0"
            raise ValueError(
                f"router_loss={self.router_loss:g} and {setting} exclude each other: routers are frozen then"
            )
        return self


def trained_models(configs: Mapping[str, ModelConfig]) -> dict[str, TrainedModelConfig]:
    """Select the roles that are trained; `recipe.graphs` checks that these are those with train calls."""
    return {role: config for role, config in configs.items() if isinstance(config, TrainedModelConfig)}


def freeze(config: ModelConfig) -> ModelConfig:
    """Copy a role's settings without those of training."""
    return ModelConfig.model_construct(**{name: getattr(config, name) for name in ModelConfig.model_fields})
