"""Checks of a machine find the faults that are put into it, and leave a sound one alone."""

import errno
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from realrl.config.hardware import find_missing_build_tool
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.runtime.doctor.finding import Finding, ok, run_checks
from realrl.runtime.doctor.gpus import (
    check_build_tools,
    check_driver,
    check_torch_gpus,
    choose_visible,
    parse_gpus,
)
from realrl.runtime.doctor.links import GroupFigures, PeerFigures, judge_clocks, judge_links
from realrl.runtime.doctor.machine import Host, check_cores, check_limits, check_memory, check_shared_memory
from realrl.runtime.doctor.network import check_host_name, check_hub, check_interfaces, check_ports
from realrl.runtime.doctor.recipe_needs import find_needs
from realrl.runtime.doctor.storage import check_storage
from realrl.runtime.doctor.variables import check_variables
from realrl.runtime.doctor.versions import check_versions, compare_nodes, list_versions
from tests.conftest import World

GIB = 1 << 30


def worst(findings: Iterable[Finding]) -> tuple[str, str]:
    """The most serious status, and all texts that have it."""
    listed = list(findings)
    found = next(s for s in ("problem", "warning", "unknown", "ok") if any(f.status == s for f in listed))
    return found, " | ".join(finding.text for finding in listed if finding.status == found)


def expect(findings: Iterable[Finding], status: str, words: str) -> None:
    found, text = worst(findings)
    assert found == status and words in text, (found, text)


def test_a_check_that_fails_or_hangs_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "secret-of-the-scorer")

    def fail() -> Iterable[Finding]:
        yield ok("first", "before")
        raise RuntimeError("in secret-of-the-scorer")

    def hang() -> Iterable[Finding]:
        time.sleep(3600)
        yield ok("second", "never")

    found = run_checks([("first", fail), ("second", hang), ("third", lambda: [ok("third", "well")])], 0.5)
    assert [(finding.subject, finding.status) for finding in found] == [
        ("first", "unknown"),
        ("second", "unknown"),
        ("third", "ok"),
    ]
    assert found[0].text == "this check failed: RuntimeError: in <redacted>"


def test_versions_are_compared_with_what_is_needed() -> None:
    needs = ["torch<2.14,>=2.11", "numpy>=1.26", "yaml>=6", 'wandb>=0.21; extra == "wandb"']
    versions = {"torch": "2.10.1+cu128", "numpy": "1.26", "yaml": "6.0.2", "wandb": "0.21.0"}

    def find(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if name not in versions:
            raise PackageNotFoundError
        return versions[name]

    expect(
        check_versions(needs, find), "warning", "torch 2.10.1+cu128 is installed, and <2.14,>=2.11 is needed"
    )
    versions["torch"] = "2.13.0"
    expect(check_versions(needs, find), "ok", "extras: wandb")
    del versions["numpy"]
    expect(check_versions(needs, find), "problem", "numpy is not installed; run pip install 'numpy>=1.26'")


def test_nodes_must_have_the_same_installed() -> None:
    torch = {"torch": "2.13.0", "cuda": "12.8", "nccl": "2.27", "devices": [["H100", 80 * GIB]], "error": ""}
    one = list_versions() | torch | {"host": "a"}
    assert not list(compare_nodes([one, one | {"host": "b"}]))
    other = one | {"host": "b", "realrl": "0.1.0 (code 0)"}
    expect(
        compare_nodes([one, one | {"host": "c"}, other]), "problem", "on a, c; 0.1.0 (code 0) on b; install"
    )
    expect(compare_nodes([one, one | {"host": "b", "Python": "3.1"}]), "warning", "versions of Python")
    expect(compare_nodes([one, one | {"host": "b", "devices": []}]), "problem", "0 on b, 1 on a")


SOUND = (
    "index, name, driver_version, memory.total [MiB], memory.used [MiB], ecc.errors.uncorrected.volatile.total,"
    " mig.mode.current, persistence_mode, clocks_event_reasons.hw_slowdown\n"
    "0, NVIDIA H100 80GB HBM3, 550.54, 81559, 4, 0, Disabled, Enabled, Not Active\n"
)
DRIVERS = {
    "sound": (SOUND, "ok", "1 x NVIDIA H100 80GB HBM3, 79.6 GiB, driver 550.54"),
    "without ECC": (SOUND.replace(" 0, Dis", " [N/A], Dis"), "ok", "1 x"),
    "errors": (SOUND.replace(" 0, Dis", " 3, Dis"), "problem", "GPU 0 has 3 uncorrected memory errors"),
    "slices": (SOUND.replace("Disabled, Ena", "Enabled, Ena"), "warning", "MIG"),
    "in use": (SOUND.replace(", 4,", ", 40000,"), "warning", "39.1 GiB of 79.6 GiB of GPU 0 are in use"),
    "hot": (SOUND.replace("Not Active", "Active"), "warning", "slows itself down"),
    "not persistent": (SOUND.replace("Enabled,", "Disabled,"), "warning", "persistence mode is off"),
}


@pytest.mark.parametrize("case", DRIVERS)
def test_faults_of_gpus_are_found(case: str) -> None:
    text, status, words = DRIVERS[case]
    expect(check_driver(lambda: text), status, words)


def test_gpus_that_are_hidden_are_of_no_concern() -> None:
    two = SOUND + SOUND.splitlines()[1].replace("0,", "1,", 1).replace(", 4,", ", 40000,") + "\n"
    expect(check_driver(lambda: two, {}), "warning", "of GPU 1 are in use")
    expect(check_driver(lambda: two, {"CUDA_VISIBLE_DEVICES": "0"}), "ok", "1 x NVIDIA")
    for visible, count in (("1,0", 2), ("", 0), ("-1", 0), ("GPU-1f", 1), ("7", 0)):
        assert len(choose_visible(parse_gpus(two), {"CUDA_VISIBLE_DEVICES": visible})) == count, visible


def test_fields_that_a_driver_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_DRIVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    expect(check_driver(), "ok", "1 x index-name, 1.00 GiB, driver index-driver_version")


FAKE_DRIVER = """#!/bin/sh
fields=${1#--query-gpu=}
case $fields in
    *clocks_event*) echo 'Field "clocks_event_reasons.hw_slowdown" is not a valid field to query.'; exit 2;;
esac
echo "$fields"
echo "$fields" | sed -e 's/memory.total/1024/' -e 's/memory.used/0/' -e 's/,name/,index-name/' \\
    -e 's/driver_version/index-driver_version/' -e 's/^index/0/'
"""


def test_a_driver_that_does_not_answer_is_a_problem() -> None:
    def fail() -> str:
        raise OSError("nvidia-smi ended with status 9: couldn't communicate with the NVIDIA driver")

    def hang() -> str:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    expect(check_driver(fail), "problem", "couldn't communicate")
    expect(check_driver(hang), "problem", "timed out")
    assert not list(check_driver(lambda: None))


def test_a_torch_that_cannot_use_the_gpus_is_a_problem() -> None:
    torch = {"torch": "2.13.0", "cuda": "12.8", "nccl": None, "devices": [], "error": "driver is too old"}

    def check(ranks: int = 1, gpus: int = 1, device: str = "auto", **changes: object) -> Iterable[Finding]:
        return check_torch_gpus([{**torch, **changes}], ranks=ranks, gpus=gpus, device=device)

    expect(check(), "problem", "for CUDA 12.8 can use none (driver is too old); update the driver")
    expect(check(cuda=None), "problem", "built without CUDA")
    expect(check(gpus=0, device="cuda"), "problem", "there is no GPU; use device=cpu")
    expect(check(gpus=0), "ok", "computes on CPUs")
    expect(check(device="cpu"), "ok", "as device=cpu says")
    expect(check(devices=[["H100", 80 * GIB]], ranks=2), "problem", "2 processes need as many GPUs")
    expect(check(devices=[["H100", 80 * GIB]]), "ok", "1 x H100 80.0 GiB")


def fake_host(root: Path, files: dict[str, str], limits: dict[int, tuple[int, int]] | None = None) -> Host:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return Host(
        proc=root / "proc",
        cgroup=root / "cgroup",
        sys=root / "sys",
        shared=root / "shm",
        limit=lambda kind: (limits or {}).get(kind, unlimited),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Triton for other systems brings a compiler")
def test_a_machine_with_gpus_needs_a_compiler_and_headers_for_triton(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert list(check_build_tools(0, nothing)) == []
    (found,) = check_build_tools(1, nothing)
    assert found.status == "problem" and "there is no gcc or clang; install gcc" in found.text
    (found,) = check_build_tools(1, {**nothing, "CC": "icx"})
    assert "CC=icx is not a program" in found.text
    gcc = tmp_path / "gcc"
    gcc.write_text("")
    gcc.chmod(0o755)
    assert f"{tmp_path}/Python.h does not exist" in str(find_missing_build_tool(nothing, str(tmp_path)))
    (tmp_path / "Python.h").write_text("")
    assert find_missing_build_tool(nothing, str(tmp_path)) is None


def test_limits_of_control_groups_are_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/run\n",
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\nCommitLimit: 0 kB\nCommitted_AS: 0 kB\n",
        "cgroup/pod/cpu.max": "200000 100000\n",
        "cgroup/pod/run/cpu.max": "max 100000\n",
    }
    host = fake_host(tmp_path, files)
    expect(check_cores(2, host, cores=8), "warning", "allows 2 of the 8 cores")
    expect(check_cores(4, host, cores=8), "warning", "4 processes share 2 cores")
    expect(check_cores(2, host, cores=2), "ok", "2 cores for 2 processes")
    expect(check_cores(2, host, cores=8, threads="1"), "ok", "2 cores for 2 processes")
    used = {"cgroup/pod/memory.max": f"{2 * GIB}\n", "cgroup/pod/memory.current": f"{2 * GIB - 1}\n"}
    host = fake_host(tmp_path, used)
    expect(check_memory(1, host), "problem", "before they hold a model")
    # Most of it are pages of files.
    host = fake_host(tmp_path, {"cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n"})
    expect(check_memory(1, host), "ok", "1.00 GiB free of 2.00 GiB, the limit of a control group")
    host = fake_host(tmp_path, {"cgroup/pod/pids.max": "1000\n", "cgroup/pod/pids.current": "800\n"})
    expect(check_limits(2, 2, host), "warning", "allows 200 more processes and threads")
    older = {"proc/self/cgroup": "5:cpu,pids:/run\n", "cgroup/pids/run/pids.max": "90\n"}
    host = fake_host(tmp_path / "older", {**older, "cgroup/pids/run/pids.current": "20\n"})
    expect(check_limits(2, 2, host), "warning", "allows 70 more processes and threads")


def test_memory_that_may_not_be_reserved_is_found(tmp_path: Path) -> None:
    meminfo = (
        "MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\nCommitLimit: 4194304 kB\nCommitted_AS: 2097152 kB\n"
    )
    host = fake_host(tmp_path, {"proc/meminfo": meminfo})
    expect(check_memory(2, host), "ok", "7.63 GiB free of")
    host = fake_host(tmp_path, {"proc/sys/vm/overcommit_memory": "2\n"})
    expect(check_memory(2, host), "warning", "beyond 2.00 GiB")
    expect(check_memory(99, host), "problem", "are free, and 99 processes take about")


def test_shared_memory_matters_where_there_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = fake_host(tmp_path, {})
    expect(check_shared_memory(0, host), "ok", "is missing")
    expect(check_shared_memory(2, host), "problem", "mount a tmpfs")
    (tmp_path / "shm").mkdir()
    sizes = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: sizes)
    expect(check_shared_memory(2, host), "problem", "64.0 MiB free, and NCCL may need 256 MiB for 2 GPUs")
    expect(check_shared_memory(1, host), "ok", "64.0 MiB free of 64.0 MiB")


LIMITS = {
    resource.RLIMIT_NOFILE: ((64, 4096), "problem", "64 files may be open"),
    resource.RLIMIT_NPROC: ((100, 100), "warning", "100 processes and threads are allowed"),
    resource.RLIMIT_MEMLOCK: ((65536, 65536), "warning", "64.0 KiB may be locked in memory"),
    resource.RLIMIT_AS: ((GIB, GIB), "warning", "may reserve 1.00 GiB of addresses"),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_low_limits_are_found(tmp_path: Path, kind: int) -> None:
    values, status, words = LIMITS[kind]
    adapter = {"sys/class/infiniband/mlx5_0": ""}
    expect(check_limits(2, 2, fake_host(tmp_path, adapter)), "ok", "open files unlimited")
    expect(check_limits(2, 2, fake_host(tmp_path, adapter, {kind: values})), status, words)


VARIABLES: dict[str, tuple[dict[str, str], str, str]] = {
    "none": ({"PATH": "/bin", "NCCL_DEBUG": "WARN"}, "ok", "no variable"),
    "threads": ({"OMP_NUM_THREADS": "8"}, "warning", "set it to 2"),
    "words": ({"OMP_NUM_THREADS": "many"}, "problem", "is no number"),
    "left over": ({"NCCL_P2P_DISABLE": "1"}, "warning", "exchanging data directly"),
    "forced": ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, "warning", "NCCL_ALGO, NCCL_PROTO overrule"),
    "hidden": ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "hides all 4 GPUs"),
    "too few": ({"CUDA_VISIBLE_DEVICES": "3"}, "problem", "leaves 1 of 4 GPUs to 2 processes"),
    "twice": ({"CUDA_VISIBLE_DEVICES": "1,1"}, "problem", "lists a GPU twice"),
    "not there": ({"CUDA_VISIBLE_DEVICES": "0,4"}, "problem", "they are 0 to 3"),
    "by name": ({"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"}, "ok", "no variable"),
    "alone": ({"RANK": "0", "WORLD_SIZE": "2"}, "problem", "takes itself for a rank"),
}


@pytest.mark.parametrize("case", VARIABLES)
def test_variables_that_hurt_are_found(case: str) -> None:
    environment, status, words = VARIABLES[case]
    expect(check_variables(environment, ranks=2, cores=4, gpus=4, launched=False), status, words)


def test_the_run_directory_is_compared_with_the_needs_of_a_recipe(world: World, tmp_path: Path) -> None:
    from realrl.recipe.load import load_experiment

    experiment = load_experiment(str(world.recipe("ppo", tmp_path)))
    need = find_needs(experiment, Cluster(1, 1)).checkpoint_bytes
    # Actor and critic: 4 bytes of each parameter, and two moments of as many.
    held = sum(
        file.stat().st_size
        for name in ("actor", "reward")
        for file in (world.root / name).glob("*.safetensors")
    )
    assert need == pytest.approx(3 * held, rel=0.1)
    run_dir = tmp_path / "new" / "run"
    expect(check_storage(run_dir, need, mounts=tmp_path / "none"), "ok", "a checkpoint needs")
    expect(check_storage(run_dir, 1 << 60, mounts=tmp_path / "none"), "problem", "two checkpoints of")
    assert not (tmp_path / "new").exists() and [f.name for f in tmp_path.iterdir()] == ["recipe.yaml"]


def test_faults_of_the_run_directory_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\n")
    expect(check_storage(tmp_path / "file" / "run", None), "problem", "is a file")
    expect(check_storage(Path("/proc/run"), None), "problem", "cannot be written")
    expect(check_storage(tmp_path, None, mounts=mounts), "warning", "is in memory (tmpfs)")
    mounts.write_text("a / ext4 rw 0 0\n")
    expect(
        check_storage(tmp_path, None, mounts=mounts, now=lambda: time.time() + 60), "warning", "60.0 s behind"
    )
    expect(
        check_storage(tmp_path, None, mounts=mounts, now=lambda: time.time() - 60), "warning", "60.0 s ahead"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_is_found(tmp_path: Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        expect(check_storage(tmp_path / "run", None), "problem", "No space left on device")
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_names_and_interfaces_are_checked(tmp_path: Path) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    expect(check_host_name(2, "box", fail), "problem", "box, has no address")
    expect(check_host_name(1, "box", fail), "ok", "one machine needs none")
    expect(check_host_name(2, "box", lambda name: "127.0.1.1"), "ok", "which other nodes cannot reach")
    for name, state in {"eth0": "up", "ib0": "down", "lo": "unknown"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    assert not list(check_interfaces({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "lo"}, tmp_path))
    assert not list(check_interfaces({"NCCL_SOCKET_IFNAME": "^docker"}, tmp_path))
    expect(check_interfaces({"GLOO_SOCKET_IFNAME": "eth"}, tmp_path), "problem", "there are eth0, ib0, lo")
    expect(check_interfaces({"NCCL_SOCKET_IFNAME": "=ib0"}, tmp_path), "problem", "ib0 is down")


def test_ports_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        expect(check_ports({"MASTER_PORT": port}, launched=False), "warning", f"port {port}, where torchrun")
        expect(check_ports({"MASTER_PORT": port}, launched=True), "ok", "could be opened")
    expect(check_ports({"MASTER_PORT": "http"}, launched=False), "problem", "is no port")

    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    expect(check_ports({}, launched=False), "problem", "no process can listen at 127.0.0.1")


def test_the_hub_is_asked_unless_it_must_not_be() -> None:
    def fail(address: str) -> None:
        raise OSError("Connection refused")

    def never(address: str) -> None:
        raise AssertionError

    expect(check_hub({"HF_HUB_OFFLINE": "1"}, ["a/b"], never), "ok", "a/b must be in its cache")
    expect(
        check_hub({"HF_ENDPOINT": "http://mirror"}, ["a/b"], fail), "warning", "http://mirror, which has a/b,"
    )
    expect(check_hub({}, [], fail), "ok", "this recipe takes nothing from there")
    expect(check_hub({}, None, lambda address: None), "ok", "can be reached")


def peer(rank: int, node: int = 0, **changes: float) -> PeerFigures:
    figures = {"round_trip": 1e-4, "offset": 0.0, "bytes_per_s": 3e9, **changes}
    return PeerFigures(rank=rank, host=f"host{node}", node=node, **figures)


def test_links_are_compared_with_those_of_the_planner() -> None:
    cpu, gpu = ClusterSpec.parse("cpu:2x2"), ClusterSpec.parse("h100:1x8")
    expect(
        judge_links([peer(1)], None, cpu),
        "ok",
        "3 GB/s, 0.1 ms there and back; plans are predicted with 3.5 GB/s",
    )
    expect(judge_links([peer(1, bytes_per_s=3e8)], None, cpu), "warning", "0.3 GB/s")
    expect(
        judge_links([peer(1, round_trip=0.02)], None, cpu), "warning", "rank 1 (host0) and back takes 20 ms"
    )
    slow = [peer(1), peer(2, 1, bytes_per_s=1e7)]
    expect(judge_links(slow, None, cpu), "warning", "rank 2 (host1): 0.01 GB/s")
    expect(
        judge_links([peer(1)], GroupFigures(nodes=1, bytes_per_s=3e11), gpu),
        "ok",
        "NCCL among all GPUs: 300 GB/s",
    )
    expect(
        judge_links([peer(1)], GroupFigures(nodes=1, bytes_per_s=1e10), gpu),
        "warning",
        "predicted with 450 GB/s",
    )
    expect(judge_links([peer(1)], None, None), "ok", "gloo from rank 0 to rank 1: 3 GB/s")


def test_clocks_of_nodes_are_compared() -> None:
    expect(judge_clocks([peer(1), peer(2, 1, offset=0.004)]), "ok", "2 nodes, at most 4 ms apart")
    expect(
        judge_clocks([peer(2, 1, offset=-3.0)]), "warning", "clock of host1 is 3.0 s behind that of rank 0"
    )
    expect(judge_clocks([peer(2, 1, offset=300.0)]), "problem", "300.0 s ahead of")
    assert not list(judge_clocks([peer(1)]))
