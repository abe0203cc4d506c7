"""How a process ended is told in one error message, and of several processes the first cause is told."""

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.runtime.processes.logs import keep_logs
from realrl.runtime.supervision.failures import (
    CAUSE,
    CONSEQUENCE,
    DEATH,
    Failure,
    describe_failure,
    find_first_cause,
    report_failure,
)
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE

GLOO = (
    "[/gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1. This is typically caused by a crash"
)
FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("error", "status", "message", "trace"),
    [
        (UserError("correct\nthis"), 2, "correct this", ""),
        (UserCodeError("your judge failed", "its traceback"), 2, "your judge failed", "its traceback"),
        (RunError("learning has gone wrong"), 1, "learning has gone wrong", ""),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b"),
            1,
            "a/b cannot be written: No space left",
            "",
        ),
        (SafetensorError(FULL), 1, "No space left on device", ""),
        (MemoryError(), 1, "out of memory", ""),
        (KeyError("name"), 1, "unexpected KeyError: 'name'; see the traceback above", "KeyError: 'name'"),
        (FileNotFoundError(2, "No such file", "a/b"), 1, "unexpected FileNotFoundError", "FileNotFoundError"),
    ],
)
def test_only_unexpected_errors_have_a_traceback(
    error: Exception, status: int, message: str, trace: str
) -> None:
    failure = describe_failure(error)
    assert (failure.status, failure.distance) == (status, CAUSE)
    assert failure.message.startswith(message) and "\n" not in failure.message
    assert trace in failure.trace and bool(failure.trace) == bool(trace)


def test_a_rank_whose_peer_has_gone_is_a_consequence_and_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert describe_failure(RuntimeError(f"Gloo connectFullMesh failed with {GLOO}")).distance == CONSEQUENCE
    failure = describe_failure(RuntimeError(GLOO))
    assert (failure.distance, failure.trace) == (CONSEQUENCE, "")
    assert (
        failure.message.startswith("rank 1: lost connection to a peer rank: ")
        and "typically" not in failure.message
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot open /home/igloo/model.cc:1"),
        RuntimeError("[/home/igloo/cuda.cc:1] out of range"),
        ValueError(GLOO),
    ],
)
def test_a_path_that_looks_like_gloo_blames_no_other_rank(error: Exception) -> None:
    failure = describe_failure(error)
    assert failure.distance == CAUSE and failure.trace


def test_the_first_cause_comes_before_deaths_and_consequences() -> None:
    def failure(distance: int, time: float) -> Failure:
        return Failure("", 1, 0, time, distance)

    late, early = failure(CAUSE, 9.0), failure(CAUSE, 8.0)
    death, consequence = failure(DEATH, 2.0), failure(CONSEQUENCE, 1.0)
    assert find_first_cause([consequence, death, late, early]) is early
    assert find_first_cause([consequence, death]) is death
    assert find_first_cause([failure(CONSEQUENCE, 3.0), consequence]) is consequence


@pytest.mark.parametrize(
    ("rank", "local_rank", "printed"),
    [("0", "0", "realrl: correct this\n"), ("1", "1", ""), ("8", "0", "realrl: rank 8: correct this\n")],
)
def test_one_rank_per_node_prints_a_users_mistake_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    local_rank: str,
    printed: str,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert report_failure(UserError("correct\nthis")) == 2
    assert capsys.readouterr().err == printed


def test_any_rank_prints_its_own_failure_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variables = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    for name, value in {**variables, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "3" / "error.json")}.items():
        monkeypatch.setenv(name, value)
    assert report_failure(RunError("no space")) == 1
    assert capsys.readouterr().err == "realrl: rank 3: no space\n"
    assert json.loads((tmp_path / "3" / "error.json").read_text())["message"] == "no space"


def test_logs_are_copied_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, other = tmp_path / "scratch", tmp_path / "other"
    scratch.mkdir()
    other.mkdir()
    (scratch / "rank-0.log").touch()
    assert keep_logs(scratch, tmp_path / "logs") is None
    (scratch / "rank-1.log").write_text("a traceback")
    assert keep_logs(scratch, tmp_path / "logs") == tmp_path / "logs"
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["rank-1.log"]
    monkeypatch.setattr("tempfile.tempdir", str(other))
    kept = keep_logs(scratch, tmp_path / "no" / "such" / "logs")
    assert kept is not None and kept.parent == other and os.listdir(kept) == ["rank-1.log"]


def test_reporting_a_failure_does_not_recreate_the_directory_of_a_gone_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "gone"))
    assert report_failure(RuntimeError("its peer has gone")) == 1
    assert not (tmp_path / "gone").exists()
