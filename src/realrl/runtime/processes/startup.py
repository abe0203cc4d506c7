"""Let ranks agree, before they compile a recipe, on the smallest device and on a plan that fits."""

import os
from collections.abc import Callable

from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, SEARCH, load_plan
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.fit.plan_cache import search_for_plan
from realrl.runtime.prepare.gpu import Gpu, Here
from realrl.runtime.prepare.job import make_written_plan, open_models
from realrl.runtime.processes.environment import PLAN_VARIABLE, restart_count, under_launcher
from realrl.runtime.processes.process import Process


def find_least_device(process: Process) -> Here:
    """Return the GPU with the least memory among all ranks, or `cpu` if ranks compute on CPUs."""
    gpus: list[Gpu] = [gpu for gpu in process.gather(process.gpu) if gpu is not None]
    if not gpus:
        return "cpu"
    return min(gpus, key=lambda gpu: gpu.memory_bytes)


def is_for_others(experiment: Experiment, cluster: Cluster) -> bool:
    """Return whether the recipe's plan is a plan file for other devices than `cluster`, which torchrun has started.

    Raises UserError if the file is not a plan file.
    """
    named = experiment.plan in (*PRESETS, SEARCH)
    if named or experiment.cluster != "auto" or not under_launcher():
        return False
    plan = load_plan(experiment.plan, experiment.graph, experiment.micro_batch_tokens)
    return plan.cluster != cluster


def replace_plan(experiment: Experiment, cluster: Cluster, *, goes_on: bool) -> tuple[Experiment, str]:
    """Replace a plan that is for other devices by a search. Returns the recipe and a note about the change.

    In a new run, or without `launch.shrink`, the plan stays, and a later check reports it as a mistake. `goes_on`:
    whether the run continues an earlier one.
    """
    if not experiment.launch.shrink or not (goes_on or restart_count()):
        return experiment, ""
    note = f"{experiment.plan} is for other devices; a plan is searched for cluster={cluster}"
    return experiment.model_copy(update={"plan": SEARCH}), note


def agree_on_plan(
    experiment: Experiment,
    cluster: Cluster,
    process: Process,
    here: Here,
    say: Callable[[str], None],
    *,
    evaluates: bool = False,
) -> Plan:
    """Agree on the plan of a recipe. All ranks call this together.

    If the launcher has searched for a plan, all ranks use it. Otherwise, the rank that writes creates the plan or
    searches for it. `say` is called with the messages of a search. With `evaluates`, unknown sizes of models are
    not fetched from the hub, because an evaluation does not use every model. Raises UserError on all ranks if there
    is no plan.
    """
    file = os.environ.get(PLAN_VARIABLE)
    if file is not None:
        return Plan.load(file, experiment.graph)
    plan: Plan | None = None
    with process.together():
        if process.rank == WRITER and experiment.plan == SEARCH:
            plan = search_for_plan(experiment, cluster, here, say)
        elif process.rank == WRITER:
            plan = make_written_plan(experiment, cluster, open_models(experiment, download=not evaluates))
    # Only one rank decides, because time may cut a search short, and nodes may have different files.
    agreed: Plan = process.gather(plan)[WRITER]
    return agreed
