"""A recipe: one typed description of a run."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.errors import join
from realrl.config.paths import PathOrName, YamlOrName
from realrl.config.values import check_cluster, check_size
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.data import DataConfig
from realrl.recipe.environment import EnvironmentConfig
from realrl.recipe.evaluation import EvaluationConfig
from realrl.recipe.model import ModelConfig
from realrl.recipe.run_settings import CheckpointConfig, LaunchConfig, Resume, TrackersConfig
from realrl.recipe.training import AsynchronyConfig, TrainingConfig

if TYPE_CHECKING:
    from realrl.recipe.algorithm import AlgorithmSpec


class RecordConfig(Settings):
    """Which steps are recorded for `realrl replay`, in RUN_DIR/records: the outputs of every call, and metrics.

    A record refers to the checkpoint before its step, which is then kept. Delete a record to free both.
    """

    steps: list[PositiveInt] = Field(default=[])
    """Numbers of steps to record, counted from 1. A checkpoint is written before each of them."""
    every: PositiveInt | None = None
    """Also record each step whose number is a multiple of this number, with a checkpoint before it."""
    trouble: NonNegativeInt = 3
    """Maximum number of further steps to record because of trouble: an optimizer step was skipped because a loss
    or a gradient was not finite, or `training.spike` found a spike. Their replay starts from the last checkpoint
    before the step. 0 records none."""

    def asks(self, step: int) -> bool:
        """Return whether a step, counted from 1, is recorded whatever happens in it."""
        return step in self.steps or (self.every is not None and step % self.every == 0)


class DebugConfig(Settings):
    """Settings of slow checks, traces and records."""

    verify_reallocation: bool = False
    """After each reallocation, compare checksums of sent and received data on every rank."""
    traced_steps: int = Field(default=5, ge=1, le=1000)
    """Number of latest steps whose instructions are recorded in `trace.json` and `traces/` of the run's directory.
    Every rank keeps them in memory: about 20 kB per step, and at most 20,000 instructions."""
    record: RecordConfig = RecordConfig()


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
    """Settings that every recipe has. Each algorithm derives a class that adds its own settings."""

    algorithm: str
    """The algorithm, which determines the other settings: an installed name, or a FILE.py or package.module that
    describes one."""
    run_dir: str
    """Directory for everything that the run writes."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Random seed for data order, initialisation and sampling."""
    cluster: YamlOrName = "auto"
    """Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a
    cluster file (.yaml). `+` joins nodes with different devices, for example `2x8+1x4`. `auto` uses the processes
    of torchrun, or the GPUs of this machine; on a CPU, the planner chooses the number of processes. Without a kind,
    the GPU's name determines it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. `auto` uses GPUs if torch finds any."""
    device_memory: str | None = None
    """Memory of one device, for example `80GiB`. A plan that is predicted to need more is refused before anything
    starts. null uses the memory of the GPU; on a CPU, processes share the machine's memory evenly."""
    host_memory: str | None = None
    """Memory of each node's host, for example `2TB`. It limits the GPU state that can be offloaded. null uses the
    memory of the machine, or the usual size for the devices in `cluster`."""
    overwrite: bool = False
    """Delete an earlier run in `run_dir`, and start from the beginning."""
    resume: Resume = "auto"
    """What to do with an earlier run in `run_dir`. `auto` continues from its last checkpoint if the recipe is the
    same; only cluster, plan, length and evaluation may differ. `changed` also accepts other changes, such as a new
    learning rate. `never` treats an earlier run as an error."""
    plan: YamlOrName = "symmetric"
    """A plan preset, a plan file, or `search`. With `search`, the planner finds a plan before the run starts. It
    keeps the plan in `~/.cache/realrl/plans` (`$XDG_CACHE_HOME`) for later runs with the same models, devices and
    workload."""
    profile: PathOrName | None = None
    """Profile that `realrl profile` measured on such devices, for predictions. null predicts from data sheets."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another
    number. A longer sequence is processed alone."""
    recompute: bool = False
    """Whether presets recompute activations in training. This saves memory, but costs about a third more
    arithmetic. A plan file or a search decides this for each call."""
    search_dtypes: list[Literal["float32", "mixed", "bfloat16"]] = Field(default=[])
    """Additional data types that a search may choose for the parameters of calls that do not train. With
    `[bfloat16]`, a model that is trained in float32 may generate with rounded parameters. This saves time and
    memory, but the sampling policy then differs from the trained policy."""
    exact: bool = False
    """Whether the forward pass of a token does the same arithmetic in the same order everywhere: in decode steps,
    prefill and training, with any batch. Sampled tokens then do not depend on the batch, the size of the cache, or
    the degrees of data and pipeline parallelism. Log-probabilities of sampler and trainer agree bit for bit. This
    takes more time (docs/exact.md). It requires plans without tensor parallelism, and one data type for all calls
    of a role."""
    kernels: list[Literal["fa4", "flashinfer"]] = Field(default=[])
    """Kernels of other packages that replace built-in kernels on GPUs. Each is installed as an extra (`pip install
    'realrl[fa4]'`): FlashAttention 4 for attention in bfloat16, FlashInfer for top-k and top-p. They have not been
    measured on a GPU yet; predictions assume the built-in kernels (docs/gpu.md)."""
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    trackers: TrackersConfig = TrackersConfig()
    debug: DebugConfig = DebugConfig()
    models: Models
    """The model of each role."""
    _spec: Any = PrivateAttr(default=None)

    @property
    def spec(self) -> "AlgorithmSpec":
        """Description of the recipe's algorithm."""
        assert self._spec is not None, "recipes are read by parse_experiment"
        return cast("AlgorithmSpec", self._spec)

    @cached_property
    def model_configs(self) -> Mapping[str, ModelConfig]:
        """Model settings of every role that the recipe has."""
        return {role: getattr(self.models, role) for role in self.spec.roles_of(self)}

    @cached_property
    def graph(self) -> DataflowGraph:
        """Calls of one training step. Raises UserError if they contradict the algorithm's description."""
        from realrl.recipe.graphs import build_graph

        return build_graph(self)

    @cached_property
    def eval_graph(self) -> DataflowGraph | None:
        """Calls of one evaluation step; None without evaluation records. Raises UserError like `graph`."""
        from realrl.recipe.graphs import build_eval_graph

        return build_eval_graph(self)

    @property
    def environment_config(self) -> EnvironmentConfig | None:
        """Environment of the recipe; None if there is none, or if the algorithm has no such setting."""
        return getattr(self, "environment", None)

    @property
    def longest(self) -> tuple[int, str]:
        """Length of the longest possible sequence in tokens, and the settings that determine it."""
        if self.spec.generation is None:
            return self.data.max_tokens, "data.max_tokens"
        longest = self.data.max_prompt_tokens + self.spec.generation(self).max_new_tokens
        return longest, "data.max_prompt_tokens + generation.max_new_tokens"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the recipe with other values of some fields, and drop cached properties of the old values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("model_configs", "graph", "eval_graph"):
            copied.__dict__.pop(name, None)
        return copied

    @field_validator("device_memory", "host_memory", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return check_size(value)

    @field_validator("cluster", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return check_cluster(value)
