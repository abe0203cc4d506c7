"""`realrl doctor` as a command: its table, its exit status, and several nodes under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.runtime.doctor import examine
from realrl.runtime.doctor.links import Measured, measure_locally
from tests.conftest import World
from tests.runtime.processes import PATIENCE


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_recipe_and_local_ranks_are_examined(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe("ppo", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status = run_app(["doctor", str(recipe), "--cluster", "1x2", "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    by_subject = {finding["subject"]: finding["text"] for finding in found if finding["status"] != "unknown"}
    assert status == int(any(finding["status"] == "problem" for finding in found))
    assert "gloo from rank 0 to rank 1" in by_subject["links"]
    assert "ppo on cluster 1x2 is expected to fit" in by_subject["recipe"]
    assert "a checkpoint needs" in by_subject["disk"] and "torch" in by_subject
    assert sorted(tmp_path.rglob("*")) == before


def test_problems_are_in_the_table_and_in_the_status(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ranks: int, device: str, seconds: float) -> Any:
        raise RuntimeError("no process can be started")

    monkeypatch.setattr(examine, "measure_locally", broken)
    monkeypatch.setattr(examine, "check_versions", lambda: [("problem", "all wrong; install another")])
    recipe = world.recipe("sft", tmp_path, trackers__wandb={}, device_memory="300MiB")
    assert run_app(["doctor", str(recipe), "--run-dir", "/proc/run"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "all wrong; install another",
        "/proc/run cannot be written",
        "this check failed: RuntimeError",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.yaml"], "nothing.yaml"),
        (["--cluster", "many"], "many"),
        (["--cluster", "0x1"], "at least 1"),
        (["--cluster", "1x2"], "RANK=0, WORLD_SIZE=two: a launcher does not set these so"),
    ],
)
def test_bad_input_is_told_from_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    if "WORLD_SIZE" in words:
        for name, value in {"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    assert run_app(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("realrl: ") and error.count("\n") == 1


def test_ranks_that_do_not_end_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_locally(10**6, "cpu", 0.0)
    assert found.torch is None and found.error == "16 processes did not load torch within 0 s"
    subject = examine.find_subject(None, "1x2", None, launched=None)
    (finding,) = examine.judge_ranks(subject, found)
    assert finding.status == "problem" and finding.subject == "links"

    # It stands in for ranks that lose messages after torch is loaded.
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"torch": {}, "links": [], "error": ""}' > "$3"; exec sleep 3600""")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert measure_locally(2, "cpu", 2.0).error == "2 processes did not exchange messages within 2 s"


def test_a_mistake_of_a_recipe_is_one_finding_among_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from realrl.recipe.load import load_experiment

    def refuse(*_: object) -> None:
        raise UserError("plan: symmetric: device 0 needs more than it has")

    monkeypatch.setattr("realrl.runtime.doctor.examine.check_fit", refuse)
    experiment = load_experiment(str(world.recipe("sft", tmp_path)))
    subject = examine.find_subject(experiment, "1x1", None, launched=None)
    found = examine.judge_ranks(subject, Measured(error="too slow"))
    assert {(finding.subject, finding.status) for finding in found} == {
        ("links", "problem"),
        ("recipe", "problem"),
    }


def test_two_nodes_of_torchrun_print_one_table(tmp_path: Path) -> None:
    from torch.distributed.elastic.utils.distributed import get_free_port

    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    meeting += ["--master-port", str(get_free_port())]
    arguments = ["-m", "realrl", "doctor", "--json", "--run-dir", str(tmp_path / "run")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, "--node-rank", str(node), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs[1] == ""
    found = json.loads(outputs[0])
    texts = {(finding["subject"], finding["text"]) for finding in found}
    assert ("disk", "all nodes see the same run_dir") in texts
    assert any(
        subject == "links" and text.startswith("gloo from rank 0 to rank 1") for subject, text in texts
    )
    assert sum(finding["subject"] == "versions" and bool(finding["node"]) for finding in found) >= 2
    assert list(tmp_path.iterdir()) == []


def test_a_verifier_that_does_not_work_is_a_problem_of_the_recipe(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(examine, "measure_locally", lambda *given: Measured())
    recipe = world.recipe("grpo", tmp_path, reward={"verifier": {"kind": "math"}}, models__reward=None)
    run_app(["doctor", str(recipe)])
    assert "reward.function works" in capsys.readouterr().out
    (tmp_path / "math_verify.py").write_text("raise ImportError('another module')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run_app(["doctor", str(recipe)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "verifier math cannot start its process: ImportError: another module" in shown
