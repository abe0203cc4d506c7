"""Objects of environments answer in every form that public environments use; their mistakes are named."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.environments.objects import Actor, Factory
from realrl.environments.reply import Reply, WrongReplyError, read_reply


@dataclass
class Result:
    """As OpenEnv's clients return it."""

    observation: str
    reward: float | None
    done: bool


@pytest.mark.parametrize(
    ("given", "reply"),
    [
        ("next", Reply("next")),
        (None, Reply(done=True)),
        (("next", 1, False), Reply("next", 1.0)),
        (("end", 0.5, True, False, {}), Reply("end", 0.5, done=True)),
        (("end", 0.5, False, True, {}), Reply("end", 0.5, done=True)),
        (
            {
                "observations": [{"role": "user", "content": "next"}],
                "reward": True,
                "done": False,
                "metadata": {},
            },
            Reply([{"role": "user", "content": "next"}], 1.0),
        ),
        (Result("next", None, False), Reply("next")),
        (Reply("next", 2.0), Reply("next", 2.0)),
    ],
)
def test_replies_of_every_kind_are_read(given: Any, reply: Reply) -> None:
    assert read_reply(given) == reply


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "step gave 3"),
        (("next", "a lot", False), "the reward is str 'a lot'"),
        (("next", float("nan"), False), "the reward is nan"),
        ((3, 1.0, False), "the observation is 3"),
        (([{"role": "user"}], 1.0, False), "the observation is list"),
    ],
)
def test_anything_else_is_refused(given: Any, message: str) -> None:
    with pytest.raises(WrongReplyError) as error:
        read_reply(given)
    assert message in str(error.value)


CODE = '''
class Calculator:
    """An environment in the style of TRL."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, question, **record):
        self.sum, self.reward = self.start, 0.0

    def add(self, number: int) -> int:
        """Adds a number.

        Args:
            number: What to add.
        """
        self.sum += number
        self.reward = float(self.sum)
        return self.sum

    def _hidden(self):
        pass


class Undocumented(Calculator):
    def subtract(self, number):
        return -number


class NoReset:
    pass


class Nothing:
    def reset(self):
        pass


class Optional:
    def __init__(self, extras=()):
        self.extras = extras

    def reset(self):
        return f"{len(self.extras)} extras"

    def step(self, text):
        pass


class Game:
    def reset(self, word: str, seed: int = 0):
        return "guess"

    async def step(self, text):
        return "warmer", 0.5, text == "end"


class Agent:
    def run(self, base_url, question, **options):
        pass


class Deaf:
    def run(self, question):
        pass


class Opened(Game):
    left = 0

    def __init__(self):
        Opened.left += 1

    async def close(self):
        Opened.left -= 1


class HalfOpened(Game):
    def close(self):
        self.session.close()  # which reset opens
'''


@pytest.fixture
def factory(tmp_path: Path) -> Callable[..., Factory]:
    (tmp_path / "code.py").write_text(CODE)
    return lambda name, **options: Factory(f"{tmp_path / 'code.py'}:{name}", options)


async def run(method: Callable[[], Any]) -> Any:
    result = method()
    return await result if inspect.isawaitable(result) else result


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def test_public_methods_are_tools_with_schemas(factory: Callable[..., Factory]) -> None:
    described = factory("Calculator").describe()
    (tool,) = described["tools"]
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert described["takes_all"] and described["required"] == ["question"]
    game = factory("Game").describe()
    assert game == {
        "runs": False, "tools": None, "named": ["word", "seed"], "takes_all": False, "required": ["word"],
    }  # fmt: skip


def test_an_agent_needs_the_columns_that_run_names(factory: Callable[..., Factory]) -> None:
    agent = factory("Agent").describe()
    assert agent["runs"] and agent["tools"] is None
    assert agent["takes_all"] and agent["required"] == ["question"]


def test_the_object_that_is_only_described_is_closed(factory: Callable[..., Factory]) -> None:
    opened = factory("Opened")
    opened.describe()
    made = opened.make({})
    assert type(made).left == 1
    assert factory("HalfOpened").describe()["tools"] is None


def test_a_class_with_reset_gets_its_record_there_alone(factory: Callable[..., Factory]) -> None:
    made = factory("Optional")
    assert made.describe()["named"] == []
    actor = Actor(made.make({"word": "x"}), run, form="auto", tools=None)
    assert asyncio.run(actor.start({})) == Reply("0 extras")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Undocumented", "the method subtract cannot be offered as a tool"),
        ("NoReset", "NoReset has neither reset nor run"),
        ("Deaf", "run of Deaf needs the argument base_url, the address of the model"),
        ("Nothing", "Nothing has neither step nor public methods to call as tools"),
        ("Missing", "has no Missing"),
        ("CODE", "has no CODE"),
    ],
)
def test_what_cannot_be_used_is_one_message(factory: Callable[..., Factory], name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        factory(name).describe()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_tools_are_called_and_mistakes_of_the_model_answered(factory: Callable[..., Factory]) -> None:
    made = factory("Calculator", start=1)
    actor = Actor(made.make({}), run, form="hermes", tools=made.describe()["tools"])

    async def play() -> None:
        assert await actor.start({"question": "?"}) == Reply()
        text = call('{"name": "add", "arguments": {"number": 2}}') + call(
            '{"name": "add", "arguments": {"a": 2}}'
        )
        reply, failed = await actor.act(text)
        assert not isinstance(reply.observation, str) and reply.observation is not None
        first, second = reply.observation
        assert first == {"role": "tool", "name": "add", "content": "3"}
        assert second["content"].startswith("error: TypeError") and failed == 1
        reply, failed = await actor.act(call('{"name": "_hidden"}'))
        assert not isinstance(reply.observation, str) and reply.observation is not None
        assert "there is no tool '_hidden'; the tools are add" in reply.observation[0]["content"]
        reply, failed = await actor.act("It is 3.")
        assert reply.done and not failed
        assert await actor.measure() == 3.0

    asyncio.run(play())


def test_rewards_of_turns_are_added_up(factory: Callable[..., Factory]) -> None:
    actor = Actor(factory("Game").make({}), run, form="auto", tools=None)

    async def play() -> float | None:
        assert await actor.start({"word": "x"}) == Reply("guess")
        assert (await actor.act("a"))[0] == Reply("warmer", 0.5)
        assert (await actor.act("end"))[0].done
        return await actor.measure()

    assert asyncio.run(play()) == 1.0
