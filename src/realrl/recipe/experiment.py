"""A recipe: one typed description of a run, one class per algorithm."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, TypeAdapter, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.devices import check_cluster
from realrl.config.units import check_size
from realrl.config.words import join
from realrl.recipe.data import DataConfig, TrainingConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig
from realrl.recipe.settings import GenerationConfig, PPOConfig


class DebugConfig(Settings):
    """Checks that cost time."""

    verify_reallocation: bool = False
    """After each reallocation, prove by checksums that what arrived on every rank is what was sent."""


class _Run(Settings):
    """What every recipe has."""

    algorithm: str
    """What the run does, and so which other keys there are."""
    run_dir: str
    """Directory for everything the run writes."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Decides data order, initialisation and sampling."""
    cluster: str = "auto"
    """Devices, as `nodes x devices per node`, for example `1x2`, with their kind before it, for example `h100:2x8`,
    or as a cluster file (.yaml). `auto` takes the GPUs of this machine, or one CPU process, or what torchrun
    started. Without a kind the GPU says it; only planning wants to know."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes GPUs where torch finds any."""
    device_memory: str | None = None
    """Memory of one device, for example `80GiB`. A plan that is expected to need more is refused before anything
    starts. null asks the GPU; on a CPU, processes share the memory of the machine evenly."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`; otherwise a directory in use is an error."""
    plan: str = "symmetric"
    """Name of a plan preset; a plan file; or `search`: the planner finds one before the run starts, and keeps it in
    `~/.cache/realrl/plans` (`$XDG_CACHE_HOME`) for the next run with the same models, devices and workload."""
    profile: str | None = None
    """A file that `realrl profile` has measured on such devices, for predictions; null predicts from data
    sheets."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one forward pass (for generation: in the key/value cache at one time), where the plan
    does not say otherwise. A longer single sequence is passed alone."""
    recompute: bool = False
    """Whether presets train with recomputed activations: less memory for about a third more arithmetic. A plan
    file, or a search, says it for each call."""
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    debug: DebugConfig = DebugConfig()

    @field_validator("device_memory", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return check_size(value)

    @field_validator("cluster", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return check_cluster(value)

    @model_validator(mode="after")
    def _eval_min_new_tokens_fits(self) -> Self:
        fewest, generation = self.training.eval_min_new_tokens, getattr(self, "generation", None)
        if fewest is None:
            return self
        if generation is None:
            raise ValueError(
                f"training.eval_min_new_tokens is about generated text, and {self.algorithm} generates none;"
                " leave it out"
            )
        if fewest > generation.max_new_tokens:
            raise ValueError(
                f"training.eval_min_new_tokens={fewest} is above"
                f" generation.max_new_tokens={generation.max_new_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _judge_has_texts(self) -> Self:
        if self.training.judge is None:
            return self
        if not hasattr(self, "generation"):
            raise ValueError(
                f"training.judge scores generated text, and {self.algorithm} generates none; leave it out"
            )
        if self.data.eval is None:
            raise ValueError(
                "training.judge scores what evaluations generate; give data.eval or set training.judge=null"
            )
        return self


class _Models(Settings):
    """One model per role."""

    @model_validator(mode="after")
    def _sources(self) -> Self:
        models = {role: getattr(self, role) for role in type(self).model_fields}
        both = [role for role, model in models.items() if model.path is not None and model.shape is not None]
        if both:
            scratch, load = (
                " ".join(f"models.{role}.{field}=null" for role in both) for field in ("path", "shape")
            )
            raise ValueError(
                f"{join(both)} {'has' if len(both) == 1 else 'have'} both a path (weights to load) and a shape"
                f" (start from scratch); for the shape set {scratch}, for the weights {load}"
            )
        for role, field in type(self).model_fields.items():
            if field.is_required() and not models[role].has_source:
                raise ValueError(f"{role} needs a path (weights to load) or a shape (start from scratch)")
        return self


class SFTModels(_Models):
    """The model of supervised fine-tuning."""

    actor: TrainedModelConfig
    """The language model to fine-tune."""


class SFTExperiment(_Run):
    """Supervised fine-tuning on `{prompt, answer}` records or conversations."""

    algorithm: Literal["sft"]
    """What the run does: supervised fine-tuning."""
    models: SFTModels


class RewardModels(_Models):
    """The model of reward modelling."""

    reward: TrainedModelConfig
    """Starts from a language model or a sequence classifier; becomes a sequence classifier with one label."""


class RewardExperiment(_Run):
    """Reward modelling on preference pairs (Bradley-Terry)."""

    algorithm: Literal["reward"]
    """What the run does: reward modelling."""
    models: RewardModels


class PPOModels(_Models):
    """The four models of PPO."""

    actor: TrainedModelConfig
    """The policy."""
    critic: TrainedModelConfig = TrainedModelConfig()
    """Value model; starts from the reward model when it has no `path`. Its `dtype` is the actor's if not given."""
    ref: ModelConfig = ModelConfig()
    """Frozen reference policy; the actor's starting point when it has no `path`. Its `dtype` is the actor's if not
    given."""
    reward: ModelConfig
    """Frozen reward model, a sequence classifier with one label."""

    @model_validator(mode="after")
    def _defaults(self) -> Self:
        for role, source in (("critic", self.reward), ("ref", self.actor)):
            model, fill = getattr(self, role), {}
            if not model.has_source:
                fill = {name: getattr(source, name) for name in ("path", "family", "shape", "tokenizer")}
            if "dtype" not in model.model_fields_set:
                fill["dtype"] = self.actor.dtype
            # Before anyone else sees the object, so it is still as good as immutable.
            object.__setattr__(self, role, model.model_copy(update=fill))
        return self


class PPOExperiment(_Run):
    """RLHF with PPO: four roles, six calls."""

    algorithm: Literal["ppo"]
    """What the run does: proximal policy optimisation."""
    models: PPOModels
    ppo: PPOConfig = PPOConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.data.batch % self.ppo.minibatches:
            raise ValueError(
                f"data.batch={self.data.batch} is not divisible by ppo.minibatches={self.ppo.minibatches}"
            )
        return self

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        prompt, answer, most = (
            self.data.max_prompt_tokens,
            self.generation.max_new_tokens,
            self.data.max_tokens,
        )
        if prompt + answer > most:
            raise ValueError(
                f"data.max_prompt_tokens={prompt} and generation.max_new_tokens={answer} together are above"
                f" data.max_tokens={most}"
            )
        return self

    @model_validator(mode="after")
    def _reference_type(self) -> Self:
        if self.ppo.ref_ema is not None and self.models.ref.dtype != "float32":
            raise ValueError(
                "ppo.ref_ema needs models.ref.dtype=float32; in bfloat16 small steps are rounded away"
            )
        return self

    @property
    def eval_generation(self) -> GenerationConfig:
        """How evaluation samples."""
        fewest = self.training.eval_min_new_tokens
        if fewest is None:
            return self.generation
        return self.generation.model_copy(update={"min_new_tokens": fewest})


Experiment = SFTExperiment | RewardExperiment | PPOExperiment

EXPERIMENT: TypeAdapter[Experiment] = TypeAdapter(Annotated[Experiment, Field(discriminator="algorithm")])
"""Validates a mapping into the experiment its `algorithm` names."""
