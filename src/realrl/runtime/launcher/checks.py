"""Checks of a recipe on this machine before its ranks start, and the search for its plan. Does not import torch."""

from collections.abc import Callable

from realrl.huggingface.directory import check_directories
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH
from realrl.planner.profile.profile import Profile
from realrl.recipe.experiment import Experiment
from realrl.runtime.launcher.launch import check_local
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.fit.check import check_fit
from realrl.runtime.prepare.fit.plan_cache import search_for_plan
from realrl.runtime.prepare.gpu import Here, ask_machine, try_kernels
from realrl.runtime.prepare.host import describe_crowd
from realrl.runtime.prepare.job import make_job


def check_start(
    experiment: Experiment, cluster: Cluster, say: Callable[[str], None]
) -> tuple[Here, Plan | None]:
    """Check that this machine can run a cluster's ranks, and search for the plan if the recipe says `search`.

    Returns the devices of this machine and the plan that was found. `say` is called with the plan's origin. Raises
    UserError if this machine cannot run them.
    """
    check_local(cluster)
    here = ask_machine(experiment.device)
    check_kind(experiment, cluster, here)
    try_kernels(experiment.kernels)
    if experiment.plan != SEARCH:
        return here, None
    return here, search_for_plan(experiment, cluster, here, say)


def note_crowd(cluster: Cluster, here: Here, say: Callable[[str], None]) -> None:
    """Note more processes than cores. Raises UserError if memory is too small for the processes alone."""
    crowd = describe_crowd(cluster.size) if here == "cpu" else None
    if crowd is not None:
        say(f"note: {crowd}")


def check_training(experiment: Experiment, cluster: Cluster, say: Callable[[str], None]) -> Plan | None:
    """Check a recipe before any process starts, without reading data or weights. Raises UserError.

    For several processes, it also searches for the plan if the recipe says so, checks that the plan fits, and
    returns the plan that it found. A single process checks that later itself, because it may ask its GPU.
    """
    if experiment.plan != SEARCH:
        make_job(experiment, cluster)
    check_directories(experiment)
    if experiment.profile is not None:
        Profile.load(experiment.profile)
    if cluster.size == 1:
        return None
    here, plan = check_start(experiment, cluster, say)
    # The processes compile with the sizes of all models, too; presets may depend on them.
    check_fit(make_job(experiment, cluster, plan, download=True), here)
    note_crowd(cluster, here, say)
    return plan
