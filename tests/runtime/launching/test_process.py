"""The cluster a recipe means, beside the processes that were started, and how those are scheduled and joined."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.runtime.processes import process
from realrl.runtime.processes.environment import ALLOCATOR_VARIABLES, STORE_VARIABLE, set_library_defaults
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


def test_variables_of_libraries_have_defaults_and_what_the_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("KINETO_LOG_LEVEL", "NCCL_LAUNCH_ORDER_IMPLICIT", *ALLOCATOR_VARIABLES)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    set_library_defaults()
    assert [os.environ.get(name) for name in names] == ["6", "1", "expandable_segments:True", None]
    monkeypatch.delenv(ALLOCATOR_VARIABLES[0])
    monkeypatch.setenv(ALLOCATOR_VARIABLES[1], "max_split_size_mb:64")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    set_library_defaults()
    assert [os.environ.get(name) for name in names] == ["6", "0", None, "max_split_size_mb:64"]


def test_gpus_are_joined_by_nccl_bound_to_the_device_with_cudnn_attention_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On stand-ins for torch's functions: no group is made, and no GPU is there."""
    joined: list[dict[str, object]] = []
    made: list[dict[str, object]] = []
    cudnn: list[bool] = []
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, STORE_VARIABLE: str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "use_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    monkeypatch.setattr(process, "Supervision", lambda rank, device: SimpleNamespace(activity=None))
    monkeypatch.setattr(process, "make_nccl_options", lambda: "options")
    monkeypatch.setattr(process, "set_timeout", lambda timeout: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: joined.append({"backend": backend, **given})
    )
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    found = process.connect("cuda")
    assert (found.rank, found.world, found.device) == (3, 4, torch.device("cuda", 1))
    (group,) = joined
    assert (group["backend"], group["device_id"], group["pg_options"]) == ("nccl", found.device, "options")
    assert [given["backend"] for given in made] == ["gloo"] and cudnn == [False]
