"""Ranks on a Ray cluster. On each node, an actor starts the ranks as `local.py` does on this machine.

Does not import torch.
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.launch import Start, StartRanks
from realrl.runtime.launcher.local import SCREEN, LocalRanks, RayNode
from realrl.runtime.supervision.failures import DEATH, RUN_STATUS, Failure
from realrl.runtime.supervision.heartbeat import Heartbeat

PLACING = 120.0
"""Seconds that nodes get to become free, and to start their actors."""
RETURNING = 600.0
"""Seconds that nodes get to become free after a restart of the run, because a node may be rebooting."""


@dataclass(frozen=True)
class Look:
    """State of the ranks on one node."""

    statuses: Sequence[int | None]
    heartbeats: Mapping[int, Heartbeat]
    screen: bytes = b""
    """Output of the first rank since the last look."""


class NodeActor:
    """Actor that starts and controls the ranks of one node. The launcher calls every method through Ray."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._read = 0

    def find_address(self) -> tuple[str, int]:
        """Find the address of this node, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def start(self, start: Start, restart: int, node: RayNode, directory: str, import_path: str) -> None:
        """Start the ranks of this node, with `directory` as working directory."""
        os.chdir(directory)
        # Ray has set another import path for this process.
        os.environ["PYTHONPATH"] = import_path
        self._ranks = LocalRanks(start, range(len(start.cluster.ranks(node.node))), restart, node)

    def look(self) -> Look:
        """Return the state of the ranks."""
        ranks = self.ranks
        screen, file = b"", ranks.path / SCREEN
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(self._read)
                screen = opened.read()
            self._read += len(screen)
        return Look(ranks.poll(), ranks.read_heartbeats(), screen)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the ranks by name."""
        return getattr(self.ranks, method)(*arguments)

    def close(self) -> None:
        """Kill the ranks, if there are any, and remove their files."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks.close()

    @property
    def ranks(self) -> LocalRanks:
        """The ranks, which must have been started."""
        assert self._ranks is not None, "start comes first"
        return self._ranks


class RayRanks:
    """Ranks of one start, on several nodes."""

    poll_seconds = 0.25

    def __init__(
        self, gpus: bool, job: str, timeout: float, start: Start, devices: Sequence[int], restart: int
    ) -> None:
        """Place an actor on each node, and start the ranks. Raises UserError if nodes do not become free.

        `job`: name of the run, which stays the same after restarts. `timeout`: a node counts as lost if it does not
        answer for this many seconds.
        """
        import ray

        self._cluster, self._gpus, self._timeout = start.cluster, gpus, timeout
        self._group: Any = None
        self._actors: list[Any] = []
        self._addresses: list[tuple[str, int]] = []
        self._looks = [
            Look([None] * len(self._cluster.ranks(node)), {}) for node in range(self._cluster.nodes)
        ]
        self._lost: dict[int, Failure] = {}
        """Failures of nodes that have stopped answering, by node."""
        self._line = b""
        """Beginning of the current, incomplete line of the first rank's output."""
        try:
            self._place(RETURNING if restart else PLACING)
            self._addresses = ray.get(
                [actor.find_address.remote() for actor in self._actors], timeout=PLACING
            )
            started = []
            for node, actor in enumerate(self._actors):
                own = RayNode(node, *self._addresses[0], job)
                started.append(actor.start.remote(start, restart, own, os.getcwd(), _list_import_path()))
            ray.get(started, timeout=PLACING)
        except ray.exceptions.RayError as error:
            # Treat a node that is lost now like one that is lost later: another start may succeed.
            text = f"actors could not be started: {_first_sentence(error)}"
            self._lost[0] = Failure(text, RUN_STATUS, 0, time.time())
        except BaseException:
            self.kill()
            raise

    def _place(self, seconds: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kinds = ("CPU", "GPU") if self._gpus else ("CPU",)
        sizes = [len(self._cluster.ranks(node)) for node in range(self._cluster.nodes)]
        self._group = placement_group(
            [dict.fromkeys(kinds, size) for size in sizes], strategy="STRICT_SPREAD"
        )
        if not self._group.wait(seconds):
            wanted = _describe_nodes(self._cluster, " and ".join(kinds))
            raise UserError(f"launch.by=ray: {wanted} have not become free within {seconds:.0f} seconds")
        actor = ray.remote(NodeActor)
        for node, size in enumerate(sizes):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            options = {"num_cpus": size, "num_gpus": size * self._gpus, "scheduling_strategy": where}
            self._actors.append(actor.options(**options).remote())

    def poll(self) -> list[int | None]:
        """Return the exit status of each rank, and show the output of the first rank.

        Ranks of a lost node count as failed.
        """
        import ray

        asked = [(node, self._actors[node].look.remote()) for node in self._find_nodes()]
        for node, look in asked:
            try:
                self._looks[node] = ray.get(look, timeout=self._timeout)
            except ray.exceptions.RayError as error:
                rank, address = self._cluster.ranks(node).start, self._addresses[node][0]
                text = f"the actor of rank {rank} on {address} has gone: {_first_sentence(error)}"
                self._lost[node] = Failure(text, RUN_STATUS, rank, time.time(), DEATH, device=True)
            else:
                self._show(self._looks[node].screen)
        return [
            RUN_STATUS if node in self._lost else status
            for node, look in enumerate(self._looks)
            for status in look.statuses
        ]

    def _find_nodes(self) -> list[int]:
        """List the nodes that still answer; none if their ranks have not been started."""
        return [node for node in range(len(self._addresses)) if node not in self._lost]

    def _show(self, output: bytes) -> None:
        """Show complete lines of the first rank's output.

        Error messages of the rank are left out, because the launcher prints the first cause of a failure.
        """
        *lines, self._line = (self._line + output).split(b"\n")
        for line in lines:
            if not line.startswith(b"realrl: "):
                sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of the last poll."""
        return {rank: heartbeat for look in self._looks for rank, heartbeat in look.heartbeats.items()}

    def read_failures(self) -> list[Failure]:
        """Return the failures that ranks have reported, and the failures of lost nodes."""
        found = list(self._lost.values())
        for node in self._find_nodes():
            found += self._call(node, "read_failures") or []
        return found

    def works(self, heartbeat: Heartbeat) -> bool:
        """Return whether a rank's process works; False if its node does not answer."""
        return bool(self._call(self._cluster.node(heartbeat.rank), "works", heartbeat))

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        """Send a signal to each of these ranks that still runs."""
        for node in self._find_nodes():
            here = self._cluster.ranks(node)
            own = [rank - here.start for rank in ranks if rank in here]
            self._actors[node].call.remote("signal", int(number), own)

    def kill(self) -> None:
        """Kill the ranks, and release the nodes."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for call in [actor.close.remote() for actor in self._actors]:
            try:
                ray.get(call, timeout=10)
            except ray.exceptions.RayError:
                continue  # The node is lost, and the processes with it.
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._addresses, self._group = [], [], None

    def keep_logs(self, directory: Path | None) -> Path | None:
        """Return the directory of the logs. Each rank has written its own log into the run directory."""
        return directory if directory is not None and directory.is_dir() else None

    def close(self) -> None:
        """Show the output that has not been shown yet."""
        self._show(b"\n" if self._line else b"")

    def _call(self, node: int, method: str, *arguments: Any) -> Any:
        """Call a method of a node's ranks, and return its result; None if the node does not answer."""
        import ray

        try:
            return ray.get(self._actors[node].call.remote(method, *arguments), timeout=self._timeout)
        except ray.exceptions.RayError:
            return None


def connect_to_ray(cluster: Cluster, *, gpus: bool | None, settings: LaunchConfig) -> StartRanks:
    """Connect to a Ray cluster, and return a function that starts ranks there.

    `gpus`: whether ranks compute on GPUs; None uses GPUs if the nodes have any. Raises UserError if Ray is not
    installed, if there is no Ray cluster, or if its nodes have too few devices.
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
            # The cluster may have another version of Ray or Python, or the address may be invalid.
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
    # The job keeps its name after restarts, so that ranks recognise the run as theirs.
    return partial(RayRanks, gpus, secrets.token_hex(8), settings.freeze_seconds)


def _list_import_path() -> str:
    """Return this process's PYTHONPATH with absolute paths, because the user's code may be there."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(str(Path(entry).absolute()) for entry in given if entry))


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0]


def _count_fitting(cluster: Cluster, kind: str) -> int:
    """Count the nodes of `cluster` for which the Ray cluster has a separate node with enough devices."""
    import ray

    have = sorted((node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]), reverse=True)
    need = sorted((devices for nodes, devices in cluster.runs for _ in range(nodes)), reverse=True)
    return sum(there >= devices for there, devices in zip(have, need, strict=False))


def _describe_nodes(cluster: Cluster, kind: str) -> str:
    """Describe the nodes of a cluster, for example `2 nodes with 8 GPUs each`."""
    return " and ".join(f"{nodes} nodes with {devices} {kind}s each" for nodes, devices in cluster.runs)
