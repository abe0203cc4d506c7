import json
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.recipe.load import dump_experiment, load_experiment
from realrl.recipe.registry import find_algorithm
from realrl.runtime.output.algorithm_record import RECORD, AlgorithmRecord

DEMO = str(Path(__file__).parents[2] / "recipes" / "demo" / "ppo.yaml")


def write_run(path: Path, algorithm: str, lines: list[dict[str, Any]], seconds: float = 10.0) -> str:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    AlgorithmRecord.of(find_algorithm(algorithm)[0], ("actor", "critic")).save(path)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps({"seconds": seconds}))
    return str(path)


def line(step: int, kind: str, **metrics: float | None) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "kind": kind, "seconds": 1.0, "metrics": named}


def sft_run(path: Path) -> str:
    return write_run(path, "sft", [line(0, "eval", actor__loss=3.0), line(1, "train", actor__loss=2.0)], 5.0)


def reward_run(path: Path) -> str:
    lines = [
        line(step, "eval", inference__loss=0.6, inference__accuracy=a) for step, a in ((0, 0.5), (9, 0.78))
    ]
    return write_run(path, "reward", lines, 7.0)


def ppo_run(path: Path) -> str:
    lines = [
        line(0, "eval", reward__score=-0.5, ref__kl=0.0, judge=0.1),
        line(1, "train", actor__score=9.0, actor__kl=9.0),
        line(5, "eval", reward__score=0.75, ref__kl=2.5, judge=0.5),
    ]
    run = write_run(path, "ppo", lines, 8.0)
    (path / "samples").mkdir()
    for step, completion in ((0, " dull [b]"), (3, " middling"), (5, " wonderful")):
        rows = [{"prompt": "The film is", "completion": completion, "score": 0.5, "judge": -0.25}]
        (path / "samples" / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return run


def read_report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def test_report_of_all_three_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [sft_run(tmp_path / "sft"), reward_run(tmp_path / "reward"), ppo_run(tmp_path / "ppo")]
    assert run_app(["report", *runs, "--out", str(tmp_path / "out")]) == 0
    assert read_report(tmp_path / "out") == {
        "sft_loss_before": 3.0,
        "sft_loss_after": 3.0,
        "reward_pair_accuracy": 0.78,
        "judge_before": 0.1,
        "judge_after": 0.5,
        "reward_before": -0.5,
        "reward_after": 0.75,
        "kl": 2.5,
        "seconds": {"sft": 5.0, "reward": 7.0, "ppo": 8.0, "total": 20.0},
    }
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "dull [b]" in printed and "wonderful" in printed and "middling" not in printed
    assert "0.78" in printed


def test_turns_of_the_model_are_marked_with_and_without_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ppo_run(tmp_path / "ppo")
    parts = [
        {"text": " a [b]</s>", "tokens": 4, "sampled": True, "reward": 0.5},
        {"text": "\nlater\n", "tokens": 3, "sampled": False},
    ]
    numbers = {"score": None, "environment_reward": 0.5, "turns": 1, "failed_calls": 0}
    for step, failed in ((0, False), (5, True)):
        row = {"prompt": "The film is", "completion": "a [b]", "environment_failed": failed}
        text = json.dumps({**row, **numbers, "trajectory": parts}) + "\n"
        (tmp_path / "ppo" / "samples" / f"step-{step:06d}.jsonl").write_text(text)
    monkeypatch.setenv("COLUMNS", "200")
    assert run_app(["report", run, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "([[ ]]: sampled by the model, the rest: written by the environment" in printed
    assert "[[a [b]</s>]] reward +0.5" in printed and "later" in printed and "\x1b" not in printed
    assert "environment_reward +0.50  turns 1  failed_calls 0 " in printed
    assert printed.count("the environment failed") == 1
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run_app(["report", run, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[32ma [b]</s>\x1b[0m" in printed and "\x1b[2mlater\x1b[0m" in printed
    assert "[[" not in printed and "green: sampled by the model" in printed


def test_a_report_has_only_the_figures_of_the_runs_given(tmp_path: Path) -> None:
    assert run_app(["report", reward_run(tmp_path / "r"), "--out", str(tmp_path)]) == 0
    assert read_report(tmp_path) == {"reward_pair_accuracy": 0.78, "seconds": {"reward": 7.0, "total": 7.0}}


def test_a_last_figure_that_was_not_finite_is_not_taken_from_an_earlier_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(0, "eval", reward__score=0.5), line(5, "eval", reward__score=None)]
    assert run_app(["report", write_run(tmp_path / "p", "ppo", lines), "--out", str(tmp_path)]) == 0
    found = read_report(tmp_path)
    assert (found["reward_before"], found["reward_after"]) == (0.5, None)
    assert "not finite" in capsys.readouterr().out


def test_a_key_that_two_algorithms_use_has_the_name_of_its_algorithm(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "from dataclasses import replace\n"
        "from realrl.algorithms.ppo import ALGORITHM as PPO\n"
        "ALGORITHM = replace(PPO, name='other', summary=PPO.summary[-1:])\n"
    )
    other = write_run(tmp_path / "o", str(tmp_path / "other.py"), [line(0, "eval", ref__kl=1.5)], 2.0)
    (tmp_path / "other.py").unlink()
    assert run_app(["report", ppo_run(tmp_path / "ppo"), other, "--out", str(tmp_path / "out")]) == 0
    found = read_report(tmp_path / "out")
    assert (found["ppo.kl"], found["other.kl"]) == (2.5, 1.5) and "kl" not in found
    assert found["seconds"] == {"ppo": 8.0, "other": 2.0, "total": 10.0}


def test_a_run_without_evaluations_reports_losses_and_scores_of_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = ((1, 3.0, 0.25), (2, 1.6e-5, 0.5))
    lines = [
        line(step, "train", **{"actor.train__loss": loss, "actor.train__score": score, "other": 1.0})
        for step, loss, score in figures
    ]
    assert run_app(["report", write_run(tmp_path / "s", "grpo", lines, 5.0), "--out", str(tmp_path)]) == 0
    seconds = {"grpo": 5.0, "total": 5.0}
    found = {"grpo.actor.train/loss": 1.6e-5, "grpo.actor.train/score": 0.5, "seconds": seconds}
    assert read_report(tmp_path) == found
    printed = capsys.readouterr().out
    assert "grpo: actor.train/loss of the last step" in printed and "1.6e-05" in printed


def test_a_run_without_curves_still_gets_a_report(tmp_path: Path) -> None:
    assert run_app(["report", write_run(tmp_path / "s", "sft", []), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.png").exists()


@pytest.mark.parametrize("name", ["report.json", "report.png"])
def test_a_report_that_cannot_be_written_leaves_an_earlier_one_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = sft_run(tmp_path / "sft")
    (tmp_path / name).write_text("earlier")
    (tmp_path / f".{name}.partial").symlink_to("/dev/full")
    assert run_app(["report", run, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"realrl: --out {tmp_path} cannot be written: No space left on device\n"
    assert (tmp_path / name).read_text() == "earlier"


@pytest.mark.parametrize("missing", ["config.yaml", RECORD, "metrics.jsonl"])
def test_a_directory_that_is_no_finished_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    run = sft_run(tmp_path / "sft")
    (tmp_path / "sft" / missing).unlink()
    assert run_app(["report", run, "--out", str(tmp_path)]) == 2
    assert f"holds no finished run: {missing} is missing" in capsys.readouterr().err


@pytest.mark.parametrize("torn", ["", '{"step": 3, "ki'])
def test_an_interrupted_run_is_refused_with_what_there_is_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: str
) -> None:
    run = ppo_run(tmp_path / "ppo")
    recipe = load_experiment(DEMO, ["training.steps=12"])
    (tmp_path / "ppo" / "config.yaml").write_text(dump_experiment(recipe))
    (tmp_path / "ppo" / "summary.json").unlink()
    for name in ("step-000002", "step-000004"):
        (tmp_path / "ppo" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "ppo" / "checkpoints" / "step-000002" / "manifest.json").touch()
    with open(tmp_path / "ppo" / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert run_app(["report", run, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"realrl: {run}: a report takes finished runs; this run is still going, or ended after step 5 of 12;"
        f" saved: {run}/checkpoints/step-000002; metrics up to step 5 in {run}/metrics.jsonl\n"
    )


def test_a_malformed_line_of_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sft_run(tmp_path / "sft")
    with open(tmp_path / "sft" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "ki')
    assert run_app(["report", run, "--out", str(tmp_path)]) == 2
    assert "metrics.jsonl, line 3: not valid JSON" in capsys.readouterr().err


def test_two_runs_of_one_algorithm_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [sft_run(tmp_path / "a"), sft_run(tmp_path / "b")]
    assert run_app(["report", *runs, "--out", str(tmp_path)]) == 2
    assert "are both sft runs" in capsys.readouterr().err


def test_a_damaged_record_of_the_algorithm_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sft_run(tmp_path / "run")
    (tmp_path / "run" / RECORD).write_text('{"name": "sft"}')
    assert run_app(["report", run, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"realrl: {run}/{RECORD}: trained: missing")
