"""Launcher on a Ray cluster: an actor for each rank, placed as the plan numbers nodes and devices. No torch."""

import os
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.local_ranks import MOMENT, RanksEnd, Start, describe_death
from realrl.runtime.launcher.rank_process import ActorPlace, Look, RankProcess, list_import_path
from realrl.runtime.launcher.termination import Termination
from realrl.runtime.monitor.sign import Sign
from realrl.runtime.processes.environment import RESTART_VARIABLE
from realrl.runtime.processes.error_reports import DEATH, Failure, find_first_cause

POLL = 0.25
"""Seconds between looks at all ranks."""
PLACING = 120.0
"""Seconds for the nodes to become free, and for actors to start there."""
RETURNING = 600.0
"""Seconds for nodes to become free where the run has had them before: one may be starting again."""


class RayCluster:
    """Connection to a Ray cluster, in which a run is started as often as it takes."""

    def __init__(self, cluster: Cluster, *, gpus: bool | None, settings: LaunchConfig) -> None:
        """Connect. `gpus` tells whether ranks compute on GPUs, None for where there are any.

        UserError where there is no Ray, no cluster, or one without such nodes.
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
                # Another version of Ray or Python, or an address that is none.
                raise UserError(f"launch.by=ray: {' '.join(str(error).split())}") from None
        self._cluster, self._settings = cluster, settings
        self._gpus = gpus if gpus is not None else _count_fitting(Cluster(1, 1), "GPU") > 0
        # The same after restarts, so that ranks know the run for their own.
        self._job = secrets.token_hex(8)
        self._check_size()

    def run(self, start: Start, restart: int) -> RanksEnd:
        """Run all ranks once; tell how they ended. None of them is left."""
        import ray

        ranks = RayRanks(self._cluster, self._gpus, self._settings)
        try:
            ranks.start(start.arguments, self._job, restart)
            return ranks.wait()
        except ray.exceptions.RayError as error:
            # A node that goes while ranks are started there is no other failure than one that goes later.
            return RanksEnd(
                Failure(f"actors could not be started: {_first_sentence(error)}", 1, 0, time.time())
            )
        finally:
            ranks.close()

    def _check_size(self) -> None:
        kind = "GPU" if self._gpus else "CPU"
        found = _count_fitting(self._cluster, kind)
        if found < self._cluster.nodes:
            import ray

            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            have = ", ".join(str(int(resources.get(kind, 0))) for resources in nodes)
            raise UserError(
                f"cluster={self._cluster} needs {_describe_nodes(self._cluster, kind)};"
                f" the nodes of the Ray cluster have {have}"
            )


class RayRanks:
    """Actors of one start of a run, one for each rank."""

    def __init__(self, cluster: Cluster, gpus: bool, settings: LaunchConfig) -> None:
        self._cluster, self._gpus, self._settings = cluster, gpus, settings
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[ActorPlace] = []
        self._looks: list[Look] = []
        self._held = b""
        """Start of a line on the first rank's screen."""
        self._termination = Termination(settings.grace_seconds, self._signal)

    def start(self, arguments: Sequence[str], job: str, restart: int) -> None:
        """Place the actors, and have each start its rank. UserError where nodes do not become free."""
        self._place(RETURNING if restart else PLACING)
        gpus: defaultdict[str, list[str]] = defaultdict(list)
        for place in self._places:
            gpus[place.node] += place.gpus
        first, cluster = self._places[0], self._cluster
        started = []
        for rank, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            ranks = cluster.ranks(node := cluster.node(rank))
            variables = {
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
                # Ray shows an actor its own GPU alone; ranks of a node share their memory, and so see all of them.
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[place.node])} if self._gpus else {}),
            }
            started.append(actor.start.remote(rank, arguments, variables, os.getcwd(), list_import_path()))
        _get(started)

    def _place(self, seconds: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kinds = ("CPU", "GPU") if self._gpus else ("CPU",)
        sizes = [len(self._cluster.ranks(node)) for node in range(self._cluster.nodes)]
        # One bundle is always on one node.
        bundles = [dict.fromkeys(kinds, size) for size in sizes]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(seconds):
            wanted = _describe_nodes(self._cluster, " and ".join(kinds))
            raise UserError(f"launch.by=ray: {wanted} have not become free within {seconds:.0f} seconds")
        actor = ray.remote(RankProcess)
        for rank in range(self._cluster.size):
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._cluster.node(rank)
            )
            own = actor.options(num_cpus=1, num_gpus=int(self._gpus), scheduling_strategy=where)
            self._actors.append(own.remote())
        self._places = _get([actor.place.remote() for actor in self._actors])

    def wait(self) -> RanksEnd:
        """Wait for all ranks, and show the first one's output. Once one fails, others get a moment to say why."""
        failed: dict[int, float] = {}
        gone: dict[int, Failure] = {}
        first = 0.0
        while True:
            self._look(gone)
            now = time.monotonic()
            for rank, look in enumerate(self._looks):
                if look.status or rank in gone:
                    first = first or now
                    failed.setdefault(rank, time.time())
            running = [r for r, look in enumerate(self._looks) if look.status is None and r not in gone]
            patience = MOMENT if not self._termination.asked else self._settings.grace_seconds
            if not running or (failed and now - first > patience):
                break
            self._termination.forward(now)
            time.sleep(POLL)
        self._show(b"\n" if self._held else b"")
        outcome = RanksEnd(signs=self._read_signs())
        if failed:
            outcome.cause = self._find_cause(failed, gone)
        return outcome

    def close(self) -> None:
        """End all ranks and give the nodes back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for call in [actor.close.remote() for actor in self._actors]:
            try:
                ray.get(call, timeout=10)
            except ray.exceptions.RayError:
                continue  # its node has gone, and the process with it
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def _look(self, gone: dict[int, Failure]) -> None:
        import ray

        calls = [actor.look.remote() for actor in self._actors]
        previous = self._looks or [Look(None, b"", None)] * len(calls)
        self._looks = []
        for rank, call in enumerate(calls):
            look = previous[rank]
            try:
                look = ray.get(call, timeout=self._settings.freeze_seconds)
            except ray.exceptions.RayError as error:
                where = self._places[rank].address
                message = f"the actor of rank {rank} on {where} has gone: {_first_sentence(error)}"
                gone.setdefault(rank, Failure(message, 1, rank, time.time(), distance=DEATH, device=True))
            self._looks.append(look)
        self._show(self._looks[0].screen if 0 not in gone else b"")

    def _show(self, output: bytes) -> None:
        """Show whole lines of the first rank, but for its own error message: the first cause is told at the end."""
        *lines, self._held = (self._held + output).split(b"\n")
        for line in lines:
            if not line.startswith(b"realrl: "):
                sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()

    def _signal(self, number: signal.Signals) -> None:
        for actor in self._actors:
            actor.signal.remote(int(number))

    def _read_signs(self) -> dict[int, Sign]:
        return {r: Sign.from_json(look.sign) for r, look in enumerate(self._looks) if look.sign is not None}

    def _read_failure(self, rank: int) -> dict[str, Any] | None:
        """Read what a rank has left about its failure; None for nothing, or where its actor has gone, too."""
        import ray

        try:
            found: dict[str, Any] | None = ray.get(self._actors[rank].failure.remote(), timeout=PLACING)
        except ray.exceptions.RayError:
            return None
        return found

    def _find_cause(self, failed: dict[int, float], gone: dict[int, Failure]) -> Failure:
        failures, signs = dict(gone), self._read_signs()
        for rank, noticed in failed.items():
            if rank in gone:
                continue
            left = self._read_failure(rank)
            status = self._looks[rank].status or 1
            failures[rank] = (
                Failure(**left)
                if left is not None
                else describe_death(rank, status, noticed, signs.get(rank))
            )
        return find_first_cause(failures.values())


def _get(calls: Sequence[Any]) -> list[Any]:
    """Wait for answers of actors; RayError where they do not come."""
    import ray

    found: list[Any] = ray.get(list(calls), timeout=PLACING)
    return found


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0]


def _count_fitting(cluster: Cluster, kind: str) -> int:
    """Count nodes of `cluster` for which the Ray cluster has one with as many devices, each for one."""
    import ray

    have = sorted((node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]), reverse=True)
    need = sorted((devices for nodes, devices in cluster.runs for _ in range(nodes)), reverse=True)
    return sum(there >= devices for there, devices in zip(have, need, strict=False))


def _describe_nodes(cluster: Cluster, kind: str) -> str:
    """Write the nodes of a cluster: `2 nodes with 8 GPUs each`."""
    return " and ".join(f"{nodes} nodes with {devices} {kind}s each" for nodes, devices in cluster.runs)
