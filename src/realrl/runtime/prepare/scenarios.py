"""Create the inputs of the planner for a recipe. Does not import torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.families.sizes import SHAPES
from realrl.huggingface.directory import find_model_shape
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, SEARCH, load_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.profile.profile import Profile
from realrl.planner.search.plan_search import UserConstraints
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace
from realrl.planner.workload.environment import EnvironmentTimes
from realrl.planner.workload.workload import Workload
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.devices import host_is_device
from realrl.runtime.prepare.job import Job, RoleModels, open_models


@dataclass(frozen=True)
class Measured:
    """Measurements on which a prediction is based."""

    profile: Profile | None = None
    """Measured speeds, used for devices of the kind on which they were measured."""
    prompts: tuple[int, ...] | None = None
    """Lengths of prompts in tokens; None if each prompt has the maximum length."""
    answers: tuple[int, ...] | None = None
    """Lengths of answers in tokens; None if each answer has the maximum length."""
    longest: int = 0
    """Mean length of the longest answer of a step, if `answers` are only quantiles; 0 if they are all answers."""
    environment: EnvironmentTimes | None = None
    """Times of the environment; None if they are unknown."""


def make_scenario(experiment: Experiment, spec: ClusterSpec, measured: Measured | None = None) -> Scenario:
    """Describe the training step of a recipe on a cluster. Raises UserError if the size of a model is unknown."""
    measured = measured or Measured()
    workload = Workload.of(
        experiment,
        prompts=measured.prompts,
        answers=measured.answers,
        longest=measured.longest,
        environment=measured.environment,
    )
    models = _open_all(experiment)
    return Scenario(
        graph=models.graph,
        models=models.stored,
        spec=spec,
        workload=workload,
        cost=CostModel(spec, measured.profile),
        memory=MemoryModel(spec),
    )


def phase_scenarios(job: Job, spec: ClusterSpec) -> dict[str, Scenario]:
    """Describe training and evaluation steps to compute their memory. Keys are the names in `Job.phases`.

    The scenarios leave out the models of roles whose size is unknown.
    """
    experiment = job.experiment
    cost, memory, found = CostModel(spec), MemoryModel(spec), {}
    for name, phase in job.phases.items():
        workload = Workload.of(experiment)
        if name != "train":
            # As in `Evaluation`: with fewer records, some rank could get none.
            dp = max(place.strategy.dp for place in phase.plan.placements.values())
            items = experiment.data.eval_batch or experiment.data.batch
            samples = experiment.evaluation.samples
            workload = replace(workload, items=max(items, 2 * dp) * samples, samples=samples)
        found[name] = Scenario(
            graph=phase.graph,
            models=job.models.stored,
            spec=spec,
            workload=workload,
            cost=cost,
            memory=memory,
        )
    return found


def _open_all(experiment: Experiment) -> RoleModels:
    """Open all models. Raises UserError with a remedy if the size of a model cannot be found."""
    for role in experiment.spec.list_sources_first(experiment):
        config = experiment.model_configs[role]
        try:
            find_model_shape(config)
        except UserError as error:
            size = config.path if config.path in SHAPES else "llama-2-7b"
            raise UserError(
                f"models.{role}: planning needs the size of the model: {error}; or set models.{role}.path=null and"
                f" models.{role}.shape to a size, for example {size}"
            ) from None
    return open_models(experiment, download=True)


def read_constraints(experiment: Experiment, spec: ClusterSpec, out: Path | None = None) -> UserConstraints:
    """Read a recipe's constraints for a search. `out`: the plan file that will be written.

    Raises UserError if `plan` is not a preset, a readable plan file or `out`. Also raises UserError for data types
    that calls cannot have.
    """
    _check_dtypes(experiment, spec)
    search_space = SearchSpace(
        offload=not host_is_device(experiment, spec), dtypes=tuple(dict.fromkeys(experiment.search_dtypes))
    )
    own: dict[str, Plan] = {}
    name = experiment.plan
    if name not in (*PRESETS, SEARCH) and not (
        out is not None and out == local_path(name) and not out.exists()
    ):
        own = {name: load_plan(name, experiment.graph, experiment.micro_batch_tokens)}
    return UserConstraints(experiment.micro_batch_tokens, experiment.recompute, search_space, own)


def _check_dtypes(experiment: Experiment, spec: ClusterSpec) -> None:
    names = ", ".join(experiment.search_dtypes)
    if experiment.exact and names:
        raise UserError(
            f"search_dtypes=[{names}]: exact=true needs one data type for all calls of a role; leave search_dtypes"
            " out, or set exact=false"
        )
    if "mixed" in experiment.search_dtypes and not all(group.device.cpu for group in spec.groups):
        raise UserError(f"search_dtypes=[{names}]: mixed is for CPUs; on a GPU, choose bfloat16 or float32")
