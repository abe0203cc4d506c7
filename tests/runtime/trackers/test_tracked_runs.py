"""Runs with trackers: they end well whatever a tracker does, and no secret is left in their directory."""

import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.recipe.load import load_experiment
from realrl.runtime.output import tracker_threads, trackers
from realrl.runtime.output.tracker_threads import TrackedRun
from realrl.runtime.output.trackers import WandbTracker
from tests.conftest import World, read_metrics
from tests.runtime.processes import end, start

HANGING = """
import time
def init(**settings):
    time.sleep(3600)
Settings = dict
"""


def test_a_tracker_that_hangs_does_not_keep_the_process(world: World, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(HANGING)
    more = {"trackers__wandb": {}, "trackers__patience": 0.1, "training__steps": 2}
    recipe = world.recipe("sft", tmp_path, **more)
    status, error = end(start("train", str(recipe), PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}"))
    assert status == 0 and len(read_metrics(tmp_path / "run")) == 2
    assert "trackers.wandb had not ended in time (trackers.patience) and misses 2 of 2 records" in error
    assert error.splitlines()[-1].startswith("done in")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_library_that_is_missing_is_named_before_anything_is_loaded(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    setting: object = True if name == "tensorboard" else {}
    experiment = load_experiment(str(world.recipe("sft", tmp_path, **{f"trackers__{name}": setting})))
    # Only a directory of this name, as Weights & Biases leaves one.
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError, match=rf"pip install 'realrl\[{name}\]'"):
        tracker_threads.check_trackers(experiment)


def test_disabled_trackers_need_no_library(world: World, tmp_path: Path) -> None:
    more = {"trackers__wandb": {"mode": "disabled"}, "trackers__tensorboard": False}
    assert not list(
        tracker_threads._list_names(load_experiment(str(world.recipe("sft", tmp_path, **more))).trackers)
    )


REWARD = """
API_KEY = "in-the-code-1"

def score(completions):
    import os
    os.write(2, b"cannot reach https://me:in-a-log-2@host\\n")
    if os.environ.get("RANK") == "1":
        raise ValueError("password=" + "-".join(("in", "a", "trace", "5")))
    return [float(len(text)) for text in completions]
"""
SECRETS = ("in-the-code-1", "in-a-log-2", "in-the-environment-3", "in-a-url-4", "in-a-trace-5")


class ScoringService(BaseHTTPRequestHandler):
    """Scores whoever sends the header with the secret."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["X"] == "in-the-environment-3" and "in-a-url-4" in self.path
        answer = json.dumps({"scores": [1.0] * len(body["completions"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


class Spy:
    """A tracker that writes all it is told into the run's directory."""

    def __init__(self, *_: object) -> None:
        self.file = Path()

    def open(self, run: TrackedRun) -> None:
        self.file = run.directory / "told.json"
        self.file.write_text(json.dumps(run.settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing of it is text."""

    def note(self, text: str) -> None:
        self.file.write_text(self.file.read_text() + text)

    def close(self, *, done: bool) -> None:
        """Nothing is open."""


def test_no_secret_lands_in_the_directory_of_a_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "in-the-environment-3")
    monkeypatch.setattr(tracker_threads, "TensorBoardTracker", Spy)
    monkeypatch.setattr(tracker_threads, "_list_names", lambda config: iter(["tensorboard"]))
    monkeypatch.setattr(tracker_threads, "_is_installed", lambda name: True)
    (tmp_path / "reward.py").write_text(REWARD)
    wandb = {"mode": "disabled", "tags": ["in-the-environment-3"], "name": "https://u:in-a-url-4@host"}
    with ThreadingHTTPServer(("127.0.0.1", 0), ScoringService) as service:
        threading.Thread(target=service.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{service.server_port}/?api_key=in-a-url-4"
        http = {"url": url, "headers": {"X": "WANDB_API_KEY"}}
        reward = {"code": {"function": f"{tmp_path / 'reward.py'}:score"}, "service": {"http": http}}
        more: dict[str, Any] = {"reward": reward, "trackers__wandb": wandb, "training__steps": 1}
        recipe = world.recipe("grpo", tmp_path, **more)
        status = run_app(["train", str(recipe), "models.reward=null"])
        service.shutdown()
    assert status == 0
    files = find_files(tmp_path / "run")
    for name in ("told.json", "config.yaml", "code/code.function.py"):
        assert b"<redacted>" in files[name]
    assert not [
        (secret, name) for name, held in files.items() for secret in SECRETS if secret.encode() in held
    ]


def test_no_secret_lands_in_logs_or_error_messages(world: World, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    reward = {"function": f"{tmp_path / 'reward.py'}:score"}
    recipe = world.recipe("grpo", tmp_path, reward=reward, cluster="1x2", plan="symmetric")
    status, error = end(start("train", str(recipe), "models.reward=null"))
    assert status == 2 and "<redacted>" in error
    files = find_files(tmp_path / "run")
    assert b"<redacted>" in files["logs/rank-1.log"]
    files["standard error"] = error.encode()
    assert not [
        (secret, name) for name, held in files.items() for secret in SECRETS if secret.encode() in held
    ]


def find_files(directory: Path) -> dict[str, bytes]:
    """What each file under a directory holds, by its path inside."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def test_a_config_without_its_secrets_asks_for_them(world: World, tmp_path: Path) -> None:
    wandb = {"mode": "disabled", "name": "https://u:in-a-url-4@host"}
    recipe = world.recipe("sft", tmp_path, trackers__wandb=wandb)
    config = tmp_path / "config.yaml"
    config.write_text(trackers_config(recipe))
    with pytest.raises(UserError, match=r"trackers\.wandb\.name holds <redacted>.*=VALUE behind"):
        load_experiment(str(config))
    assert load_experiment(str(config), ["trackers.wandb.name=x"]).trackers.wandb.name == "x"  # type: ignore[union-attr]


def trackers_config(recipe: Path) -> str:
    from realrl.recipe.load import dump_experiment

    return dump_experiment(load_experiment(str(recipe)))


MISTAKES = {
    "trackers__mlflow": ({"tracking_uri": "https://me:in-vain-6@host"}, "MLFLOW_TRACKING_URI"),
    "reward__http": ({"url": "https://me:in-vain-6@host"}, "headers.Authorization"),
    "reward__http ": (
        {"url": "http://127.0.0.1:1", "headers": {"Authorization": "Bearer in-vain-6"}},
        "must be the name of an environment variable",
    ),
    "reward__http  ": (
        {"url": "http://127.0.0.1:1", "headers": {"Authorization": "in_vain_6"}},
        "the environment variable is not set",
    ),
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_secrets_in_wrong_places_are_refused_and_not_repeated(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    value, words = MISTAKES[setting]
    more = {setting.strip(): value}
    recipe = world.recipe("grpo", tmp_path, training__steps=1, **more)
    assert run_app(["train", str(recipe), "models.reward=null"]) == 2
    error = capsys.readouterr().err
    assert words in error and "in-vain-6" not in error and "in_vain_6" not in error
    assert not (tmp_path / "run").exists()


def test_tensorboard_replaces_steps_that_are_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The second start begins again before the first step, the third one after the second.
    for done, steps, value in ((0, [1, 2], 0.0), (0, [1, 2, 3, 4, 5], 1.0), (2, [3, 4, 5, 4], 2.0)):
        board = trackers.TensorBoardTracker()
        board.open(TrackedRun(directory=tmp_path, settings={"a": 1}, done=done))
        for step in steps:
            board.log(step, {"train/loss": value})
        board.close(done=True)
    found = EventAccumulator(str(tmp_path / trackers.BOARD))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_wandb_offline_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    from realrl.recipe.run_settings import WandbConfig

    assert wandb
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(sys, "argv", ["realrl", "reward.password=in-an-argument"])
    ids, rows = [], []
    for done, notes in ((0, []), (2, ["a note"])):
        run = TrackedRun(directory=tmp_path, settings={"seed": 1}, done=done, notes=notes)
        tracker = WandbTracker(WandbConfig(mode="offline", tags=["a"]))
        tracker.open(run)
        tracker.note("a note")
        for step in (done + 1, done + 2, done + 3):
            tracker.log(step, {"train/loss": 0.5 * step})
        tracker.close(done=True)
        ids.append(run.load_id("wandb"))
    assert ids[0] is not None and ids[0] == ids[1]
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        assert ids[0] in file.name
        for data in read_log(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.notes:
                notes = record.run.notes
            items = {tuple(i.nested_key) or (i.key,): i.value_json for i in record.history.item}
            if items:
                rows.append((json.loads(items[("step",)]), json.loads(items[("train/loss",)])))
    assert rows == [(step, 0.5 * step) for step in (1, 2, 3, 3, 4, 5)] and notes == "a note\na note"
    for file in (found for found in tmp_path.rglob("*") if found.is_file()):
        assert b"0123456789" * 4 not in file.read_bytes() and b"in-an-argument" not in file.read_bytes()


def read_log(file: Path) -> Iterator[bytes]:
    """Records of a file of W&B: 7 bytes, then LevelDB's log format, here within one block."""
    held = file.read_bytes()
    assert len(held) < 32768
    place = 7
    while place < len(held):
        _, length, kind = struct.unpack("<IHB", held[place : place + 7])
        assert kind == 1, "a whole record"
        yield held[place + 7 : place + 7 + length]
        place += 7 + length


def refuse(*_: object, **more: object) -> None:
    raise OSError("no server")


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from realrl.recipe.run_settings import MlflowConfig
    from realrl.runtime.output.trackers import MlflowTracker

    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    settings = {"seed": 1, "data": {"batch": 8}}
    for done, notes in ((0, []), (2, ["a note"])):
        run = TrackedRun(directory=tmp_path, settings=settings, done=done, notes=notes)
        tracker = MlflowTracker(MlflowConfig(tracking_uri=address, tags={"a": "b", "password": "abc"}))
        if not done:  # a server that fails after it has made the run
            with monkeypatch.context() as patch, pytest.raises(OSError):
                patch.setattr(MlflowClient, "log_batch", refuse)
                tracker.open(run)
        tracker.open(run)
        tracker.note("a note")
        for step in (done + 1, done + 2, done + 3):
            tracker.log(step, {"eval/pass@8": 0.5 * step})
        tracker.close(done=bool(done))
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("realrl")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == tmp_path.name
    assert found.data.params == {"seed": "1", "data.batch": "8"} and found.data.tags["a"] == "b"
    assert found.data.tags["password"] == "<redacted>"
    assert found.data.tags["mlflow.note.content"] == "a note\n\na note"
    history = client.get_metric_history(found.info.run_id, "eval/pass_8")
    assert sorted((m.step, m.value) for m in history) == [(s, 0.5 * s) for s in (1, 2, 3, 3, 4, 5)]
