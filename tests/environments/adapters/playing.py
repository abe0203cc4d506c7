"""Plays an environment with fixed turns of the model, and finds the environments of the documentation."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.environments.objects import Actor, Factory
from realrl.environments.reply import Reply

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"


def read_example(name: str, document: Path = DOCUMENT) -> str:
    """The code block of a document that defines the class or function `name`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if re.search(rf"^(class|def) {name}\b", block, re.MULTILINE))
    return str(found)


def save(directory: Path, name: str, code: str = "", **options: Any) -> Factory:
    """The environment `name` of some code, or of the documentation."""
    file = directory / f"{name.lower()}.py"
    file.write_text(code or read_example(name).partition("\nrun = ")[0])
    return Factory(f"{file}:{name}", options)


async def _run(method: Callable[[], Any]) -> Any:
    result = await asyncio.to_thread(method)
    return await result if inspect.isawaitable(result) else result


def play(factory: Factory, record: Mapping[str, Any], *turns: str) -> tuple[Sequence[Reply], float | None]:
    """Play a trajectory until it ends. Returns the replies, the first of them at the start, and the reward."""
    described = factory.describe()

    async def play_turns() -> tuple[list[Reply], float | None]:
        actor = Actor(factory.make(record), _run, form="hermes", tools=described["tools"])
        replies = [await actor.start(record)]
        for turn in turns:
            assert not replies[-1].done
            replies.append((await actor.act(turn))[0])
        return replies, await actor.measure()

    return asyncio.run(play_turns())


def call(name: str, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
