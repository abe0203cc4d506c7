"""An environment on a server of OpenEnv, with its client in the class of docs/environments.md."""

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from realrl.environments.pool import EnvironmentPool
from realrl.recipe.environment import EnvironmentConfig
from tests.environments.adapters.playing import play, read_example, save

CLOSED = list[int]()
"""Secrets of the sessions that the server has closed."""


class Guess(Action):
    guess: str


class Heard(Observation):
    text: str


class Secret(Environment):
    """Each session has a number of its own, its seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    secret = -1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **further: Any) -> Heard:
        self.secret = seed or 0
        return Heard(text="Which number?")

    def step(self, action: Guess, timeout_s: float | None = None, **further: Any) -> Heard:
        if action.guess == "break":
            raise ValueError("broken")
        right = action.guess == str(self.secret)
        return Heard(text="Right." if right else "Wrong.", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        CLOSED.append(self.secret)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread, on a free port of this machine."""
    app = create_fastapi_app(Secret, Guess, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def write_code(client: str) -> str:
    code = read_example("Count")
    if client == "asynchronous":
        return code
    plain = code.replace("async def", "def").replace("await ", "")
    return plain.replace("GenericEnvClient(base_url=url)", "GenericEnvClient(base_url=url).sync()")


@pytest.mark.parametrize("client", ["asynchronous", "synchronous"])
def test_a_session_of_the_server_is_a_trajectory(tmp_path: Path, url: str, client: str) -> None:
    factory = save(tmp_path, "Count", write_code(client), url=url)
    for seed in (3, 4):
        CLOSED.clear()
        replies, reward = play(factory, {"seed": seed}, "0", str(seed))
        assert [reply.observation for reply in replies] == ["Which number?", "Wrong.", "Right."]
        assert [reply.reward for reply in replies] == [None, -0.25, 1.0] and reward == 0.75
        limit = time.monotonic() + 10
        while not CLOSED and time.monotonic() < limit:
            time.sleep(0.01)
        assert [seed] == CLOSED


def test_an_error_of_the_server_is_an_error_of_the_step(tmp_path: Path, url: str) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        play(save(tmp_path, "Count", url=url), {"seed": 3}, "break")


def test_sessions_of_a_process_are_apart(tmp_path: Path, url: str) -> None:
    file = tmp_path / "count.py"
    file.write_text(read_example("Count"))
    pool = EnvironmentPool(
        EnvironmentConfig(factory=f"{file}:Count", options={"url": url}, workers=1), "auto"
    )
    answers = queue.Queue[Any]()
    try:
        assert pool.describe()["named"] == ["seed"]
        for number in range(4):
            pool.reset(number, {"seed": 10 + number}, answers.put, alone=False)
        assert [answers.get(timeout=60)["observation"] for _ in range(4)] == ["Which number?"] * 4
        for number in range(4):
            pool.act(number, str(10 + number), False, answers.put)
        assert [answers.get(timeout=60)["total"] for _ in range(4)] == [1.0] * 4
    finally:
        pool.close()
