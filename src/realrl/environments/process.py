"""Process that holds objects of an environment: python -m realrl.environments.process.

It reads requests, one line of JSON each, from standard input, and writes answers to what was standard output. Text
that the user's code prints goes to standard error.
"""

import asyncio
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from realrl.config.errors import UserError
from realrl.config.open_files import raise_limit_of_open_files
from realrl.config.script_objects import load_objects
from realrl.environments.objects import Actor, Factory
from realrl.environments.reply import Reply, WrongReplyError

_SPENT: ContextVar[list[float]] = ContextVar("spent")
"""Seconds that the methods of an object have taken for one request, without waiting for a thread."""


class _Server:
    """Answers requests. The objects of different trajectories work at the same time."""

    def __init__(self, start: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._form, self._longest = start["form"], start["longest"]
        self._factory = Factory(start["reference"], start["options"])
        self._described = start.get("described")
        self._threads = ThreadPoolExecutor(start["threads"])
        self._actors: dict[int, Actor] = {}

    async def _run(self, method: Callable[[], Any]) -> Any:
        """Call a method in a thread; if it gives an awaitable, wait for the awaitable in the event loop."""
        spent = _SPENT.get()
        loop = asyncio.get_running_loop()
        result, seconds = await loop.run_in_executor(self._threads, _time, method)
        spent.append(seconds)
        if not inspect.isawaitable(result):
            return result
        begin = time.perf_counter()
        result = await result
        spent.append(time.perf_counter() - begin)
        return result

    async def answer(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        spent: list[float] = []
        _SPENT.set(spent)
        try:
            answer |= await self._do(request)
            answer["seconds"] = sum(spent)
        except (UserError, WrongReplyError) as error:
            answer["error"] = str(error)
        except BaseException as error:  # the user's code may raise anything
            answer |= self._factory.describe_error(error)
        self._write(answer)

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request.get("trajectory", -1)
        match request["do"]:
            case "describe":
                return {"described": await self._run(self._factory.describe)}
            case "reset":
                tools = request["tools"]
                record = request["record"]
                made = await self._run(lambda: self._factory.make(record))
                actor = self._actors[number] = Actor(made, self._run, form=self._form, tools=tools)
                return await self._finish(number, await actor.start(record))
            case "run":
                record = request["record"]
                made = await self._run(lambda: self._factory.make(record))
                actor = self._actors[number] = Actor(made, self._run, form=self._form, tools=None)
                return await self._finish(number, await actor.run({**record, **request["connection"]}))
            case "act":
                actor = self._actors[number]
                reply, failed = await actor.act(request["text"])
                if request["last"] and not reply.done:
                    reply = Reply(reply.observation, reply.reward, done=True)
                return {**await self._finish(number, reply), "failed_calls": failed}
            case "end":
                return await self._finish(number, Reply(done=True))
            case "close":
                closing = self._actors.pop(number, None)
                if closing is not None:
                    await closing.close()
                return {}
        raise AssertionError(request["do"])

    async def _finish(self, number: int, reply: Reply) -> dict[str, Any]:
        """Write a reply as JSON values; at the end of the trajectory, with its reward."""
        observation = reply.observation
        if isinstance(observation, str):
            observation = self._clean(observation)
        elif observation is not None:
            observation = [{**one, "content": self._clean(one["content"])} for one in observation]
        answer = {"observation": observation, "reward": reply.reward, "done": reply.done}
        if reply.done:
            answer["total"] = await self._actors.pop(number).measure()
        return answer

    def _clean(self, text: str) -> str:
        """Cut a text, and replace halves of surrogate pairs, which no tokenizer takes."""
        return text[: self._longest].encode("utf-8", "replace").decode("utf-8")


def _time(method: Callable[[], Any]) -> tuple[Any, float]:
    """Call a method; returns its result, and its seconds. SystemExit becomes an error, because it would otherwise
    be lost in the thread."""
    begin = time.perf_counter()
    try:
        result = method()
    except SystemExit as error:
        raise RuntimeError(f"SystemExit({error.code})") from None
    return result, time.perf_counter() - begin


def main() -> None:
    """Answer requests until standard input ends, which also happens when the parent process dies."""
    raise_limit_of_open_files()  # objects may have connections
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def write(answer: dict[str, Any]) -> None:
        text = json.dumps(answer)
        with lock:
            print(text, file=answers, flush=True)

    requests = sys.stdin
    start = json.loads(requests.readline())
    for entry in start["path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    load_objects()
    try:
        server = _Server(start, write)
    except UserError as error:
        write({"id": -1, "error": str(error)})
        return
    write({"id": -1})
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for line in requests:
        asyncio.run_coroutine_threadsafe(server.answer(json.loads(line)), loop)
    # Threads of the user's code may never return.
    os._exit(0)


if __name__ == "__main__":
    main()
