"""The process of one rank: its number, its device, and its process groups."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.model.group import Group
from realrl.plan.cluster import Cluster
from realrl.plan.communicators import RankSet, RankSets
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.prepare.cluster import written_cluster
from realrl.runtime.prepare.gpu import NO_GPU, Gpu
from realrl.runtime.prepare.host import count_threads
from realrl.runtime.processes.contention import BarrierWatch, watch_barriers
from realrl.runtime.processes.environment import STORE_VARIABLE, under_launcher
from realrl.runtime.processes.groups import (
    WAIT,
    RankPlace,
    make_gloo_groups,
    make_nccl_groups,
    make_nccl_options,
)
from realrl.runtime.processes.host_memory import steady_memory
from realrl.runtime.processes.logs import LOGS, move_log
from realrl.runtime.processes.messages import gather_values
from realrl.runtime.processes.network import find_node_place, limited_silence
from realrl.runtime.processes.rank_supervision import Supervision
from realrl.runtime.processes.rendezvous import TIMEOUT, meet_ranks
from realrl.runtime.supervision.heartbeat import Activity

Device = Literal["auto", "cpu", "cuda"]


@dataclass
class Process:
    """The process of one rank.

    `control` carries small CPU tensors between any two ranks; None if there is only one rank.
    """

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    activity: Activity = field(default_factory=Activity)
    """What this rank is doing, for watchdogs."""
    supervision: Supervision | None = None
    """Threads that publish this activity; None in tests."""
    barriers: BarrierWatch | None = None
    """Chooses how OpenMP threads wait for each other; None if `watch_barriers` returns None."""

    def publish(self, run_dir: Path) -> None:
        """From now on, keep this rank's log and status in the run's directory."""
        if self.supervision is not None:
            move_log(self.rank, run_dir / LOGS)
            self.supervision.publish(run_dir)

    @property
    def gpu(self) -> Gpu | None:
        """GPU of this rank; None if it computes on a CPU."""
        if self.device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(self.device)
        return Gpu(properties.name, properties.total_memory)

    def groups(self, rank_sets: RankSets, *, moves: bool = False) -> dict[RankSet, Group]:
        """Create the groups in `rank_sets` that contain this rank.

        `moves`: whether parameters are reallocated between ranks.

        All ranks call this together, with the same sets in the same order, before weights take memory.
        """
        if self.world == 1:
            return {}
        node = find_node_place().ranks
        place = RankPlace(rank=self.rank, world=self.world, node=node, device=self.device)
        with limited_silence():
            if self.device.type == "cuda":
                return make_nccl_groups(place, rank_sets, with_node_pairs=moves)
            return make_gloo_groups(place, rank_sets)

    def make_control_group(self) -> dist.ProcessGroup | None:
        """Create another group of all ranks for small CPU tensors, for use in one thread; None if there is only one
        rank.

        All ranks call this together.
        """
        if self.control is None:
            return None
        with limited_silence():
            return dist.new_group(backend="gloo", timeout=WAIT)

    def gather(self, value: Any) -> list[Any]:
        """All-gather one plain value or record per rank.

        Returns the values in the order of ranks, on every rank.
        """
        if self.control is None:
            return [value]
        return gather_values(value, self.control)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Share errors of the block: a UserError or RunError of one rank is raised on all ranks.

        Otherwise, ranks would wait for a rank that has ended.
        """
        mine: UserError | RunError | None = None
        try:
            yield
        except (UserError, RunError) as error:
            mine = error
        everyone = self.gather(mine)
        first = next((rank for rank, error in enumerate(everyone) if error is not None), None)
        if first is not None:
            # This rank's own error has a traceback, which is not sent.
            raise mine if first == self.rank and mine is not None else everyone[first]

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, *_: object) -> None:
        """Leave the process group.

        Ranks wait for each other if they end without an error, or by a UserError that all of them raise. Messages
        would be lost if their sender exited too early. After any other failure, a rank leaves at once, because
        other ranks may be gone.
        """
        alone = isinstance(error, UserCodeError) and error.alone
        if self.barriers is not None:
            self.barriers.close()
        if self.supervision is not None:
            self.supervision.leave(error)
        try:
            if self.control is None or alone or (kind and not issubclass(kind, UserError)):
                return
            if kind is None:
                dist.barrier(group=self.control)
            else:
                # Wait only briefly, because this rank may be the only one that has found the mistake.
                with suppress(RuntimeError):
                    dist.monitored_barrier(group=self.control, timeout=timedelta(seconds=5))
        finally:
            # Close only when all ranks are here: a rank may still write files, fail, and keep other ranks waiting.
            if self.supervision is not None:
                self.supervision.close()
        # Without this, threads of the group would abort the interpreter while it shuts down.
        dist.destroy_process_group()


def use_cuda(device: Device) -> bool:
    """Return whether ranks compute on GPUs. Raises UserError if GPUs are requested but there are none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(NO_GPU)
    return device != "cpu" and torch.cuda.is_available()


def open_device(number: int) -> torch.device:
    """Let this process compute on a GPU of this machine."""
    place = torch.device("cuda", number)
    torch.cuda.set_device(place)
    # cuDNN builds a plan for every shape, and computes wrong results on some devices for few key heads
    # (pytorch#193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return place


def resolve_cluster(text: str, device: Device) -> Cluster:
    """Return the cluster for `text`, the setting `cluster`. Raises UserError if it contradicts the launcher."""
    cluster = written_cluster(text)
    if not under_launcher():
        return cluster or Cluster(1, torch.cuda.device_count() if use_cuda(device) else 1)
    return find_node_place().match(cluster)


def connect(device: Device, launch: LaunchConfig | None = None) -> Process:
    """Join the process group, or be the only rank. Raises UserError if there are fewer GPUs than ranks here.

    `launch` has the limits for ranks that watch each other under torchrun.
    """
    steady_memory()
    cuda = use_cuda(device)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if cuda and here > gpus:
        raise UserError(
            f"{here} processes cannot share the {gpus} GPUs here; make the cluster smaller or set device=cpu; with"
            " srun, request GPUs by --gpus-per-node, because each process must see all GPUs of its node"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = open_device(local_rank) if cuda else torch.device("cpu")
    world = int(os.environ.get("WORLD_SIZE", 1)) if under_launcher() else 1
    rank = int(os.environ.get("RANK", 0)) if world > 1 else 0
    supervision = Supervision(rank, place)
    barriers = None
    if not cuda:
        # torch also counts cores that the quota of a container may withhold.
        torch.set_num_threads(min(torch.get_num_threads(), count_threads(here)))
        barriers = watch_barriers(torch.get_num_threads())
    process = Process(
        rank, world, place, activity=supervision.activity, supervision=supervision, barriers=barriers
    )
    if world == 1:
        return process
    if not cuda:
        wait_to_be_scheduled()
    store = os.environ.get(STORE_VARIABLE)
    with limited_silence():
        _join(store, rank, world, place)
        process.control = dist.new_group(backend="gloo", timeout=WAIT)
        if store is None:
            supervision.join_peers(world, process.gather(secrets.token_hex(8))[0], launch or LaunchConfig())
            dist.barrier(group=process.control)
            supervision.watch_peers()
    # Until now, the group of all ranks had the shorter limit of the rendezvous.
    set_timeout(WAIT)
    return process


def _join(store: str | None, rank: int, world: int, place: torch.device) -> None:
    """Join the default group of all ranks, with gloo between CPUs and NCCL between GPUs.

    NCCL's group is bound to this rank's device. Its communicator is therefore created at once, and other
    communicators can be split from it.
    """
    cuda = place.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(store, world) if store else meet_ranks(rank, world),
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=place if cuda else None,
        pg_options=make_nccl_options() if cuda else None,
    )


def wait_to_be_scheduled() -> None:
    """Prevent threads of this process from interrupting each other when they wake up, including threads that start
    later.

    An answer of a peer wakes gloo's receiving thread while another thread still holds the lock of the connection on
    which it sends. If the receiving thread takes the core of the other thread, the receiving thread tries the lock
    again and again until its time slice is over. This costs some milliseconds for every few messages.
    Tensor-parallel decoding on as many cores as ranks took twice as long.
    """
    if sys.platform == "linux":
        # Sandboxes may forbid this; the run is then slower.
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
