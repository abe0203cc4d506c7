"""What `realrl show` draws."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.cli.planning.drawing import group_alike

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes" / "demo" / "ppo.yaml")
LARGE = (
    "models.actor.path=null",
    "models.actor.shape=llama-2-70b",
    "models.actor.dtype=bfloat16",
    "models.ref.dtype=bfloat16",
    "models.critic.dtype=bfloat16",
    "models.reward.path=null",
    "models.reward.shape=llama-2-7b",
    "models.reward.dtype=bfloat16",
    "data.batch=1024",
    "data.eval=null",
    "evaluation.judge=null",
)
PLAN = """
cluster: 16x8
calls:
  actor.generate: {mesh: 0-127, dp: 16, tp: 8}
  reward.inference: {mesh: 0-7, dp: 4, tp: 2}
  ref.inference: {mesh: 8-63, dp: 1, tp: 8, pp: 7}
  critic.inference: {mesh: 64-127, dp: 16, tp: 4}
  actor.train: {mesh: 0-127, dp: 2, tp: 8, pp: 8}
  critic.train: {mesh: 0-63, dp: 16, tp: 2, pp: 2, zero: 2}
offload: [ref]
keep: [critic]
"""


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The part of the output that is about the plan of a training step."""
    assert run_app(["show", DEMO, *arguments]) == 0
    out = capsys.readouterr().out
    return out[out.index("── Training step: plan") :]


def section(text: str, first: str) -> list[str]:
    """Lines from `first` to the next empty line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    return lines[start : lines.index("", start)]


def test_a_large_plan_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PLAN)
    text = shown(capsys, *LARGE, "cluster=16x8", "--plan", str(tmp_path / "p.yaml"))
    assert f"plan file {tmp_path / 'p.yaml'}" in text
    (row,) = [line.split() for line in section(text, "call") if line.startswith("critic.train")]
    assert row == ["critic.train", "0-63", "16", "2", "2", "8192", "ZeRO-2"]
    assert section(text, "devices  1") == [
        "devices  1                    2                     3                     4",
        "0-7      actor.gen d16 t8 p1  reward.inf d4 t2 p1   actor.train d2 t8 p8  critic.train d16 t2 p2",
        "8-63     actor.gen d16 t8 p1  ref.inf d1 t8 p7      actor.train d2 t8 p8  critic.train d16 t2 p2",
        "64-127   actor.gen d16 t8 p1  critic.inf d16 t4 p1  actor.train d2 t8 p8  - (actor, critic)",
    ]
    moves = section(text, "reallocation")
    assert moves[0].split("  ")[-1] == "between nodes"
    assert [line.split(" ")[0] for line in moves[1:]] == ["actor:", "critic:"]
    assert "before actor.generate" in moves[1] and "after critic.train" in moves[2]
    assert all(line.count("iB") == 3 for line in moves[1:])
    memory = section(text, "devices  parameters")
    assert memory[0].endswith(" of it") and memory[1].split()[0] == "0-7"
    assert re.search(r"GiB \(actor\.\w+\) +[\w ]+ [\d.]+ [MG]iB, [\w ]+ [\d.]+ [MG]iB$", memory[1])
    assert len(memory) < 12


def test_bytes_between_devices_and_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *LARGE, "cluster=2x1", "--plan", "separate", "models.actor.shape=llama-2-7b")
    row = " ".join(section(text, "reallocation")[1].split())
    assert row == "actor: d1 t1 p1 @0 -> d1 t1 p1 @1 after actor.train 12.6 GiB 12.6 GiB 12.6 GiB"


def test_a_preset_is_explained_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "cluster=1x4", "--plan", "interleave")
    assert "interleave: Generation and training run on all devices. Inference calls" in text
    assert "arXiv 2312.11819" in text


def test_a_long_picture_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "cluster=1x6", "--plan", "separate", "data.batch=512")
    heads = [line.split()[1:] for line in text.splitlines() if line.startswith("devices")]
    assert heads[:2] == [["1", "2", "3", "4"], ["5", "6"]]
    assert max(map(len, section(text, "devices  1"))) <= 110


def test_models_that_are_not_on_this_machine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "cluster=1x2", "models.actor.path=nowhere/model", "models.reward.path=./nothing")
    assert "the model of actor, reward, ref, critic is not on this machine" in text


def test_programs_of_the_start_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "cluster=1x2", "--plan", "separate", "--programs")
    start = text[text.index("── Programs: start") : text.index("── Programs: train")]
    assert "reallocate actor: d1 t1 p1 @0" in start and "run " not in start


def test_ranks_that_do_the_same_are_one_row() -> None:
    assert list(group_alike(["a", "a", "b", "a"])) == [("0-1,3", "a"), ("2", "b")]
    rows = ["a" if rank % 2 else "b" for rank in range(16)]
    assert [name for name, _ in group_alike(rows)] == ["0,2,4,… (8 devices)", "1,3,5,… (8 devices)"]


def test_a_large_cluster_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PLAN)
    arguments = ["show", DEMO, *LARGE, "cluster=16x8", "--plan", str(tmp_path / "p.yaml")]
    script = (
        "import sys; from realrl.cli.app import run_app; "
        f"status = run_app({arguments!r}); sys.exit(status or ('torch' in sys.modules and 3))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
