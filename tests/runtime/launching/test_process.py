"""The cluster a recipe means, beside the processes that were started, and how those are scheduled."""

import os
import sys

import pytest

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.runtime.processes.process import resolve_cluster, wait_to_be_scheduled


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells a process on two nodes of four devices."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("text", ["auto", "2x4"])
def test_the_cluster_defaults_to_the_started_processes(text: str) -> None:
    assert resolve_cluster(text, "cpu") == Cluster(2, 4)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("text", ["1x8", "4x2", "2x2"])
def test_the_cluster_must_match_the_started_nodes_and_devices(text: str) -> None:
    with pytest.raises(UserError, match=f"cluster={text}, but 4 processes were started on each of 2 nodes"):
        resolve_cluster(text, "cpu")


def test_a_sandbox_may_forbid_another_way_of_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def forbid(*arguments: object) -> None:
        asked.append(arguments)
        raise PermissionError

    monkeypatch.setattr("os.sched_setscheduler", forbid, raising=False)
    monkeypatch.setattr("os.sched_getscheduler", lambda _: getattr(os, "SCHED_OTHER", 0), raising=False)
    wait_to_be_scheduled()
    assert bool(asked) == (sys.platform == "linux")
