"""Ranks on a Ray cluster: an actor for each rank, placed as the plan numbers nodes and devices. No torch."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.recipe.sections.launch import LaunchConfig
from realrl.runtime.launcher.launch import Start, StartRanks
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, RESTART_VARIABLE, SCRATCH_VARIABLE
from realrl.runtime.processes.logs import name_log_file
from realrl.runtime.supervision.board import FileBoard
from realrl.runtime.supervision.failures import DEATH, ERROR_FILE_VARIABLE, RUN_STATUS, Failure
from realrl.runtime.supervision.heartbeat import Heartbeat
from realrl.runtime.supervision.orphans import Scratch, kill_ranks

PLACING = 120.0
"""Seconds for the nodes to become free, and for actors to start there."""
RETURNING = 600.0
"""Seconds for nodes to become free that the run has had before: one may be rebooting."""
_SCREEN = "screen"


@dataclass(frozen=True)
class ActorPlace:
    """Place of an actor: a node of the Ray cluster, its address and a free port of it, and its own GPUs."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """State of a rank's process, as its actor sees it."""

    status: int | None = None
    """Exit status, minus N if signal N ended it; None while it runs."""
    screen: bytes = b""
    """Output since the last look; only of the first rank."""
    heartbeat: Heartbeat | None = None


class RankActor:
    """Holder of a rank's process on its node. Every method is called from the launcher, through Ray."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._board = FileBoard(self._scratch.path)
        self._process: subprocess.Popen[bytes] | None = None
        self._rank = self._read = 0

    def place(self) -> ActorPlace:
        """Tell where this is."""
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(context.get_node_id(), str(ray.util.get_node_ip_address()), port, gpus)

    def start(
        self, rank: int, arguments: Sequence[str], variables: Mapping[str, str], directory: str
    ) -> None:
        """Start `realrl ARGUMENTS` as a rank, with more environment variables, in a directory."""
        self._rank, scratch = rank, self._scratch.path
        environment = {
            **os.environ,
            SCRATCH_VARIABLE: str(scratch),
            ERROR_FILE_VARIABLE: str(scratch / f"failure-{rank}.json"),
            LAUNCHER_VARIABLE: str(os.getpid()),
            **variables,
        }
        file = scratch / _SCREEN if rank == 0 else name_log_file(scratch, rank)
        with file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "realrl", *arguments],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def look(self) -> Look:
        """Look at the process."""
        status = None if self._process is None else self._process.poll()
        screen, file = b"", self._scratch.path / _SCREEN
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(self._read)
                screen = opened.read()
            self._read += len(screen)
        return Look(status, screen, self._board.read_heartbeats().get(self._rank))

    def read_failures(self) -> list[Failure]:
        """Read the failure that the rank has reported, if it has."""
        return self._board.read_failures()

    def works(self, heartbeat: Heartbeat) -> bool:
        """Check whether the process works."""
        return self._board.works(heartbeat)

    def signal(self, number: int) -> None:
        """Signal the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process and what it has started, and remove its files."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        kill_ranks(self._scratch.path)
        self._scratch.close()


class RayRanks:
    """Ranks of one start, each held by an actor, which reads the rank's board there."""

    poll_seconds = 0.25

    def __init__(
        self, gpus: bool, job: str, timeout: float, start: Start, devices: Sequence[int], restart: int
    ) -> None:
        """Place actors and start the ranks. UserError if nodes do not become free.

        `job`: names the run, also after a restart. `timeout`: seconds after which a silent node counts as gone.
        """
        import ray

        self._cluster, self._gpus, self._timeout = start.cluster, gpus, timeout
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[ActorPlace] = []
        self._looks = [Look()] * start.cluster.size
        self._gone: dict[int, Failure] = {}
        self._line = b""
        """Beginning of a line of the first rank's output."""
        try:
            self._place(RETURNING if restart else PLACING)
            self._start(start.arguments, job, restart)
        except ray.exceptions.RayError as error:
            # If a node is lost now, that is as if it were lost later: another start may succeed.
            text = f"actors could not be started: {_first_sentence(error)}"
            self._gone[0] = Failure(text, RUN_STATUS, 0, time.time())
        except BaseException:
            self.kill()
            raise

    def _place(self, seconds: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kinds = ("CPU", "GPU") if self._gpus else ("CPU",)
        sizes = [len(self._cluster.ranks(node)) for node in range(self._cluster.nodes)]
        # A bundle is always on one node.
        self._group = placement_group(
            [dict.fromkeys(kinds, size) for size in sizes], strategy="STRICT_SPREAD"
        )
        if not self._group.wait(seconds):
            wanted = _describe_nodes(self._cluster, " and ".join(kinds))
            raise UserError(f"launch.by=ray: {wanted} have not become free within {seconds:.0f} seconds")
        actor = ray.remote(RankActor)
        for rank in range(self._cluster.size):
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._cluster.node(rank)
            )
            own = actor.options(num_cpus=1, num_gpus=int(self._gpus), scheduling_strategy=where)
            self._actors.append(own.remote())
        self._places = ray.get([actor.place.remote() for actor in self._actors], timeout=PLACING)

    def _start(self, arguments: Sequence[str], job: str, restart: int) -> None:
        import ray

        gpus: defaultdict[str, list[str]] = defaultdict(list)
        for place in self._places:
            gpus[place.node] += place.gpus
        first, cluster = self._places[0], self._cluster
        started = []
        for rank, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            ranks = cluster.ranks(node := cluster.node(rank))
            variables = {
                "PYTHONPATH": _list_import_path(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - ranks.start),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(cluster.nodes),
                "WORLD_SIZE": str(cluster.size),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.port),
                "TORCHELASTIC_RUN_ID": job,
                RESTART_VARIABLE: str(restart),
                # Ray shows an actor only its own GPU. Ranks of a node share memory, so they must see all of them.
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[place.node])} if self._gpus else {}),
            }
            started.append(actor.start.remote(rank, arguments, variables, os.getcwd()))
        ray.get(started, timeout=PLACING)

    def poll(self) -> list[int | None]:
        """Find the exit status of each rank, and show the output of the first. A rank without actor has failed."""
        import ray

        if self._places:
            left = [rank for rank in range(len(self._looks)) if rank not in self._gone]
            for rank, call in [(rank, self._actors[rank].look.remote()) for rank in left]:
                try:
                    self._looks[rank] = ray.get(call, timeout=self._timeout)
                except ray.exceptions.RayError as error:
                    where = self._places[rank].address
                    message = f"the actor of rank {rank} on {where} has gone: {_first_sentence(error)}"
                    self._gone[rank] = Failure(message, RUN_STATUS, rank, time.time(), DEATH, device=True)
            self._show(self._looks[0].screen if 0 not in self._gone else b"")
        return [RUN_STATUS if rank in self._gone else look.status for rank, look in enumerate(self._looks)]

    def _show(self, output: bytes) -> None:
        """Show whole lines, but not the first rank's own error message: the launcher prints the first cause."""
        *lines, self._line = (self._line + output).split(b"\n")
        for line in lines:
            if not line.startswith(b"realrl: "):
                sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Read the heartbeats of the last poll."""
        return {rank: look.heartbeat for rank, look in enumerate(self._looks) if look.heartbeat is not None}

    def read_failures(self) -> list[Failure]:
        """Read the failures that ranks have reported, and those of lost actors."""
        found = list(self._gone.values())
        for rank in range(len(self._places)):
            found += [] if rank in self._gone else self._ask(rank, "read_failures") or []
        return found

    def works(self, heartbeat: Heartbeat) -> bool:
        """Check whether a rank's process works; False if its actor does not answer."""
        return bool(self._ask(heartbeat.rank, "works", heartbeat))

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        """Signal these ranks, if they still run."""
        for rank in ranks:
            self._actors[rank].signal.remote(int(number))

    def kill(self) -> None:
        """Kill the ranks, and give the nodes back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for call in [actor.close.remote() for actor in self._actors]:
            try:
                ray.get(call, timeout=10)
            except ray.exceptions.RayError:
                continue  # Its node is lost, and the process with it.
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._group = [], None

    def keep_logs(self, directory: Path | None) -> Path | None:
        """Find the logs: each rank has written its own into the run directory."""
        return directory if directory is not None and directory.is_dir() else None

    def close(self) -> None:
        """Show what is left of the output."""
        self._show(b"\n" if self._line else b"")

    def _ask(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of an actor; None if it does not answer."""
        import ray

        try:
            return ray.get(getattr(self._actors[rank], method).remote(*arguments), timeout=self._timeout)
        except ray.exceptions.RayError:
            return None


def connect_to_ray(cluster: Cluster, *, gpus: bool | None, settings: LaunchConfig) -> StartRanks:
    """Connect to a Ray cluster; return what starts ranks there.

    `gpus`: whether ranks compute on GPUs; None if they do when the nodes have some. UserError without Ray, without
    a Ray cluster, or if that has no such nodes.
    """
    if find_spec("ray") is None:
        raise UserError("launch.by=ray needs Ray, which is not installed: pip install 'realrl[ray]'")
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except ConnectionError:
            raise UserError(
                "launch.by=ray: no Ray cluster is running here; start one with `ray start --head`, or name its"
                " address in RAY_ADDRESS"
            ) from None
        except (RuntimeError, ValueError) as error:
            # The cluster has another version of Ray or Python, or the address is not valid.
            raise UserError(f"launch.by=ray: {' '.join(str(error).split())}") from None
    if gpus is None:
        gpus = _count_fitting(Cluster(1, 1), "GPU") > 0
    kind = "GPU" if gpus else "CPU"
    if _count_fitting(cluster, kind) < cluster.nodes:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        have = ", ".join(str(int(resources.get(kind, 0))) for resources in nodes)
        raise UserError(
            f"cluster={cluster} needs {_describe_nodes(cluster, kind)}; the nodes of the Ray cluster have {have}"
        )
    # The job keeps its name after restarts, so that ranks know that the run is theirs.
    return partial(RayRanks, gpus, secrets.token_hex(8), settings.freeze_seconds)


def _list_import_path() -> str:
    """List where this process imports from, as a value of PYTHONPATH: the user's code may be there."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(str(Path(entry).absolute()) for entry in given if entry))


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0]


def _count_fitting(cluster: Cluster, kind: str) -> int:
    """Count nodes of `cluster` for which the Ray cluster has a node of its own with as many devices."""
    import ray

    have = sorted((node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]), reverse=True)
    need = sorted((devices for nodes, devices in cluster.runs for _ in range(nodes)), reverse=True)
    return sum(there >= devices for there, devices in zip(have, need, strict=False))


def _describe_nodes(cluster: Cluster, kind: str) -> str:
    """Write the nodes of a cluster: `2 nodes with 8 GPUs each`."""
    return " and ".join(f"{nodes} nodes with {devices} {kind}s each" for nodes, devices in cluster.runs)
