"""Checks of a machine find the faults that are put into it, and leave a sound one alone."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.config.hardware import find_missing_build_tool
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.runtime.doctor import machine
from realrl.runtime.doctor.examine import check_torch, count_checkpoint_bytes, find_subject
from realrl.runtime.doctor.links import Link, Measured, judge_links
from realrl.runtime.doctor.machine import (
    Finding,
    Status,
    check_disk,
    check_gpus,
    check_limits,
    check_versions,
    compare_nodes,
    describe_node,
    list_gpus,
    run_checks,
)
from tests.conftest import World

GIB = 1 << 30


def judge(check: Any) -> tuple[str, str]:
    """The most serious status that a check yields, and all texts that have it."""
    found = run_checks([("subject", lambda: check)], 5)
    worst = next(s for s in ("problem", "warning", "unknown", "ok") if any(f.status == s for f in found))
    return worst, " | ".join(finding.text for finding in found if finding.status == worst)


def expect(check: Any, status: str, words: str) -> None:
    found, text = judge(check)
    assert found == status and words in text, (found, text)


def test_a_check_that_fails_or_hangs_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "secret-of-the-scorer")

    def fail() -> Iterable[tuple[Status, str]]:
        yield "ok", "before"
        raise RuntimeError("in secret-of-the-scorer")

    def hang() -> Iterable[tuple[Status, str]]:
        time.sleep(3600)
        yield "ok", "never"

    def refuse() -> None:
        raise UserError("a mistake with secret-of-the-scorer")

    assert run_checks([("a", fail), ("b", hang), ("c", refuse), ("d", lambda: [("ok", "well")])], 0.5) == [
        Finding("a", "ok", "before"),
        Finding("a", "unknown", "this check failed: RuntimeError: in <redacted>"),
        Finding("b", "unknown", "this check did not end within 0.5 s"),
        Finding("c", "problem", "a mistake with <redacted>"),
        Finding("d", "ok", "well"),
    ]


def test_versions_are_compared_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch<2.14,>=2.11", "numpy>=1.26", 'wandb>=0.21; extra == "wandb"']
    versions = {"torch": "2.10.1+cu128", "numpy": "1.26"}

    def find(name: str) -> str:
        if name not in versions:
            raise machine.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(machine, "requires", lambda name: needs)
    monkeypatch.setattr(machine, "version", find)
    expect(check_versions(), "warning", "torch is 2.10.1+cu128, and <2.14,>=2.11 is needed")
    versions["torch"] = "2.13.0"
    expect(check_versions(), "ok", "torch 2.13.0")
    del versions["numpy"]
    expect(check_versions(), "problem", "numpy is not installed; run pip install 'numpy>=1.26'")


def test_nodes_must_have_the_same_installed() -> None:
    one = describe_node({"torch": "2.13.0", "cuda": "12.8", "nccl": "2.27", "devices": [["H100", 80 * GIB]]})
    assert not list(compare_nodes({"a": one, "b": one}))
    other = one | {"realrl": "0.1.0 (code 0)"}
    expect(compare_nodes({"a": one, "c": one, "b": other}), "problem", "on a, c; 0.1.0 (code 0) on b; make")
    expect(compare_nodes({"a": one, "b": one | {"Python": "3.1"}}), "warning", "nodes differ in Python")
    expect(compare_nodes({"a": one, "b": one | {"GPUs": "0"}}), "problem", "GPUs: 1 on a; 0 on b")


SOUND = "0, NVIDIA H100 80GB HBM3, 550.54, 81559, 4, 0, Disabled\n"
DRIVERS = {
    "sound": (SOUND, "ok", "1 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 550.54"),
    "without ECC": (SOUND.replace(" 0, Dis", " [N/A], Dis"), "ok", "1 x"),
    "errors": (SOUND.replace(" 0, Dis", " 3, Dis"), "problem", "GPU 0 has 3 uncorrected memory errors"),
    "slices": (SOUND.replace("Disabled", "Enabled"), "warning", "MIG"),
    "in use": (SOUND.replace(", 4,", ", 40000,"), "warning", "39.1 GiB of 79.6 GiB of GPU 0 are in use"),
}


def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize("case", DRIVERS)
def test_faults_of_gpus_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    text, status, words = DRIVERS[case]
    monkeypatch.setattr(machine, "find_missing_build_tool", lambda: None)
    fake_driver(tmp_path, monkeypatch, f"printf '{text}'")
    expect(check_gpus(list_gpus({})), status, words)


def test_gpus_that_are_hidden_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, f"printf '{SOUND}{SOUND.replace('0,', '1,', 1)}'")
    assert [gpu["index"] for gpu in list_gpus({})] == ["0", "1"]
    for visible, count in (("1,0", 2), ("0", 1), ("", 0), ("-1", 0), ("GPU-1f", 1), ("7", 0)):
        assert len(list_gpus({"CUDA_VISIBLE_DEVICES": visible})) == count, visible


def test_a_driver_that_does_not_answer_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, "echo could not communicate with the driver; exit 9")
    subject = find_subject(None, None, None, launched=None)
    expect(check_gpus(subject.gpus, subject.driver_error), "problem", "status 9: could not communicate")


def test_a_torch_that_cannot_use_the_gpus_is_a_problem() -> None:
    torch = {"torch": "2.13.0", "cuda": "12.8", "nccl": None, "devices": [], "error": "driver is too old"}

    def check(ranks: int = 1, gpus: int = 1, device: str = "auto", **changes: object) -> Any:
        subject: Any = SimpleNamespace(ranks=ranks, gpus=[{}] * gpus, device=device)
        return check_torch({**torch, **changes}, subject)

    expect(check(), "problem", "torch 2.13.0 can use none (driver is too old); update the driver")
    expect(check(cuda=None, error=""), "problem", "built for CUDA None")
    expect(check(gpus=0, device="cuda"), "problem", "there is no GPU; use device=cpu")
    expect(check(gpus=0), "ok", "computes on CPUs")
    expect(check(device="cpu"), "ok", "computes on CPUs")
    expect(check(devices=[["H100", 80 * GIB]], ranks=2), "problem", "2 processes need as many GPUs")
    expect(check(devices=[["H100", 80 * GIB]]), "ok", "1 x H100")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton for other systems brings a compiler")
def test_a_machine_with_gpus_needs_a_compiler_and_headers_for_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert "there is no gcc or clang; install gcc" in str(find_missing_build_tool(nothing))
    assert "CC=icx is not a program" in str(find_missing_build_tool({**nothing, "CC": "icx"}))
    gcc = tmp_path / "gcc"
    gcc.write_text("")
    gcc.chmod(0o755)
    assert f"{tmp_path}/Python.h does not exist" in str(find_missing_build_tool(nothing, str(tmp_path)))
    (tmp_path / "Python.h").write_text("")
    assert find_missing_build_tool(nothing, str(tmp_path)) is None
    fake_driver(tmp_path, monkeypatch, f"printf '{SOUND}'")
    monkeypatch.setattr(machine, "find_missing_build_tool", lambda: "there is no compiler")
    expect(check_gpus(list_gpus({})), "problem", "there is no compiler")
    assert not list(check_gpus([]))


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


LIMITS = {
    resource.RLIMIT_NOFILE: (
        64,
        "problem",
        "64 open files, and 2 ranks of 2 may need 640; raise it (ulimit -n",
    ),
    resource.RLIMIT_NPROC: (200, "warning", "200 processes and threads"),
    resource.RLIMIT_MEMLOCK: (65536, "warning", "64.0 KiB may be locked in memory"),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_low_limits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    value, status, words = LIMITS[kind]
    monkeypatch.setattr(machine, "describe_crowd", lambda ranks: None)
    limits: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda one: (limits.get(one, resource.RLIM_INFINITY), 0))
    root = write_files(tmp_path, {"sys/class/infiniband/mlx5_0": ""})
    expect(check_limits(2, 2, 0, root), "ok", "any open files")
    limits[kind] = value
    expect(check_limits(2, 2, 0, root), status, words)


def test_limits_of_control_groups_and_shared_memory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "describe_crowd", lambda ranks: None)
    files = {"proc/self/cgroup": "0::/pod/run\n", "sys/fs/cgroup/pod/pids.max": "1000\n"}
    root = write_files(tmp_path / "new", {**files, "sys/fs/cgroup/pod/pids.current": "800\n"})
    expect(check_limits(2, 2, 0, root), "warning", "200 more of them in the control group")
    files = {"proc/self/cgroup": "5:cpu,pids:/run\n", "sys/fs/cgroup/pids/run/pids.max": "90\n"}
    root = write_files(tmp_path / "old", {**files, "sys/fs/cgroup/pids/run/pids.current": "20\n"})
    expect(check_limits(2, 2, 0, root), "problem", "70 more of them in the control group")
    expect(check_limits(1, 1, 2, tmp_path), "problem", "0 B are free in")
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    sizes = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: sizes)
    expect(check_limits(1, 1, 2, tmp_path), "problem", "64.0 MiB are free in")
    expect(check_limits(1, 1, 1, tmp_path), "ok", "open files")


def test_more_processes_than_cores_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.host.count_cores", lambda: 2)
    expect(check_limits(4, 4, 0), "warning", "4 processes share 2 cores")


def test_the_disk_is_compared_with_the_needs_of_a_recipe(world: World, tmp_path: Path) -> None:
    from realrl.recipe.load import load_experiment
    from realrl.runtime.prepare.job import make_job

    experiment = load_experiment(str(world.recipe("ppo", tmp_path)))
    need = count_checkpoint_bytes(make_job(experiment, Cluster(1, 1)))
    # Actor and critic: 4 bytes of each parameter, and two moments of as many.
    held = sum(
        file.stat().st_size
        for name in ("actor", "reward")
        for file in (world.root / name).glob("*.safetensors")
    )
    assert need == pytest.approx(3 * held, rel=0.1)
    run_dir = tmp_path / "new" / "run"
    expect(check_disk(run_dir, need), "ok", "a checkpoint needs")
    expect(check_disk(run_dir, 1 << 60), "problem", "two checkpoints of")
    assert not (tmp_path / "new").exists() and [f.name for f in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    expect(check_disk(tmp_path / "file" / "run", None), "problem", "is a file")
    expect(check_disk(Path("/proc/run"), None), "problem", "cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_is_found(tmp_path: Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        expect(check_disk(tmp_path / "run", None), "problem", "No space left on device")
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_links_are_compared_with_those_of_the_planner() -> None:
    cpu, gpu = ClusterSpec.parse("cpu:2x2"), ClusterSpec.parse("h100:1x8")

    def check(spec: ClusterSpec | None, *links: Link, error: str = "", torch: Any = None) -> Any:
        return judge_links(Measured(torch=torch, links=links, error=error), spec)

    def gloo(speed: float, between: bool = False) -> Link:
        name = f"gloo from rank 0 to rank {1 + between} (host{int(between)})"
        return Link(name=name, between_nodes=between, bytes_per_s=speed, round_trip=1e-4)

    def nccl(speed: float) -> Link:
        return Link(name="NCCL among all GPUs", between_nodes=False, bytes_per_s=speed, nccl=True)

    expect(check(cpu, gloo(3e9)), "ok", "3 GB/s, 0.1 ms there and back; plans are predicted with 3.5 GB/s")
    expect(check(cpu, gloo(3e8)), "warning", "0.3 GB/s")
    expect(check(cpu, gloo(3e9), gloo(1e7, True)), "warning", "rank 2 (host1): 0.01 GB/s")
    expect(check(gpu, gloo(1e7), nccl(3e11)), "ok", "NCCL among all GPUs: 300 GB/s; plans")
    expect(check(gpu, gloo(3e9), nccl(1e10)), "warning", "predicted with 450 GB/s")
    expect(check(None, gloo(3e9)), "ok", "gloo from rank 0 to rank 1 (host0): 3 GB/s")
    devices = {"devices": [["H100", 80 * GIB]]}
    expect(check(gpu, error="they hang", torch=devices), "problem", "they hang; try NCCL_P2P_DISABLE=1")
