"""Settings of each model of a run."""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
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
from realrl.recipe.optimizer import OptimizerConfig


class ModelConfig(Settings):
    """Source of a role's weights."""

    path: PathOrName | None = None
    """Hugging Face directory or hub name that has weights, shape and tokenizer."""
    family: str | None = None
    """FILE.py with your own model family. null if `config.json` or the shape names a registered family."""
    shape: ModelShape | None = Field(
        default=None,
        description="Sizes of a model to initialise from scratch, if there is no `path`. Give a section with all"
        " sizes, a Hugging Face `config.json`, a directory that holds one, or the name of a published model. Names"
        " are " + ", ".join(SHAPES) + ".",
    )
    tokenizer: PathOrName | None = None
    """Tokenizer directory or hub name; by default `path`."""
    vocab_size: Size | None = None
    """Vocabulary size to which the embeddings and the head of the model in `path` grow. This is for a tokenizer
    that has more tokens than the model. Each new row is the mean of the old rows. null keeps the model's vocabulary
    size."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "int8", "fp8"] = "auto"
    """Data type in which the weights compute. `mixed`, for CPUs, is float32 with matrix products that round their
    operands to bfloat16 and sum in float32. `auto` is bfloat16 on GPUs. On CPUs it is `mixed` if a one-time
    measurement shows that it is faster, otherwise float32. Trained bfloat16 models keep float32 master weights.
    `int8` and `fp8` are for frozen roles: they store the matrices of layers in one byte per number, which saves
    memory but takes time. Such roles compute in the type of `auto`."""
    computes_in: Literal["float32", "mixed", "bfloat16"] | None = Field(
        default=None, exclude=True, json_schema_extra=DERIVED
    )
    """Data type in which a quantised role computes."""

    @property
    def quantised(self) -> Quantisation | None:
        """Data type in which the matrices of layers are stored; None if they are not quantised."""
        return next((name for name in get_args(Quantisation) if name == self.dtype), None)

    @property
    def compute_dtype(self) -> str:
        """Data type of computation and of all unquantised weights. It is `auto` until checks replace it."""
        return self.computes_in or self.dtype

    @property
    def has_source(self) -> bool:
        """Whether these settings name a source of weights."""
        return self.path is not None or self.shape is not None

    def starts_like(self, other: "ModelConfig") -> bool:
        """Return whether both models start from equal weights. Fresh weights depend only on sizes and seed."""
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
    """Return the reference of a family; the path of a file becomes absolute.

    Raises UserError for an unknown family.
    """
    find_family(reference)
    return str(local_path(reference).resolve()) if reference.endswith(".py") else reference


class TrainedModelConfig(ModelConfig):
    """A role whose parameters the run updates."""

    optimizer: OptimizerConfig = OptimizerConfig()
    trainable_layers: int | None = Field(default=None, ge=0, le=10**4)
    """Number of last decoder layers to train. The final norm and an untied head are trained too. Everything below
    these layers is frozen, including embeddings and a tied head. 0 trains only the final norm and an untied head.
    null trains the whole model."""
    freeze_embeddings: bool = False
    """Freeze the embedding table, and a head that is tied to it."""
    lora: LowRank | None = None
    """Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one.
    null trains the model itself. `lora: {}` uses the defaults."""
    router_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of mixtures of experts (as in the Switch Transformer, but for each
    sequence). For each sequence and layer, the loss is the number of experts times the sum over experts of (share
    of tokens * mean probability). It is averaged over sequences and layers. Frozen layers do not learn from it."""
    router_replay: bool | None = None
    """Router replay (R3): whether training and inference use the experts that were chosen during sampling, if a
    mixture of experts generated the samples itself. null means yes. Without router replay, rounding may send a
    token to other experts in training."""

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
    """Select the trained roles. `recipe.graphs` checks that exactly these roles have train calls."""
    return {role: config for role, config in configs.items() if isinstance(config, TrainedModelConfig)}


def freeze(config: ModelConfig) -> ModelConfig:
    """Copy the settings of a role, but leave out the settings of training."""
    return ModelConfig.model_construct(**{name: getattr(config, name) for name in ModelConfig.model_fields})
