"""What `realrl launch` writes is understood by shells and YAML, and asks for the recipe's nodes and devices."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app

RECIPE = "recipes/8_gpus/ppo_7b.yaml"
AWKWARD = 'run_dir=runs/it\'s $(HOME) `x` "y"'


def write(path: Path, kind: str, *arguments: str) -> str:
    assert run_app(["launch", kind, RECIPE, *arguments, "--out", str(path)]) == 0
    return path.read_text()


def sbatch_options(text: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))


def test_a_slurm_script_asks_for_the_nodes_and_devices_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    text = write(
        file,
        *("slurm", "cluster=h100:2x4", AWKWARD, "--partition", "big", "--sbatch=--constraint=ib"),
        *("--gpu-type", "h100", "--cpus", "6", "--time", "1-12", "--setup", "module load cuda"),
    )
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(file)], check=True)
    wanted = {"--nodes=2", "--gpus-per-node=h100:4", "--cpus-per-task=24", "--partition=big", "--time=1-12"}
    assert wanted | {"--ntasks-per-node=1", "--constraint=ib", "--requeue"} <= sbatch_options(text)
    assert "--nnodes 2 --nproc-per-node 4" in text and "\nmodule load cuda\n" in text
    assert shlex.quote(AWKWARD) in text


def test_a_slurm_script_for_cpus_asks_for_no_gpus(tmp_path: Path) -> None:
    text = write(tmp_path / "job.sh", "slurm", "cluster=2x4", "device=cpu")
    assert "--cpus-per-task=4" in sbatch_options(text) and "--gpus" not in text


def test_a_manifest_has_a_pod_for_each_node(tmp_path: Path) -> None:
    text = write(tmp_path / "job.yaml", "kubernetes", "cluster=h100:3x8", AWKWARD, "--name", "try-1")
    job: dict[str, Any] = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "try-1" and job["spec"]["nprocPerNode"] == "8"
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"] == 3
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    # Names that the operator looks for.
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    # Kubernetes would replace $(HOME) by a variable's value.
    assert container["command"][-1] == AWKWARD.replace("$(", "$$(")
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"shared": container["workingDir"], "shm": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)


def test_torchrun_is_told_each_nodes_address(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--address", "fd00::1", "--address", "fd00::2", "--port", "4000")
    changes = ("cluster=2x8", "launch.grace_seconds=900")
    assert run_app(["launch", "torchrun", RECIPE, *changes, *options]) == 0
    lines = capsys.readouterr().out.replace("\\\n", "").splitlines()
    first, second = (shlex.split(line) for line in lines if line.startswith("OMP_NUM_THREADS"))
    for command, own, is_host in ((first, "fd00::1", "1"), (second, "fd00::2", "0")):
        assert command[command.index("--rdzv-endpoint") + 1] == "[fd00::1]:4000"
        assert command[command.index("--local-addr") + 1] == own
        assert command[command.index("--rdzv-conf") + 1].startswith(f"is_host={is_host},")
        assert command[1] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900", "what ranks have after SIGTERM"
        assert command[-6:] == ["-m", "realrl", "train", RECIPE, *changes]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("slurm", "cluster=auto"), "cluster=auto does not say how many nodes the job has"),
        (
            ("kubernetes", "cluster=2x8", "overwrite=true"),
            "overwrite=true: a restarted pod would delete",
        ),
        (
            ("slurm", "cluster=2x8", "resume=never"),
            "resume=never: a restarted job could not resume its run",
        ),
        (("slurm", "cluster=h100:2x8", "device=cpu"), "names h100, but device=cpu"),
        (("slurm", "cluster=2x8", "device=cpu", "--gpu-type", "h100"), "the recipe computes on CPUs"),
        (("slurm", "cluster=2x8", "--time", "soon"), "--time soon: it must be a time as sbatch takes it"),
        (("slurm", "cluster=2x8", "--partition", "a\nb"), "it must be an option of sbatch"),
        (("slurm", "cluster=2x8", "--name", "A_b"), "--name A_b: it must have at most 50 lower-case letters"),
        (("torchrun", "cluster=2x8", "--address", "a"), "--address was given 1 times, but the recipe has 2"),
        (("kubernetes", "cluster=2x8", "--memory", "much"), "--memory much: it must be an amount"),
        (
            ("kubernetes", "cluster=2x8", "--directory", "runs"),
            "--directory runs: it must be an absolute path",
        ),
    ],
)
def test_mistakes_are_one_message(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *rest = arguments
    # An option of Kubernetes has another meaning for the others.
    assert run_app(["launch", kind, RECIPE, *rest]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
