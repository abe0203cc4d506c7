"""Check a recipe on this machine before its ranks start, and search for its plan. Does not import torch."""

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
    """Check that this machine can run the ranks of a cluster, and search for the plan if the recipe has `plan:
    search`.

    Returns the devices of this machine, and the plan or None. `say` is called with the origin of the plan.
    Raises UserError if this machine cannot run the ranks.
    """
    check_local(cluster)
    here = ask_machine(experiment.device)
    check_kind(experiment, cluster, here)
    try_kernels(experiment.kernels)
    if experiment.plan != SEARCH:
        return here, None
    return here, search_for_plan(experiment, cluster, here, say)


def note_crowd(cluster: Cluster, here: Here, say: Callable[[str], None]) -> None:
    """Call `say` if there are more processes than cores.

    Raises UserError if memory is too small even without models.
    """
    crowd = describe_crowd(cluster.size) if here == "cpu" else None
    if crowd is not None:
        say(f"note: {crowd}")


def check_training(experiment: Experiment, cluster: Cluster, say: Callable[[str], None]) -> Plan | None:
    """Check a recipe before any process starts, without reading data or weights. Raises UserError for a mistake.

    For several processes, this also checks that the plan fits. If the recipe has `plan: search`, this searches for
    the plan and returns it. A single process does both itself after its start, because it may use its GPU.
    """
    if experiment.plan != SEARCH:
        make_job(experiment, cluster)
    check_directories(experiment)
    if experiment.profile is not None:
        Profile.load(experiment.profile)
    if cluster.size == 1:
        return None
    here, plan = check_start(experiment, cluster, say)
    # Download the shapes of all models, because the ranks use them too, and presets may depend on them.
    check_fit(make_job(experiment, cluster, plan, download=True), here)
    note_crowd(cluster, here, say)
    return plan
