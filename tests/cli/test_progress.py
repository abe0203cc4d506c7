"""What a person sees of a run, at a terminal and in a log file."""

import pytest

from realrl.cli.progress import Progress
from realrl.recipe.load import parse_experiment
from realrl.runtime.observer import MetricsRecord
from tests.cli.test_costs_table import predicted

EXPERIMENT = parse_experiment(
    {
        "algorithm": "ppo",
        "run_dir": "runs/x",
        "data": {"train": "x.jsonl"},
        "models": {"actor": {"path": "a"}, "reward": {"path": "r"}},
    }
)
METRICS = {
    "actor.train/score": 1.23456,
    "actor.train/kl": 0.5,
    "actor.train/response_tokens": 20.0,
    "critic.train/value_loss": 2e-5,
    "judge": float("nan"),
    "actor.train/something_else": 3.0,
}
SHOWN = "score 1.235  kl 0.5  response_tokens 20  value_loss 2e-05  judge nan"
RUN_DIR = "runs/" + "long-name/" * 12


def whole_run(progress: Progress) -> None:
    with progress:
        progress.note("data.train: skipped 2 records, first [x]:4 :smile: [bold]kept[/bold]")
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(0, "eval", 1.0, METRICS))
        for step in (1, 2, 3):
            progress.record(MetricsRecord(step, "train", 0.5, METRICS))
        progress.end(RUN_DIR, 12.3)


def test_a_log_has_plain_whole_lines_and_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("realrl.cli.progress._QUIET_SECONDS", -1.0)
    whole_run(Progress())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "note: data.train: skipped 2 records, first [x]:4 :smile: [bold]kept[/bold]",
        f"step 0/3 evaluation: {SHOWN}",
        *(f"step {step}/3 0.50 s: {SHOWN}" for step in (1, 2, 3)),
        f"done in 12 s; results in {RUN_DIR}",
    ]


def test_a_log_is_not_flooded_with_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.cli.progress._QUIET_SECONDS", 1e9)
    whole_run(Progress())
    assert "0.50 s" not in capsys.readouterr().err


def test_nothing_is_printed_about_a_run_that_never_began(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Progress():
        raise KeyError
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_its_cursor_back_whatever_happens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    hide, show = "\x1b[?25l", "\x1b[?25h"
    progress = Progress()
    with pytest.raises(KeyboardInterrupt), progress:
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(1, "train", 0.5, METRICS))
        raise KeyboardInterrupt
    shown = capsys.readouterr().err
    assert "1/3" in shown and "score 1.235" in shown and shown.rindex(hide) < shown.rindex(show)


def test_a_training_line_ends_with_the_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.cli.progress._QUIET_SECONDS", -1.0)
    alone = {"perf/tokens_per_s": 12345.6, "perf/mfu": 0.412, "perf/idle": 0.02, "perf/actor.train/mfu": 0.5}
    even = {"perf/tokens_per_s": 80.0, "perf/idle": 0.034, "perf/idle_max": 0.05}
    uneven = {"perf/idle": 0.2, "perf/idle_max": 0.4, "perf/idle/rank-0": 0.0, "perf/idle/rank-1": 0.4}
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        for step, speed in enumerate((alone, even, uneven), 1):
            progress.record(MetricsRecord(step, "train", 0.5, {"actor.train/kl": 1.0, **speed}))
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "kl 1  12,346 tokens/s  MFU 41 %",
        "kl 1  80 tokens/s  idle 3.4 %",
        "kl 1  idle 20 % (rank 1: 40 %)",
    ]


def test_headlines_of_one_name_are_shown_with_their_calls(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"actor.train/score": 1.0, "reward.inference/score": 2.0, "actor.train/kl": 3.0}
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(0, "eval", 1.0, metrics))
        progress.record(MetricsRecord(1, "eval", 1.0, METRICS))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("evaluation: reward.inference/score 2  actor.train/score 1  kl 3")
    assert lines[1].endswith(SHOWN)


def test_shares_of_answers_are_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(0, "eval", 1.0, {"reward.inference/finished": 0.0}))
        progress.record(
            MetricsRecord(1, "eval", 1.0, {"reward.inference/finished": 0.5, "actor.train/finished": 1.0})
        )
    lines = [line.partition("evaluation: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "ended by themselves 0 %",
        "reward.inference/ended by themselves 50 %  actor.train/ended by themselves 100 %",
    ]


def test_a_short_run_ends_with_the_losses_of_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(3, "train", 0.5, {**METRICS, "actor.train/loss": 0.25}))
        progress.costs(predicted(steps=3))
    assert f"last step: {SHOWN}  loss 0.25" in capsys.readouterr().err


def test_a_step_that_taught_nothing_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.cli.progress._QUIET_SECONDS", -1.0)
    metrics = {"grad_norm": 0.0, "learning_rate": 1.0, "groups_of_equal_rewards": 1.0, "kl": 0.5}
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        record = {f"actor.train/{name}": value for name, value in metrics.items()}
        progress.record(MetricsRecord(1, "train", 0.5, record))
    assert "nothing learnt: the answers to each prompt had equal rewards  kl 0.5" in capsys.readouterr().err


def test_a_mean_over_some_prompts_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.begin(EXPERIMENT, 3)
        progress.record(MetricsRecord(0, "eval", 1.0, {"pass@6": 0.5, "pass@6/prompts": 3}))
    assert capsys.readouterr().err.endswith("evaluation: pass@6 0.5 (3 prompts)\n")
