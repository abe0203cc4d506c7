"""Processes that srun starts, without torchrun. Does not import torch."""

import os
import re
from collections.abc import MutableMapping

from realrl.config.errors import UserError
from realrl.runtime.processes.environment import under_launcher
from realrl.runtime.processes.network import find_own_address

_TASKS = "SLURM_STEP_NUM_TASKS"
"""Variable that srun sets, but sbatch does not. A batch script is a single process, but has SLURM_NTASKS, too."""
_NUMBERS = ("SLURM_PROCID", _TASKS, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_PER_NODE, _NODES = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
_FIRST_PORT, _PORTS = 20000, 10000
_STRIDE = 997
"""Distance between the ports of two steps of a job. As a prime, it keeps steps of neighbouring jobs apart."""


def join_slurm_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """If srun has started several processes, set the variables that torchrun would set for this one.

    Under torchrun, nothing changes, even if srun has started torchrun. Values of MASTER_ADDR, MASTER_PORT and
    OMP_NUM_THREADS that the user has set stay. Raises UserError if the variables of Slurm contradict each other, or
    if the first node is unknown here.
    """
    if under_launcher(environment) or (
        _TASKS not in environment and environment.get("SLURM_PROCID", "0") == "0"
    ):
        return
    procid, tasks, localid, node, job, step = _read_numbers(environment)
    if tasks == 1:
        return
    per_node = _read_per_node(environment)
    here = per_node[node] if node < len(per_node) else 0
    if sum(per_node) != tasks or localid >= here:
        raise _contradiction(environment, (*_NUMBERS[:4], _PER_NODE))
    if procid != sum(per_node[:node]) + localid:
        raise UserError(
            f"{_list(environment, (*_NUMBERS[:4], _PER_NODE))}: the processes of a node are not numbered in a row;"
            " start them with srun --distribution=block"
        )
    first = "127.0.0.1" if len(per_node) == 1 else _find_first_host(environment)
    address = environment.get("MASTER_ADDR") or first
    if len(per_node) > 1:
        find_own_address(address)
    port = _FIRST_PORT + (job + _STRIDE * step) % _PORTS
    if environment.get("SLURM_CPUS_PER_TASK"):
        # srun binds each process to cores of its own, so they are not shared.
        environment.setdefault("OMP_NUM_THREADS", environment["SLURM_CPUS_PER_TASK"])
    found = {
        "RANK": str(procid),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(localid),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(per_node)),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }
    environment.update(found)


def _read_numbers(environment: MutableMapping[str, str]) -> list[int]:
    texts = [environment.get(name, "") for name in _NUMBERS]
    if not all(text.isascii() and text.isdecimal() for text in texts):
        raise _contradiction(environment, _NUMBERS)
    return [int(text) for text in texts]


def _read_per_node(environment: MutableMapping[str, str]) -> list[int]:
    """Read the number of processes of each node: `2(x3),1` stands for 2, 2, 2 and 1."""
    parts = environment.get(_PER_NODE, "").split(",")
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in parts]
    if not all(found):
        raise _contradiction(environment, (_PER_NODE,))
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def _find_first_host(environment: MutableMapping[str, str]) -> str:
    """Find the first host of a list such as `rack1n[03-05,9],login`: rack1n03."""
    found = re.match(r"(?:[^,\[\]\s]|\[\w[^\[\]]*\])+", environment.get(_NODES, ""))
    if not found:
        raise _contradiction(environment, (_NODES,))
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def _contradiction(environment: MutableMapping[str, str], names: tuple[str, ...]) -> UserError:
    return UserError(
        f"{_list(environment, names)}: srun does not set these so; start the command with srun, or unset {_TASKS}"
        " and SLURM_PROCID to train without it"
    )


def _list(environment: MutableMapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={environment.get(name, '')}" for name in names)
