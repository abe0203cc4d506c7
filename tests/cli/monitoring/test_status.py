"""`realrl status` of runs in every state."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.cli.monitoring.status import format_duration, format_status, read_status
from realrl.runtime.output.rundir import HISTORY, add_start, describe_start
from realrl.runtime.supervision.batches import CallProgress
from realrl.runtime.supervision.run_end import RESTARTING, write_end
from tests.cli.monitoring.written_runs import (
    GONE,
    format_line,
    make_batch,
    write_checkpoint,
    write_rank,
    write_run,
    write_samples,
    write_step,
)


def print_status(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run_app(["status", str(path), *options]) == 0
    return capsys.readouterr().out


def test_a_running_run_says_how_far_it_is_and_what_its_ranks_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    for rank in range(2):
        write_rank(run, rank)
    write_step(run)
    write_checkpoint(run, 20)
    (run / "checkpoints" / "step-000030").mkdir()
    text = print_status(run, capsys)
    rows = {line.split("  ")[0]: line for line in text.splitlines() if line}
    assert rows["state"].endswith("running")
    assert "40 of 100 (40 %), started 2 min ago" in rows["step"]
    assert "2.000 s last, 2.000 s median of 20, 1.000 s of 20 before (+100 %), 1.250 s predicted" in text
    assert "at the predicted rate" in rows["end"]
    assert rows["speed"].endswith("1,500 tokens/s · MFU 37 % · idle 20 % (rank 1: 31 %)")
    assert "9.0 %" in rows["0"] and "31 %" in rows["1"]
    assert "reward's score 0.39" in rows["training"] and "reward's score 3" in rows["evaluation"]
    assert "checkpoints/step-000020" in rows["checkpoint"]
    assert (
        "train, run actor.generate [actor] on d2 t1 p1 @0-1 mb=8192" in rows["1"] and "1.00 GiB" in rows["1"]
    )


def test_the_end_is_predicted_from_the_last_steps_and_the_evaluations_to_come(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0)
    write_step(run)
    written = (run / "metrics.jsonl").stat().st_mtime
    found = read_status(run)
    # Evaluations after 50, 60, ... and 100.
    assert found.end == pytest.approx(written + 60 * 2.0 + 6 * 4.0, abs=0.1)
    assert found.predicted_end is not None and found.end is not None
    assert found.end - found.predicted_end == pytest.approx(60 * 0.75)


def test_what_was_before_a_resume_does_not_predict_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0)
    a_day_ago = time.time() - 86_400
    os.utime(run / "metrics.jsonl", (a_day_ago, a_day_ago))
    add_start(run / HISTORY, describe_start(0, "1x8"))
    add_start(run / HISTORY, describe_start(38, "1x4"))
    found = read_status(run)
    # It has begun 100 s ago, and done 2 steps: not enough for a rate.
    assert found.started is not None and found.rates is not None and len(found.rates.steps) == 20
    assert found.end == pytest.approx(found.started + 60 * 2.0 + 6 * 4.0, abs=0.1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(format_line(41, "train", 7.0, {}))
    rates = read_status(run).rates
    assert rates is not None and (rates.steps, rates.before) == ((2.0, 2.0, 7.0), None)
    assert "(99 %)" in format_status(replace(found, step=199, steps=200))


@pytest.mark.parametrize(
    ("status", "message", "state"),
    [
        (0, "", "finished"),
        (1, "no space left", "failed"),
        (2, "bad [red]", "failed"),
        (143, "ended", "interrupted"),
    ],
)
def test_how_a_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, message: str, state: str
) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0, ago=20, pid=GONE)
    write_end(run, status, message)
    text = print_status(run, capsys)
    assert f"state       {state}{message and ': '}{message}\n" in text
    assert "about" not in text and "silent" not in text


def test_a_run_that_was_killed_is_stale_at_once_where_its_processes_are_gone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for rank in range(2):
        write_rank(run, rank, ago=5, pid=GONE)
    found = read_status(run)
    assert (found.state, found.reason) == (
        "stale",
        "ranks 0-1 silent for 5 s; gone: the processes of ranks 0-1",
    )
    write_rank(run, 1, ago=5)
    assert read_status(run).state == "running"
    for rank in range(2):
        write_rank(run, rank, ago=300, host="elsewhere", pid=GONE)
    assert read_status(run).reason == "ranks 0-1 silent for 5 min"


def test_a_silent_rank_of_a_running_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0)
    write_rank(run, 1, ago=40)
    text = print_status(run, capsys)
    assert "running: rank 1 silent for 40 s\n" in text and "silent for 40 s, last: train, run actor" in text


def test_ranks_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0, started=time.time() - 20, restart=1)
    write_rank(run, 1, ago=60)
    found = read_status(run)
    assert [rank.rank for rank in found.ranks] == [0] and not found.silent and found.restarts == 1


def test_a_run_that_goes_on_after_it_had_ended_is_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_end(run, 1, "a failure")
    (run / "summary.json").write_text("{}")
    write_rank(run, 0, ago=-5)
    assert read_status(run).state == "running"


def test_a_finished_run_without_the_files_of_ranks_is_understood(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text('{"seconds": 1.0}')
    assert read_status(run).state == "finished"
    (run / "summary.json").unlink()
    assert read_status(run).state == "running"
    for name in ("metrics.jsonl", "config.yaml"):
        os.utime(run / name, (0, time.time() - 3600))
    found = read_status(run)
    assert (found.state, found.reason) == ("stale", "nothing has been written for 1 h 0 min")


def test_the_status_as_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0, function="reward.py:score", device_limit_bytes=8 << 30)
    found: dict[str, Any] = json.loads(print_status(run, capsys, "--json"))
    assert (found["state"], found["step"], found["steps"], found["algorithm"]) == ("running", 40, 100, "ppo")
    assert found["rates"]["last"] == 2.0 and found["ranks"][0]["function"] == "reward.py:score"
    assert {(m["metric"], m["kind"], m["step"]) for m in found["metrics"]} >= {
        ("actor.train/kl", "train", 40)
    }


def test_watching_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    write_end(run, 0)
    assert print_status(run, capsys, "--watch", "30").count("finished") == 1


def test_a_run_that_is_being_started_again_is_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0, ago=20, pid=GONE)
    write_end(run, RESTARTING, "rank 0 died; starting again")
    found = read_status(run)
    assert (found.state, found.reason, found.silent) == ("running", "rank 0 died; starting again", ())
    assert read_status(run, time.time() + 3600).state == "stale"


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_a_directory_that_holds_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for command in ("status", "watch"):
        assert run_app([command, str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"realrl: {tmp_path / name}")


def test_batches_under_way_say_how_far_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0)
    assert "answers go on" not in print_status(run, capsys)
    reward = {"reward.function": vars(CallProgress(order=1, parts=1, span=1, rows=256))}
    ready = make_batch(41, parts=2)
    ready["calls"] |= reward
    first = [ready, make_batch(42, parts=1, going_on=30), make_batch(43, parts=0)]
    # The heartbeat of rank 1 is older: batch 40 was under way, and batch 43 had not begun.
    second = [make_batch(40, parts=2), make_batch(41, parts=2), make_batch(42, parts=1, going_on=7)]
    write_rank(run, 0, batches=first, works_on=[42, 43])
    write_rank(run, 1, batches=[*second, {"step": 44}, 3, {**ready, "step": "44"}])
    text = print_status(run, capsys)
    assert [line.rstrip() for line in text.splitlines() if line[:2] in ("ba", "41", "42", "43")] == [
        "batch  done                                          answers go on  age",
        "41     actor.generate 2 of 2 parts, reward.function  0 of 256       2 steps",
        "42     actor.generate 1 of 2 parts                   37 of 256      1 step",
        "43     nothing yet                                                  0 steps",
    ]
    assert "on d2 t1 p1 @0-1 mb=8192, batches 42 and 43\n" in text
    write_rank(run, 1, batches=second[:2])
    assert "actor.generate 1 of 2 parts (128 of 256 rows)  30 of 128      1 step" in print_status(run, capsys)


DAMAGED = ("", "{", "[]", "3", "null", '{"a": NaN}', "[" * 5000, '{"traceEvents": 3}', "\x00\x1b[2J")


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files_do_not_hide_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0)
    write_step(run)
    write_samples(run, 10, [])
    for file in [file for file in run.rglob("*") if file.is_file() and file.parent.name != "ranks"]:
        file.write_text(content)
    (run / "ranks" / "rank-1.json").write_text(content)
    assert "running" in print_status(run, capsys)


def test_what_a_run_wrote_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, 0, host="\x1b]0;title\x07", instruction="run \x1b[2J\nrank", function="\x9b31m")
    write_end(run, 1, "\x1b[31mred")
    text = print_status(run, capsys)
    assert all(letter.isprintable() or letter == "\n" for letter in text) and "red" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.523, "0.52 s"),
        (45.2, "45 s"),
        (720, "12 min"),
        (3600, "1 h 0 min"),
        (12000, "3 h 20 min"),
        (86400 * 2 + 4 * 3600, "2 d 4 h"),
    ],
)
def test_durations_have_one_or_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
