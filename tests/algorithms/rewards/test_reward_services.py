"""Rewards from a service: what is sent, and what becomes of services that fail."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from reward_functions import load_method, make_input, scores_of

from realrl.algorithms.rewards import http
from realrl.config.errors import UserCodeError, UserError

Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]
"""Status and answer to the request of this number, counted from 0."""


class Service:
    """A service on this machine, and what it has been asked."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._now = 0
        service, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(service.requests)
                    service.requests.append(body)
                    service.headers.append(dict(self.headers))
                    service._now += 1
                    service.most_at_once = max(service.most_at_once, service._now)
                status, content = answer(number, body)
                with lock:
                    service._now -= 1
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"


@contextmanager
def serving(answer: Answer, **headers: str) -> Iterator[Service]:
    service = Service(answer, {name.replace("_", "-"): value for name, value in headers.items()})
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        thread.join()
        service.server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, none of which takes time."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    waited: list[float] = []
    monkeypatch.setattr(http, "sleep", waited.append)
    return waited


def score_by(url: str, completions: list[str], on_error: str = "fail", **options: Any) -> list[float]:
    fields = {"answer": [text.upper() for text in completions]}
    inputs = make_input(completions, **fields)
    return scores_of(load_method({"http": {"url": url, **options}, "on_error": on_error}), inputs)


def lengths(number: int, body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"scores": [len(text) for text in body["completions"]]}


def test_scores_come_in_the_order_of_completions_in_batches() -> None:
    with serving(lengths) as service:
        completions = ["a" * i for i in range(1, 8)]
        found = score_by(service.url, completions, batch=2, concurrency=2, fields=["answer"])
    assert found == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(len(request["completions"]) for request in service.requests) == [1, 2, 2, 2]
    assert service.most_at_once <= 2
    for request in service.requests:
        assert set(request) == {"prompts", "completions", "answer"}
        assert request["answer"] == [text.upper() for text in request["completions"]]


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(lengths) as service:
        score_by(service.url, ["a"], headers={"Authorization": "JUDGE_KEY", "X-Team": "JUDGE_KEY"})
    assert service.headers[0]["Authorization"] == "Bearer secret" and service.headers[0]["X-Team"] == "secret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(
        UserError, match=r"^reward\.http\.headers\.X: the environment variable JUDGE_KEY is not set"
    ):
        score_by(service.url, ["a"], headers={"X": "JUDGE_KEY"})


JUDGE = {"kind": "chat", "model": "judge-1", "prompt_template": "{prompt} {answer} {other}: {completion}"}


def test_a_judge_is_asked_by_a_template_and_its_last_number_counts() -> None:
    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        content = f"Out of 10: {len(body['messages'][0]['content'])}.5 points"
        return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}

    with serving(answer) as service:
        assert score_by(service.url, ["{x}", "yes"], fields=["answer"], **JUDGE) == [18.5, 18.5]
    texts = sorted(request["messages"][0]["content"] for request in service.requests)
    assert texts == ["? YES {other}: yes", "? {X} {other}: {x}"]
    assert {request["model"] for request in service.requests} == {"judge-1"}


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, {}, "answered 404 Not Found"),
        (302, {}, "answered 302 Found"),
        (200, b"<html>", "answered b'<html>', which is no JSON"),
        (
            200,
            {"score": [1, 2]},
            "answered dict {'score': [1, 2]}; it must answer {\"scores\": [...]}, 2 of them",
        ),
        (200, {"scores": [1]}, "answered 1 scores; it must answer"),
        (200, {"scores": [1, "2"]}, "answered str '2' for a completion; a score is a finite number or null"),
        (200, {"scores": [1, True]}, "answered True for a completion"),
        (200, b'{"scores": [1, NaN]}', "answered nan for a completion"),
        (503, {}, "answered 503 Service Unavailable (4 tries)"),
    ],
)
def test_a_useless_answer_is_said(status: int, answer: Any, message: str) -> None:
    with serving(lambda number, body: (status, answer), Location="http://127.0.0.1:9/") as service:
        with pytest.raises(UserCodeError) as raised:
            score_by(service.url, ["a", "b"])
        assert str(raised.value).startswith(f"reward ({service.url}) {message}")
        assert "; record data.jsonl:1" in str(raised.value)
        assert len(service.requests) == (4 if status == 503 else 1)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": {"content": "none"}}]}])
def test_a_judge_without_a_score_is_a_failure(reply: Any) -> None:
    refused = pytest.raises(UserCodeError, match=r"no chat completion|finds no score")
    with serving(lambda number, body: (200, reply)) as service, refused:
        score_by(service.url, ["a"], fields=["answer"], **JUDGE)


def test_retries_wait_longer_each_time_or_as_long_as_the_service_says(waits: list[float]) -> None:
    def recovering(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        return lengths(number, body) if number == 3 else (503, {})

    with serving(recovering) as service:
        assert score_by(service.url, ["abc"]) == [3]
    assert len(waits) == 3 and all(0.5 * 2**i <= wait <= 2**i for i, wait in enumerate(waits))
    waits.clear()
    with serving(recovering, Retry_After="7") as service:
        assert score_by(service.url, ["abc"]) == [3]
    assert waits == [7, 7, 7]


def test_a_dead_service_is_not_asked_for_every_sample(waits: list[float]) -> None:
    dead = True

    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        return (500, {}) if dead else lengths(number, body)

    with serving(answer) as service:
        http_options = {"url": service.url, "batch": 1, "concurrency": 1, "retries": 1}
        method = load_method({"http": http_options, "on_error": "skip"})
        found = scores_of(method, make_input(["a"] * 40))
        assert all(score != score for score in found)
        assert len(service.requests) == 2 * http.GIVEN_UP_AFTER
        dead = False
        assert scores_of(method, make_input(["a"] * 2)) == [1, 1]


def test_an_address_where_nothing_answers_is_named() -> None:
    with pytest.raises(
        UserCodeError, match=r"127\.0\.0\.1:9/\) cannot be reached: .* \(1 tries\); record data"
    ):
        score_by("http://127.0.0.1:9/", ["a"], retries=0)


def test_a_failed_request_skips_its_samples_alone() -> None:
    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {}) if "bad" in body["completions"] else lengths(number, body)

    with serving(answer) as service:
        found = score_by(service.url, ["a", "bad", "abc"], on_error="skip", batch=1)
    assert found[0] == 1 and found[1] != found[1] and found[2] == 3


def test_an_answer_that_comes_drop_by_drop_is_given_up_in_time() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not stop.wait(0.02):
                connection.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    try:
        with pytest.raises(UserCodeError, match=r"did not answer within 0\.2 s"):
            score_by(address, ["a"], request_timeout=0.2, retries=0)
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_an_answer_that_is_nested_without_end_is_no_json() -> None:
    with (
        serving(lambda number, body: (200, b"[" * 200_000)) as service,
        pytest.raises(UserCodeError, match="which is no JSON"),
    ):
        score_by(service.url, ["a"])


def test_an_address_with_an_impossible_port_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"^reward\.http\.url=http://host:port/: "):
        score_by("http://host:port/", ["a"])
