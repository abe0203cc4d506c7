"""Agreement of ranks before they compile a recipe: the smallest device, and a searched plan."""

import os
from collections.abc import Callable

from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.runtime.prepare.devices import search_spec
from realrl.runtime.prepare.functions import check_functions
from realrl.runtime.prepare.gpu import Gpu, Here
from realrl.runtime.prepare.search.cached_plan import cached_plan
from realrl.runtime.processes.environment import PLAN_VARIABLE
from realrl.runtime.processes.process import Process


def find_least_device(process: Process) -> Here:
    """Find the GPU with the least memory of all ranks, or that they compute on CPUs."""
    gpus: list[Gpu] = [gpu for gpu in process.gather(process.gpu) if gpu is not None]
    if not gpus:
        return "cpu"
    return min(gpus, key=lambda gpu: gpu.memory_bytes)


def agree_on_plan(
    experiment: Experiment, cluster: Cluster, process: Process, here: Here, say: Callable[[str], None]
) -> Plan:
    """Agree on the plan of a recipe that says `plan: search`.

    It is the one that the local launcher has found, or that the writer finds now, with `say` for its messages.
    UserError, on all ranks, where there is none.
    """
    file = os.environ.get(PLAN_VARIABLE)
    if file is not None:
        return Plan.load(file, build_graph(experiment))
    plan: Plan | None = None
    with process.together():
        if process.rank == WRITER:
            check_functions(experiment)
            plan = cached_plan(experiment, search_spec(experiment, cluster, here), say)
    # A search that is cut short by time may find another plan elsewhere, so that nobody else searches.
    agreed: Plan = process.gather(plan)[WRITER]
    return agreed
