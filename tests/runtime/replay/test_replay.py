"""A recorded step gives the same results on other devices, and `realrl replay` names what has been changed."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from realrl.checkpoint.saved import list_checkpoints, list_records
from realrl.cli.app import run_app
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, read_metrics

REWARD = """
import json
from pathlib import Path

STATE = Path(__file__).with_name("bonus.json")


def score(completions, **_):
    bonus = json.loads(STATE.read_text()) if STATE.exists() else 0.0
    return [len(text) % 7 + bonus for text in completions]
"""


def write_recipe(world: World, directory: Path, algorithm: str = "grpo", **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "scores.py").write_text(REWARD)
    given = {
        "models": {"actor": {"path": world.actor, "optimizer": {"lr": 1e-3}}, "ref": {"path": world.actor}},
        "reward__function": f"{directory / 'scores.py'}:score",
        "policy__kl": {"coef": 0.05},
        "training__steps": 4,
        **changes,
    }
    return world.recipe(algorithm, directory, **given)


def train(recipe: Path, size: int = 1) -> Path:
    if size == 1:
        assert run_app(["train", str(recipe)]) == 0
    else:
        run_on_ranks(size, [recipe])
    return recipe.parent / "run"


def replay(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capsys.readouterr()
    status = run_app(["replay", str(run), *options])
    return status, capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 4 processes (two TP ranks in two stages), with step 3 recorded from checkpoint 2."""
    directory = tmp_path_factory.mktemp("recorded")
    calls = {
        name: {"mesh": "0-3", "dp": 1, "tp": 2, "pp": 2}
        for name in ("actor.generate", "ref.inference", "actor.train")
    }
    calls["reward.function"] = {"mesh": "0-3", "dp": 4}
    (directory / "plan.yaml").write_text(yaml.safe_dump({"cluster": "1x4", "calls": calls}))
    recipe = write_recipe(
        world,
        directory,
        cluster="1x4",
        plan=str(directory / "plan.yaml"),
        debug__record={"steps": [3], "every": 4},
    )
    return train(recipe, size=4)


def test_step_of_four_ranks_replays_on_one(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in recorded.rglob("*")}
    status, out = replay(recorded, capsys, "--step", "3", "--tolerance", "1e-5")
    assert status == 0, out
    assert "DIFFERS" not in out
    assert "ok       actor.generate: parameters equal, sequences equal" in out
    assert "ok       actor.train: parameters equal" in out
    assert "the step gives the recorded results, within 1e-05" in out
    assert {file: file.stat().st_mtime_ns for file in recorded.rglob("*")} == before
    status, out = replay(recorded, capsys)
    assert status == 0
    assert out.splitlines() == [
        "step 3, from checkpoint 2: debug.record asks for it",
        "step 4, from checkpoint 3: debug.record asks for it",
    ]


def test_step_replays_on_two_processes(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "realrl", "replay", str(recorded), "--step", "4", "--cluster", "1x2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed on 1x2" in done.stdout and "the step gives the recorded results" in done.stdout


def copy_run(run: Path, directory: Path) -> Path:
    """Copy a run with its recipe, so that a test may change them."""
    copied = directory / "copy"
    shutil.copytree(run.parent, copied)
    for file in (copied / "run" / "config.yaml",):
        file.write_text(file.read_text().replace(str(run.parent), str(copied)))
    return copied / "run"


def test_wrong_reward_is_named(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = copy_run(recorded, tmp_path)
    (run.parent / "bonus.json").write_text("0.5")
    status, out = replay(run, capsys, "--step", "3")
    assert status == 1
    first = next(line for line in out.splitlines() if line.startswith("first difference"))
    assert first.startswith("first difference: reward.function: score of item 0")
    assert first.endswith("128 items differ")
    assert "so it returned something else: its file" in out
    # The train call had the recorded scores, so it agrees.
    assert "ok       actor.train" in out


def test_flipped_bit_is_named(
    world: World, recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damaged = tmp_path / "ref"
    shutil.copytree(world.actor, damaged)
    weights = load_file(damaged / "model.safetensors")
    name = sorted(name for name in weights if weights[name].dim() == 2)[0]
    words = weights[name].view(torch.int32)
    words[1, 2] ^= 1 << 10
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    status, out = replay(recorded, capsys, f"models.ref.path={damaged}", "--step", "3")
    assert status == 1
    first = next(line for line in out.splitlines() if line.startswith("first difference"))
    assert first.startswith("first difference: ref.inference: parameters differ: ")
    assert "more tensors" not in first
    assert "ok       actor.train" in out


def test_changed_loss_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = replay(recorded, capsys, "policy.kl.coef=0.5", "--step", "3")
    assert status == 1
    first = next(line for line in out.splitlines() if line.startswith("first difference"))
    assert first.startswith("first difference: actor.train: actor.train/")
    assert "ok       ref.inference" in out


def test_records_keep_their_checkpoints(recorded: Path) -> None:
    """The run keeps two checkpoints; the checkpoints of records stay too."""
    assert {record.checkpoint for record in list_records(recorded).values()} == {2, 3}
    assert {2, 3, 4} <= set(list_checkpoints(recorded))


def test_mistakes_get_one_message(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options, message in (
        (["--step", "2"], "--step 2: the recorded steps of"),
        (["--step", "3", "--call", "actor.train"], "--call and --item belong together"),
        (
            ["--step", "3", "--call", "critic.train", "--item", "0"],
            "--call critic.train: the calls of a step are",
        ),
        (["--step", "3", "--plan", "search"], "--plan search: it plans for speed"),
    ):
        assert run_app(["replay", str(recorded), *options]) == 2
        assert message in capsys.readouterr().err
    run = copy_run(recorded, tmp_path)
    shutil.rmtree(list_checkpoints(run)[2])
    assert run_app(["replay", str(run), "--step", "3"]) == 2
    assert "which does not exist" in capsys.readouterr().err
    part = next(iter(sorted(list_records(run)[4].path.iterdir())))
    part.write_bytes(part.read_bytes()[:100])
    assert run_app(["replay", str(run), "--step", "4"]) == 2
    assert "is damaged" in capsys.readouterr().err


NAN = """
import json
import math
from pathlib import Path

CALLS = Path(__file__).with_name("calls")


def score(completions, **_):
    CALLS.touch()
    with CALLS.open("a") as file:
        file.write("x")
    largest = 3e38 if len(CALLS.read_text()) == 3 else 0.0
    return [largest * (i % 2) + len(text) % 7 for i, text in enumerate(completions)]
"""


def test_troubled_step_is_recorded(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The third step has a loss that is not finite. It is recorded, and replays from the first weights."""
    recipe = write_recipe(world, tmp_path, policy__scale="none", checkpoint__minutes=None)
    (tmp_path / "scores.py").write_text(NAN)
    run = train(recipe)
    metrics = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor.train/skipped_steps"] > 0 for line in metrics] == [False, False, True, False]
    assert [*list_records(run)] == [3]
    (tmp_path / "calls").unlink()
    status, out = replay(run, capsys, "--step", "3")
    assert status == 0, out
    assert "recorded because actor.train skipped an optimizer step" in out


def test_asynchronous_runs_leave_no_record(world: World, tmp_path: Path) -> None:
    """They could not be replayed."""
    changes = {"policy__scale": "none", "checkpoint__minutes": None, "asynchrony__staleness": 1}
    recipe = write_recipe(world, tmp_path, **changes)
    (tmp_path / "scores.py").write_text(NAN)
    run = train(recipe)
    assert any(row["actor.train/skipped_steps"] > 0 for row in read_metrics(run))
    assert not list_records(run)


def test_step_that_ends_a_run_is_recorded(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = write_recipe(
        world,
        tmp_path,
        policy__scale="none",
        training__max_skipped=1,
        checkpoint__every=2,
        policy__minibatches=1,
    )
    (tmp_path / "scores.py").write_text(NAN)
    assert run_app(["train", str(recipe)]) == 1
    run = tmp_path / "run"
    assert {step: of.checkpoint for step, of in list_records(run).items()} == {3: 2}
    (tmp_path / "calls").write_text("xx")  # the function counts its calls
    status, out = replay(run, capsys, "--step", "3")
    assert status == 0, out
    assert "recorded because actor.train: 1 optimizer steps in a row were skipped" in out
    (tmp_path / "calls").unlink()
    status, out = replay(run, capsys, "--step", "3")
    assert status == 1 and "DIFFERS  reward.function: score of item" in out


@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_other_algorithms_replay_on_two_ranks(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path, algorithm: str
) -> None:
    """Values, mini-batches and an adaptive coefficient; dynamic sampling in rounds."""
    changes = {"debug__record": {"steps": [1, 2]}, "training__steps": 2}
    if algorithm == "ppo":
        recipe = world.recipe("ppo", tmp_path, ppo__kl={"adaptive": True, "target": 0.01}, **changes)
    else:
        recipe = write_recipe(world, tmp_path, "dapo", **changes)
    run = train(recipe)
    for step in ("1", "2"):
        status, out = replay(run, capsys, "--step", step)
        assert status == 0, out
        assert "DIFFERS" not in out


@pytest.mark.parametrize(
    ("call", "commands", "shown"),
    [("actor.train", "p batch.ids", "(5,)"), ("reward.function", "p len(completions)", "1")],
)
def test_item_opens_in_the_debugger(
    recorded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    commands: str,
    shown: str,
) -> None:
    """The debugger stops in the loss with one item, or in the user's reward function with one completion."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{commands}\ncontinue\n"))
    status, out = replay(recorded, capsys, "--step", "3", "--call", call, "--item", "5")
    assert status == 0, out
    assert f"(Pdb) {shown}\n" in out
