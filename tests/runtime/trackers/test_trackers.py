"""Trackers that raise, hang or are slow neither stop nor delay a run, and what they miss is said."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from realrl.runtime.output import tracker_threads
from realrl.runtime.output.tracker_threads import CAPACITY, TRIES, BackgroundTracker, TrackedRun, Trackers


class Fake:
    """Keeps what it gets. Raises as often as told, in the call of that name; waits where `gate` is closed."""

    def __init__(self, fails: Mapping[str, int] | None = None) -> None:
        self.fails = dict(fails or {})
        self.gate = threading.Event()
        self.gate.set()
        self.got: list[object] = []

    def _do(self, name: str, what: object) -> None:
        self.gate.wait()
        if self.fails.get(name, 0):
            self.fails[name] -= 1
            raise RuntimeError(f"{name} at https://me:word@host")
        self.got.append(what)

    def open(self, run: TrackedRun) -> None:
        self._do("open", "open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._do("log", (step, dict(metrics)))

    def note(self, text: str) -> None:
        self._do("note", text)

    def close(self, *, done: bool) -> None:
        self._do("close", f"close {done}")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_threads, "PAUSE", 0.001)


def start(fake: Fake, tmp_path: Path, said: list[str], **more: float) -> Trackers:
    run = TrackedRun(directory=tmp_path, settings={})
    capacity = int(more.get("capacity", CAPACITY))
    tracker = BackgroundTracker("trackers.fake", fake, run, capacity)
    return Trackers([tracker], said.append, more.get("patience", 30.0))


def test_a_tracker_gets_everything_in_order_under_the_names_of_its_kind(tmp_path: Path) -> None:
    fake, said = Fake(), list[str]()
    trackers = start(fake, tmp_path, said)
    trackers.note("a note with https://me:word@host")
    trackers.log(1, "train", 0.5, {"actor.train/loss": 2.0})
    trackers.log(1, "eval", 0.25, {"judge": 3.0})
    trackers.close(done=True)
    assert fake.got == [
        "open",
        "a note with https://<redacted>@host",
        (1, {"train/actor.train/loss": 2.0, "train/seconds": 0.5}),
        (1, {"eval/judge": 3.0, "eval/seconds": 0.25}),
        "close True",
    ]
    assert not said


@pytest.mark.parametrize("call", ["open", "log"])
def test_what_fails_for_a_while_is_repeated_and_said_once(tmp_path: Path, call: str) -> None:
    fake, said = Fake({call: 2}), list[str]()
    trackers = start(fake, tmp_path, said)
    for step in (1, 2):
        trackers.log(step, "train", 0.5, {})
    while len(fake.got) < 3:
        time.sleep(0.001)
    trackers.close(done=True)
    assert [record[0] for record in fake.got if isinstance(record, tuple)] == [1, 2]
    assert said == [
        f"trackers.fake fails: RuntimeError: {call} at https://<redacted>@host; the run continues without it"
    ]


def test_what_a_failing_tracker_misses_is_counted_at_the_end(tmp_path: Path) -> None:
    fake, said = Fake({"open": 10**9}), list[str]()
    trackers = start(fake, tmp_path, said)
    for step in range(5):
        trackers.log(step, "train", 0.5, {})
    trackers.close(done=True)
    assert fake.got == [] and len(said) == 2
    assert said[1] == "trackers.fake misses 5 of 5 records; metrics.jsonl has them all"


def test_a_record_that_is_refused_does_not_keep_the_others(tmp_path: Path) -> None:
    fake, said = Fake({"log": TRIES}), list[str]()
    trackers = start(fake, tmp_path, said)
    for step in (1, 2):
        trackers.log(step, "train", 0.5, {})
    while len(fake.got) < 2:
        time.sleep(0.001)
    trackers.close(done=True)
    assert [record[0] for record in fake.got if isinstance(record, tuple)] == [2]
    assert said[-1].startswith("trackers.fake misses 1 of 2 records")


def test_a_slow_tracker_misses_the_oldest_records(tmp_path: Path) -> None:
    fake, said = Fake(), list[str]()
    fake.gate.clear()
    trackers = start(fake, tmp_path, said, capacity=3)
    for step in range(20):
        trackers.log(step, "train", 0.5, {})
    fake.gate.set()
    trackers.close(done=True)
    steps = [record[0] for record in fake.got if isinstance(record, tuple)]
    assert steps[-3:] == [17, 18, 19] and len(steps) <= 4
    assert "more than 3 records wait" in said[0]
    assert said[1].startswith(f"trackers.fake misses {20 - len(steps)} of 20 records")


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path) -> None:
    fake, said = Fake(), list[str]()
    fake.gate.clear()
    trackers = start(fake, tmp_path, said, patience=0.01)
    trackers.log(1, "train", 0.5, {})
    trackers.close(done=True)
    assert said == [
        "trackers.fake had not ended in time (trackers.patience) and misses 1 of 1 records; metrics.jsonl has them"
        " all"
    ]
    fake.gate.set()


def test_an_id_is_kept_for_the_run_that_is_resumed(tmp_path: Path) -> None:
    run = TrackedRun(directory=tmp_path, settings={})
    assert run.load_id("wandb") is None
    run.save_id("wandb", "abc")
    assert TrackedRun(directory=tmp_path, settings={}, done=5).load_id("wandb") == "abc"
    (tmp_path / "trackers" / "wandb.json").write_text("[]")
    assert run.load_id("wandb") is None
