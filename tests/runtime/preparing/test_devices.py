"""Devices of a run: how many, of which kind, and with how much memory."""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.devices import DEVICES, find_gpu_kind
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.cluster import written_cluster
from realrl.runtime.prepare.devices import check_kind, memory_spec, spec_of
from realrl.runtime.prepare.gpu import Gpu
from realrl.runtime.prepare.host import host_memory
from tests.conftest import World


@pytest.mark.parametrize(
    ("files", "own", "found"),
    [
        ({}, "", 8192),
        ({"memory.max": "max"}, "0::/\n", 8192),
        ({"memory.max": "5000"}, "0::/\n", 5000),
        ({"a/b/memory.max": "max", "a/memory.max": "3000", "memory.max": "9000"}, "0::/a/b\n", 3000),
        ({"memory/x/memory.limit_in_bytes": "700"}, "5:cpu:/x\n4:cpuset,memory:/x\n0::/\n", 700),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/elsewhere\n", 8192),
    ],
)
def test_containers_may_use_what_their_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str, found: int
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2}.__getitem__)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert host_memory(tmp_path, tmp_path / "own") == found


@pytest.mark.parametrize(
    ("device", "cluster", "here", "mistake"),
    [
        ("auto", "1x2", "cpu", None),
        ("auto", "cpu:1x2", "cpu", None),
        ("auto", "h100:1x2", Gpu("Voodoo 2", 5 << 30), None),
        (
            "auto",
            "h100:1x2",
            "cpu",
            "cluster=h100:1x2 names h100, but this run computes on CPUs; set cluster=1x2",
        ),
        (
            "auto",
            "cpu:1x2",
            Gpu("Voodoo 2", 5 << 30),
            "names cpu, but this run computes on Voodoo 2; set cluster=1x2",
        ),
        ("cuda", "1x2", "cpu", "device=cuda, but torch finds no GPU here; use device=cpu"),
    ],
)
def test_a_run_on_other_devices_than_it_names_is_refused(
    world: World, tmp_path: Path, device: str, cluster: str, here: Gpu | Literal["cpu"], mistake: str | None
) -> None:
    experiment = load_experiment(str(world.recipe("sft", tmp_path, cluster=cluster, device=device)))
    with nullcontext() if mistake is None else pytest.raises(UserError, match=mistake):
        check_kind(experiment, Cluster(1, 2), here)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("h100:1x2", ["h100"]), ("a100-80g:1x2+h100:1x2", ["a100-80g", "h100"]), ("1x2", None)],
)
def test_a_recipe_may_name_the_kind_of_device(
    world: World, tmp_path: Path, text: str, kinds: list[str] | None
) -> None:
    experiment = load_experiment(str(world.recipe("sft", tmp_path, cluster=text, device="auto")))
    cluster = written_cluster(text)
    assert cluster is not None and cluster.even and cluster.largest_node == 2
    spec = spec_of(experiment, cluster)
    assert (spec and [group.device.name for group in spec.groups]) == kinds


@pytest.mark.parametrize(
    ("device", "device_memory", "here", "kind", "size"),
    [
        ("auto", None, Gpu("NVIDIA H100 80GB HBM3", 5 << 30), "h100", 5 << 30),
        ("auto", "3GiB", Gpu("NVIDIA H100 80GB HBM3", 5 << 30), "h100", 3 << 30),
        ("auto", None, Gpu("Voodoo 2", 5 << 30), "gpu", 5 << 30),
        ("auto", "3GiB", None, "gpu", 3 << 30),
        ("cpu", "3GiB", None, "cpu", 3 << 30),
        ("auto", "3GiB", "cpu", "cpu", 3 << 30),
        ("auto", None, "cpu", "cpu", 7 << 30),
    ],
)
def test_memory_is_that_of_the_recipe_else_of_the_machine(
    world: World,
    tmp_path: Path,
    device: str,
    device_memory: str | None,
    here: Gpu | None,
    kind: str,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.devices.host_memory", lambda: 7 << 30)
    recipe = world.recipe("sft", tmp_path, device=device, device_memory=device_memory)
    spec = memory_spec(load_experiment(str(recipe)), Cluster(1, 1), here)
    assert (spec.device(0).name, spec.device(0).memory_bytes) == (kind, size)


@pytest.mark.parametrize(
    ("cluster", "here", "size"),
    [
        ("h100:1x2", None, DEVICES["h100"].memory_bytes),
        ("h100:1x2", Gpu("NVIDIA H100 80GB HBM3", 5 << 30), 5 << 30),
        ("h100:1x2", Gpu("NVIDIA GeForce RTX 4090", 5 << 30), DEVICES["h100"].memory_bytes),
        ("h100:1x2", Gpu("Voodoo 2", 5 << 30), 5 << 30),
        ("h100:1x2", "cpu", DEVICES["h100"].memory_bytes),
        ("cpu:1x2", "cpu", 3 << 30),
        ("cpu:1x2", Gpu("Voodoo 2", 5 << 30), DEVICES["cpu"].memory_bytes),
    ],
)
def test_a_named_kind_has_the_memory_of_devices_here_only_if_they_may_be_of_it(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
    here: Gpu | Literal["cpu"] | None,
    size: int,
) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.devices.host_memory", lambda: 6 << 30)
    experiment = load_experiment(str(world.recipe("sft", tmp_path, cluster=cluster, device="auto")))
    spec = spec_of(experiment, Cluster(1, 2), here)
    assert spec is not None and spec.device(1).memory_bytes == size


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_gpus_are_recognised_by_their_name(name: str, kind: str | None) -> None:
    assert find_gpu_kind(name) == (DEVICES[kind] if kind else None)
