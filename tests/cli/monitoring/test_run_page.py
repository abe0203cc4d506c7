"""The page of a run: the server's answers, access control, and escaping of the run's texts."""

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from realrl.cli.monitoring.run_page import RunPage
from realrl.cli.monitoring.server import PageServer, is_loopback
from realrl.program.trace_file import make_event
from realrl.runtime.supervision.run_end import KEPT_NOTES, NOTES, NoteFile, read_notes
from tests.cli.monitoring.test_status import DAMAGED
from tests.cli.monitoring.written_runs import (
    CALLS,
    add_steps,
    make_batch,
    write_checkpoint,
    write_rank,
    write_run,
    write_samples,
    write_step,
)
from tests.runtime.processes import end, start

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Client:
    """A browser, as far as requests go."""

    def __init__(self, server: PageServer) -> None:
        self.server = server

    def ask(
        self, path: str, *, host: str | None = None, method: str = "GET", **query: Any
    ) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=20)
        token = {"token": self.server.token}
        named = {"Host": host} if host is not None else {}
        connection.request(method, f"{path}?{urlencode(token | query)}", headers=named)
        answer = connection.getresponse()
        text = answer.read().decode()
        self.headers = dict(answer.getheaders())
        connection.close()
        return answer.status, text

    def read(self, path: str, **query: Any) -> Any:
        status, text = self.ask(path, **query)
        assert status == 200, text
        return json.loads(text)


@contextmanager
def served(run: Path) -> Iterator[Client]:
    with PageServer("127.0.0.1", 0, RunPage(run).routes) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run")
    for rank in range(2):
        write_rank(run, rank)
    write_step(run)
    write_samples(run, 30, [{"prompt": "A", "completion": HOSTILE, "score": 1.5, "judge": None, "extra": 1}])
    return run


def test_the_page_has_what_the_run_says(run: Path) -> None:
    NoteFile(run).add(HOSTILE)
    write_checkpoint(run, 20)
    with served(run) as client:
        status, page = client.ask("/")
        assert status == 200 and "<h1>run</h1>" in page
        found = client.read("/api/run")
        assert found["status"]["state"] == "running" and found["status"]["step"] == 40
        assert found["status"]["speed"]["mfu"] == 0.37 and found["status"]["speed"]["idle/rank-1"] == 0.31
        assert ["actor.train/score" in curve[0] or curve[1] for curve in found["curves"]]
        assert [rank["does"][:10] for rank in found["status"]["ranks"]] == ["train, run"] * 2
        assert [device["during"] for device in found["memory"]] == ["actor.train"] * 2
        assert found["notes"][0]["text"] == HOSTILE and found["sampled"] == [30]
        assert [checkpoint["name"] for checkpoint in found["checkpoints"]] == ["checkpoints/step-000020"]
        assert client.read("/api/samples", step=30) == [
            {"prompt": "A", "completion": HOSTILE, "numbers": {"score": 1.5}}
        ]
        assert client.read("/api/samples", step=31) == []


def test_the_page_shows_the_batches_under_way(run: Path) -> None:
    with served(run) as client:
        assert client.read("/api/run")["status"]["batches"] == []
        write_rank(run, 0, batches=[make_batch(42, parts=1, rows=256, going_on=30)])
        assert client.read("/api/run")["status"]["batches"] == [
            {
                "batch": "42",
                "done": "actor.generate 1 of 2 parts",
                "going_on": "30 of 256",
                "age": "1 step",
            }
        ]


def test_the_timeline_names_the_batches_of_a_call(run: Path) -> None:
    with served(run) as client:
        assert "batch\t" not in client.read("/api/step")["plot"]
        ahead = make_event(0, f"run        {CALLS[0]}", 5e15, 1e6, {"step": 39, "batches": [40, 41]})
        write_step(run, extra=[ahead])
        assert "batch\t41 and 42" in client.read("/api/step")["plot"]


def test_samples_of_an_environment_have_their_turns(run: Path) -> None:
    parts = [{"text": HOSTILE, "sampled": True, "reward": 1}, {"text": "b", "sampled": False, "reward": "x"}]
    odd = [None, {"text": 3}, {"text": "c" * 5000, "sampled": "yes"}]
    row = {"prompt": "A", "completion": "B", "turns": 1, "failed_calls": 2, "environment_reward": None}
    rows = [{**row, "trajectory": parts + odd}, {**row, "trajectory": parts * 50, "environment_failed": True}]
    write_samples(run, 40, [*rows, {**row, "trajectory": 7}])
    with served(run) as client:
        first, long, without = client.read("/api/samples", step=40)
        shown = [(part["text"][:30], part["sampled"], part["reward"]) for part in first["parts"]]
        assert shown == [(HOSTILE[:30], True, 1), ("b", False, None), ("c" * 30, False, None)]
        assert len(first["parts"][2]["text"]) < 4100 and first["left_out"] == 0 and first["failed"] == ""
        assert first["numbers"] == {"turns": 1, "failed_calls": 2}
        assert (len(long["parts"]), long["left_out"]) == (64, 36)
        assert long["failed"] == "the environment failed" and "parts" not in without


def find_luminance(colour: str) -> float:
    """Relative luminance of a colour #rrggbb, by WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_turns_can_be_read_in_light_and_in_dark_and_told_apart_without_colour(run: Path) -> None:
    with served(run) as client:
        page = client.ask("/")[1]
    for name in ("--action", "--observation"):
        for colour, panel in zip(
            *(re.findall(rf"{of}: (#[0-9a-f]{{6}})", page) for of in (name, "--panel")), strict=True
        ):
            bright, dark = sorted(map(find_luminance, (colour, panel)), reverse=True)
            # The minimum of WCAG for text is 4.5.
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (name, colour, panel)
    assert re.search(r"\.turn\.action {.*font-weight: 640", page)
    assert "3px dotted var(--observation)" in page
    assert "sampled by the model</span>" in page and "the chat template</span>" in page


def test_the_last_step_is_drawn_beside_the_predicted_one(run: Path) -> None:
    with served(run) as client:
        found = client.read("/api/step")
        assert (found["step"], found["seconds"], found["predicted_seconds"]) == (40, 2.0, 1.0)
        assert re.findall(r">([^<>\n]+)</text>", found["gutter"]) == [
            "rank 0",
            "predicted",
            "rank 1",
            "predicted",
        ]
        boxes = re.findall(r'class="box (.+?)" x="(.+?)%" y="\S+" width="(.+?)%"', found["plot"])
        measured = [("r0 generate", "0.0", "50.0"), ("r0 train", "50.0", "50.0")]
        predicted = [("r0 generate", "0.0", "25.0"), ("r0 train", "25.0", "25.0")]
        assert boxes == [*measured, *predicted] * 2


def test_many_ranks_that_do_the_same_are_one_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    write_step(run, ranks=12)
    with served(run) as client:
        assert "ranks 0–11" in client.read("/api/step")["gutter"]
        # No more is read than a page can show in time.
        size = (run / "traces" / "rank-0.json").stat().st_size
        for limit, ranks in ((10.5 * size, 10), (0, 1)):
            monkeypatch.setattr("realrl.cli.monitoring.timeline._TRACES", limit)
            assert client.read("/api/step")["ranks"] == ranks


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: ppo\n")
    with served(tmp_path) as client:
        assert client.read("/api/step") is None and client.read("/api/metrics")["rows"] == []
        assert client.read("/api/run")["status"]["steps"] is None
        assert client.ask("/trace.json")[0] == 404


def test_metrics_come_as_they_are_written(run: Path) -> None:
    with served(run) as client:
        asked = {"names": "score,actor.train/kl,nothing"}
        first = client.read("/api/metrics", **asked)
        assert first["rows"][1] == [1, "train", 1.0, [0.0, 0.5, None]] and len(first["rows"]) == 44
        assert (
            "actor.train/loss" in first["known"] and first["offset"] == (run / "metrics.jsonl").stat().st_size
        )
        assert client.read("/api/metrics", offset=first["offset"], **asked)["rows"] == []
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41, "ki')
        assert client.read("/api/metrics", offset=first["offset"], **asked)["rows"] == []
        with (run / "metrics.jsonl").open("a") as file:
            file.write('nd": "train", "seconds": 2.5, "metrics": {"a/score": 7}}\n')
        further = client.read("/api/metrics", offset=first["offset"], **asked)
        assert further["rows"] == [[41, "train", 2.5, [7, None, None]]] and further["file"] == first["file"]
        # A file that has become shorter is read anew.
        (run / "metrics.jsonl").write_text("")
        add_steps(run, range(2))
        anew = client.read("/api/metrics", offset=further["offset"], **asked)
        assert len(anew["rows"]) == 3 and anew["offset"] < further["offset"]
        # A file that was cut in a resume is read again, even if it has grown beyond the old offset.
        add_steps(run, range(2, 90))
        assert len(client.read("/api/metrics", offset=further["offset"] - 1, **asked)["rows"]) == 90 + 9


@pytest.mark.parametrize(("whole", "fewest", "most"), [(1 << 24, 44, 44), (1000, 12, 30)])
def test_a_long_run_is_read_in_parts(
    run: Path, monkeypatch: pytest.MonkeyPatch, whole: int, fewest: int, most: int
) -> None:
    monkeypatch.setattr("realrl.cli.monitoring.run_page._LINES", 500)
    monkeypatch.setattr("realrl.cli.monitoring.run_page._WHOLE", whole)
    rows, offset, more = [], 0, True
    with served(run) as client:
        while more:
            part = client.read("/api/metrics", offset=offset, names="score")
            rows += part["rows"]
            offset, more = part["offset"], part["more"]
    assert [row[0] for row in rows if row[1] == "eval"] == [0, 10, 20, 30]
    assert fewest <= len(rows) <= most and offset == (run / "metrics.jsonl").stat().st_size


def test_what_comes_from_the_run_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>run")
    call = f"run        <i>{HOSTILE.replace(' ', '')} [<u>] on d1 t1 p1 @0 mb=1"
    write_step(run, extra=[make_event(0, call, 5e15, 9e5, {"step": 39, "error": HOSTILE})])
    with served(run) as client:
        page = client.ask("/")[1]
        assert "<b>" not in page and "&lt;b&gt;run" in page
        nonce = re.search(r"script-src 'nonce-(\S+?)'", client.headers["Content-Security-Policy"])
        assert nonce is not None and page.count(f'<script nonce="{nonce[1]}">') == page.count("<script")
        drawn = client.read("/api/step")
        for part in (drawn["plot"], drawn["gutter"]):
            assert not re.search(r"<(script|img|i|u|b)\b", part) and "onerror=alert(2)>" not in part
        assert "&lt;i&gt;" in drawn["plot"]
        assert client.headers["Content-Type"] == "application/json"
        assert client.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/../config.yaml",
        "/%2e%2e/config.yaml",
        "/samples/../config.yaml",
        "//etc/passwd",
        "/api",
        "/api/samples/../../../etc/passwd",
        "/trace.json/",
    ],
)
def test_no_address_names_a_file(run: Path, path: str) -> None:
    with served(run) as client:
        assert client.ask(path)[0] == 404


def test_odd_queries_are_answered(run: Path) -> None:
    with served(run) as client:
        for step in ("../../config", "-1", "1e9", "９", "9" * 40, "", "0x1"):
            assert client.read("/api/samples", step=step) == []
        for offset in ("-5", "9" * 14, "x"):
            assert len(client.read("/api/metrics", offset=offset)["rows"]) == 44
        assert client.read("/api/metrics", names=",".join("a" * 999))["rows"][0][3] == [None] * 64


def test_links_out_of_the_run_are_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"prompt": "secret", "completion": "", "text": "secret", "step": 1}\n')
    for name in ("samples/step-000050.jsonl", NOTES, "trace.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    with served(run) as client:
        assert client.read("/api/samples", step=50) == [] and client.read("/api/run")["notes"] == []
        assert client.ask("/trace.json")[0] == 404
        assert client.ask("/predicted.json")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::1", "10.0.0.1"]
)
def test_other_host_names_are_refused(run: Path, host: str) -> None:
    with served(run) as client:
        assert client.ask("/", host=host)[0] == 403
        assert client.ask("/", host="localhost:9999")[0] == 200 and client.ask("/", host="[::1]")[0] == 200


def test_requests_without_the_token_are_refused(run: Path) -> None:
    with served(run) as client:
        for path in ("/", "/api/run", "/nothing"):
            assert client.ask(path, token="")[0] == 403 and client.ask(path, token="é")[0] == 403


def test_the_server_only_reads(run: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with served(run) as client:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert client.ask("/api/run", method=method)[0] == 501
        for path in client.server.routes:
            client.ask(path)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files_leave_the_page_as_it_is(run: Path, content: str) -> None:
    for file in [file for file in run.rglob("*") if file.is_file()]:
        file.write_text(content)
    (run / "costs.json").write_text(content)
    with served(run) as client:
        for path in ("/", "/api/run", "/api/metrics", "/api/step", "/api/samples"):
            assert client.ask(path, step=30)[0] == 200, path


def test_loopback_is_what_this_machine_alone_reaches() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.9.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.nip.io", "")))


def test_notes_do_not_fill_a_disk(tmp_path: Path) -> None:
    notes = NoteFile(tmp_path)
    for number in range(KEPT_NOTES + 3):
        notes.add(f"note \ud800 {number}")
    assert len((tmp_path / NOTES).read_text().splitlines()) == KEPT_NOTES
    assert read_notes(tmp_path)[-1] == f"note \ud800 {KEPT_NOTES - 1}"


def test_the_command_says_where_the_page_is_until_it_is_interrupted(run: Path) -> None:
    process = start("watch", str(run))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(rf"{re.escape(str(run))}: http://127\.0\.0\.1:\d+/\?token=\S{{20,}}\n", line)
    busy = start("watch", str(run), "--port", re.findall(r":(\d+)/", line)[0])
    assert end(busy)[0] == 2
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")
