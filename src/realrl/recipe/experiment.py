"""A recipe: one typed description of a run."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.errors import join
from realrl.config.paths import PathOrName, YamlOrName
from realrl.config.values import check_cluster, check_size
from realrl.recipe.data import DataConfig, TrainingConfig
from realrl.recipe.evaluation import EvaluationConfig
from realrl.recipe.run_settings import CheckpointConfig, LaunchConfig, Resume, TrackersConfig


class DebugConfig(Settings):
    """Checks that cost time, and records for those who look into a run."""

    verify_reallocation: bool = False
    """After each reallocation, prove by checksums that what arrived on every rank is what was sent."""
    traced_steps: int = Field(default=5, ge=1, le=1000)
    """Number of last steps that `trace.json` and `traces/` of the run's directory show, instruction by
    instruction. Every rank keeps them in memory, some 20 kB per step, and at most 20,000 instructions."""


class Models(Settings):
    """One model per role."""

    @model_validator(mode="after")
    def _sources(self) -> Self:
        given = {role: getattr(self, role) for role in type(self).model_fields}
        models = {role: model for role, model in given.items() if model is not None}
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
            own = field.is_required() or field.default is None
            if own and role in models and not models[role].has_source:
                raise ValueError(f"{role} needs a path (weights to load) or a shape (start from scratch)")
        return self


class Experiment(Settings):
    """Settings that every recipe has; each algorithm adds its own in a class derived from this one."""

    algorithm: str
    """What the run does, and so which other keys there are: the name of an installed algorithm, or a FILE.py or
    package.module that describes one."""
    run_dir: str
    """Directory for everything the run writes."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Decides data order, initialisation and sampling."""
    cluster: YamlOrName = "auto"
    """Devices, as `nodes x devices per node`, for example `1x2`, with their kind before it, for example `h100:2x8`,
    or as a cluster file (.yaml); nodes that differ are joined by `+`, for example `2x8+1x4`. `auto` takes what
    torchrun started, or the GPUs of this machine; on a CPU the planner chooses how many processes share its cores
    as threads. Without a kind the GPU says it; only planning wants to know."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes GPUs where torch finds any."""
    device_memory: str | None = None
    """Memory of one device, for example `80GiB`. A plan that is expected to need more is refused before anything
    starts. null asks the GPU; on a CPU, processes share the memory of the machine evenly."""
    host_memory: str | None = None
    """Memory of each node's host, for example `2TB`, which offloaded state of GPUs must fit into. null asks the
    machine, or takes what is usual with the devices that `cluster` names."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`, and start from the beginning."""
    resume: Resume = "auto"
    """What to do with an earlier run in `run_dir`: `auto` continues it from its last checkpoint where it is of the
    same recipe; another cluster, plan, length or evaluation makes no other recipe. `changed` continues it with
    whatever settings have changed since, such as a learning rate. `never` makes it an error."""
    plan: YamlOrName = "symmetric"
    """Name of a plan preset; a plan file; or `search`: the planner finds one before the run starts, and keeps it in
    `~/.cache/realrl/plans` (`$XDG_CACHE_HOME`) for the next run with the same models, devices and workload."""
    profile: PathOrName | None = None
    """A file that `realrl profile` has measured on such devices, for predictions; null predicts from data
    sheets."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one forward pass (for generation: in the key/value cache at one time), where the plan
    does not say otherwise. A longer single sequence is passed alone."""
    recompute: bool = False
    """Whether presets train with recomputed activations: less memory for about a third more arithmetic. A plan
    file, or a search, says it for each call."""
    search_dtypes: list[Literal["float32", "mixed", "bfloat16"]] = Field(default=[])
    """Data types that a search may give to the parameters of calls that do not train, besides their models' own.
    With `[bfloat16]`, for example, a model that is trained in float32 may generate from rounded parameters, which
    takes less time and memory; samples then come from another policy than the one that learns from them."""
    exact: bool = False
    """Whether a token's forward pass is the same arithmetic in the same order wherever it runs: in a decode step, a
    prefill or training, whatever else is in the batch. Sampled tokens are then the same whatever the batch, the
    size of the cache and the degrees of data and pipeline parallelism, and log-probabilities of the sampler and of
    the trainer agree bit for bit. It takes more time (docs/exact.md), plans without tensor parallelism, and one
    data type for all calls of a role."""
    kernels: list[Literal["fa4", "flashinfer"]] = Field(default=[])
    """Kernels of other packages that take the place of built-in ones on GPUs, each installed as an extra
    (`pip install 'realrl[fa4]'`): FlashAttention 4 for attention in bfloat16, FlashInfer for top-k and top-p. They
    have not been measured on a GPU yet, and predictions are for the built-in ones (docs/gpu.md)."""
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    trackers: TrackersConfig = TrackersConfig()
    debug: DebugConfig = DebugConfig()
    models: Models
    """The model of each role."""
    _spec: Any = PrivateAttr(default=None)
    """Description of the algorithm, see `recipe.algorithm.get_spec`."""

    @field_validator("device_memory", "host_memory", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return check_size(value)

    @field_validator("cluster", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return check_cluster(value)
