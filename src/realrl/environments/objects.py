"""Objects of environments: how they are made, which methods the model may call, and how they answer."""

import asyncio
import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from realrl.config.errors import UserCodeError, UserError
from realrl.config.user_code import UserCode, read_number, show
from realrl.environments.reply import Message, Reply, WrongReplyError, read_observation, read_reply
from realrl.environments.tool_calls import ToolCall, read_calls

SETTING = "environment"
PROMPT = "prompt"
"""Argument of `reset` that gets the prompt of the record."""
BASE_URL, API_KEY, MODEL = "base_url", "api_key", "model"
CONNECTION = (BASE_URL, API_KEY, MODEL)
"""Arguments of an agent's `run` with which it reaches the model."""
_RESERVED = ("reset", "close", "get_reward")
"""Public methods that are not tools."""

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a method that may block, or that returns an awaitable, and gives its result."""


class Factory:
    """Makes the objects of an environment. The class or function that it calls is the user's."""

    def __init__(self, reference: str, options: Mapping[str, Any]) -> None:
        """Import the user's code. Raises UserError if it does not exist or cannot be imported."""
        self._code = UserCode(SETTING, reference)
        self.label = self._code.label
        self._make = self._code.attribute(reference.rpartition(":")[2])
        if not callable(self._make):
            raise UserError(f"{self.label} is not a class or a function")
        self._options = dict(options)
        self._takes_extras = "extras" in _list_parameters(self._make) and "extras" not in options
        if inspect.isclass(self._make) and (hasattr(self._make, "reset") or hasattr(self._make, "run")):
            self._takes_extras = False

    def make(self, record: Mapping[str, Any]) -> Any:
        """Make an object for a record. An exception of the user's code passes through.

        As in SkyRL-Gym, the argument `extras` gets the fields of the record, without the prompt.
        """
        if not self._takes_extras:
            return self._make(**self._options)
        extras = {name: value for name, value in record.items() if name != PROMPT}
        return self._make(**self._options, extras=extras)

    def describe_error(self, error: BaseException) -> dict[str, str]:
        """Describe an exception of the user's code: `error`, one line, and `trace`, which begins in this code."""
        try:
            with self._code.errors("raised"):
                raise error
        except UserError as told:
            trace = told.trace if isinstance(told, UserCodeError) else ""
            return {"error": str(told).removeprefix(f"{self.label} "), "trace": trace}
        raise AssertionError("an exception always becomes an error")

    def describe(self) -> dict[str, Any]:
        """Make an object, and describe how to use it, as JSON values.

        `runs`: whether the object is an agent, which has `run` in place of `reset`. `tools`: schemas of the tools;
        None if there are none. `named` and `required`: arguments of `reset` or `run`. `takes_all`: whether it
        takes all columns of the records. Raises UserError if the object cannot be used.
        """
        if self._takes_extras:  # an object needs a record
            return {"runs": False, "tools": None, "named": [PROMPT], "takes_all": True, "required": []}
        with self._code.errors("raised:", function=self._make if inspect.isfunction(self._make) else None):
            made = self.make({})
        close = getattr(made, "close", None)
        if callable(close):
            # It has not been started, so that closing it may fail.
            with suppress(Exception):
                closing = close()
                if inspect.iscoroutine(closing):
                    asyncio.run(closing)
        kind, starts = type(made).__name__, _find_start(made)
        if starts is None:
            raise UserError(f"{self.label}: {kind} has neither reset nor run")
        tools = None
        if starts != "run" and not callable(getattr(made, "step", None)):
            tools = [self._describe_tool(made, name) for name in _list_tools(made)]
            if not tools:
                raise UserError(f"{self.label}: {kind} has neither step nor public methods to call as tools")
        if starts == "init":
            return {"runs": False, "tools": tools, "named": [PROMPT], "takes_all": False, "required": []}
        parameters = _list_parameters(getattr(made, starts))
        named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        required = [name for name in named if parameters[name].default is inspect.Parameter.empty]
        if starts == "run":
            if BASE_URL not in named and not takes_all:
                raise UserError(
                    f"{self.label}: run of {kind} needs the argument {BASE_URL}, the address of the model"
                )
            required = [name for name in required if name not in CONNECTION]
        return {
            "runs": starts == "run",
            "tools": tools,
            "named": named,
            "takes_all": takes_all,
            "required": required,
        }

    def _describe_tool(self, made: Any, name: str) -> dict[str, Any]:
        from transformers.utils import get_json_schema

        try:
            schema: dict[str, Any] = get_json_schema(getattr(made, name))
        except Exception as error:  # a docstring may be anything
            raise UserError(
                f"{self.label}: the method {name} cannot be offered as a tool: {error}; describe it and"
                " each argument in its docstring, give types, or let its name begin with _"
            ) from None
        # The attribute calls the tool; its function may have another name.
        schema["function"]["name"] = name
        return schema


def _list_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """List the parameters of a function by name; none if Python does not know them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function written in C
        return {}


def _find_start(made: Any) -> str | None:
    """Find the method that starts a trajectory: `reset`, `init` as in SkyRL-Gym, or `run` of an agent; None if
    there is none of them."""
    return next((name for name in ("reset", "init", "run") if callable(getattr(made, name, None))), None)


def _list_tools(made: Any) -> list[str]:
    """List the public methods of an object that are tools, in alphabetical order."""
    members = inspect.getmembers(type(made), lambda member: callable(member) and not inspect.isclass(member))
    return [name for name, _ in members if not name.startswith("_") and name not in _RESERVED]


class Actor:
    """An object of an environment, for one trajectory."""

    def __init__(self, made: Any, run: Run, *, form: str, tools: list[dict[str, Any]] | None) -> None:
        """`form` is the format of tool calls; `tools` are the schemas, None if the object has `step`."""
        self._made, self._run, self._form, self._tools = made, run, form, tools
        self._rewards: list[float] = []

    async def start(self, record: Mapping[str, Any]) -> Reply:
        """Call `reset`, or `init` of SkyRL-Gym. The result is the first observation."""
        if _find_start(self._made) == "init":
            return Reply(await self._init(record[PROMPT]))
        given = await self._run(lambda: self._made.reset(**record))
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            given = given[0]  # as in Gymnasium: (observation, info)
        elif hasattr(given, "observation"):
            given = given.observation
        return Reply(read_observation(given))

    async def _init(self, prompt: str | list[Message]) -> Sequence[Message]:
        """Call `init` of SkyRL-Gym, which gets the prompt as messages. Returns the messages that it adds."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        given, _ = await self._run(lambda: self._made.init(copy.deepcopy(messages)))
        if given[: len(messages)] != messages:
            raise WrongReplyError(
                "init changed the prompt; it may only add messages, because the prompt is already tokenized"
            )
        return cast(Sequence[Message], read_observation(given[len(messages) :]))

    async def run(self, record: Mapping[str, Any]) -> Reply:
        """Let an agent play its trajectory. Its result is the reward of the trajectory, or None."""
        given = await self._run(lambda: self._made.run(**record))
        reward = None if given is None else read_number(given)
        if given is not None and reward is None:
            raise WrongReplyError(
                f"run gave {show(given)}; it must give the reward, a finite number, or None"
            )
        if reward is not None:
            self._rewards.append(reward)
        return Reply(done=True)

    async def act(self, text: str) -> tuple[Reply, int]:
        """Let the object answer a turn of the model. Returns the reply, and how many tool calls failed."""
        if self._tools is not None:
            return await self._call_tools(read_calls(text, self._form, self._tools))
        given = await self._run(lambda: self._made.step(text))
        if isinstance(given, Mapping) and given.get("postprocessed_action") not in (None, text):
            raise WrongReplyError(
                "step gave another text as postprocessed_action; the model learns its turns as they were sampled"
            )
        reply = read_reply(given)
        if reply.reward is not None:
            self._rewards.append(reply.reward)
        return reply, 0

    async def _call_tools(self, calls: list[ToolCall]) -> tuple[Reply, int]:
        """Call the tools. A turn without a call ends the trajectory."""
        if not calls:
            return Reply(done=True), 0
        messages: list[Message] = []
        failed = 0
        for call in calls:
            result, fine = await self._call(call)
            failed += not fine
            messages.append({"role": "tool", "name": call.name, "content": result})
        return Reply(messages, done=bool(getattr(self._made, "done", False))), failed

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool. A mistake of the model, and an exception of the tool, become text for the model."""
        known = {tool["function"]["name"] for tool in self._tools or ()}
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in known:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(sorted(known))}", False
        try:
            result = await self._run(lambda: getattr(self._made, call.name)(**call.arguments))
        except Exception as error:
            return f"error: {type(error).__name__}: {error}", False
        return result if isinstance(result, str) else _write_json(result), True

    async def measure(self) -> float | None:
        """Return the reward of the trajectory, and close the object; None if the object gives none.

        It is `get_reward()`, or else the sum of the rewards of `step` or the result of `run`, or else the attribute
        `reward`.
        """
        made = self._made
        value: Any = None
        try:
            if callable(getattr(made, "get_reward", None)):
                value = await self._run(made.get_reward)
            elif self._rewards:
                value = sum(self._rewards)
            elif not callable(getattr(made, "reward", None)):
                value = getattr(made, "reward", None)
        finally:
            await self.close()
        if value is None:
            return None
        number = read_number(value)
        if number is None:
            raise WrongReplyError(f"the reward is {show(value)}; it must be a finite number or None")
        return number

    async def close(self) -> None:
        if callable(getattr(self._made, "close", None)):
            await self._run(self._made.close)


def _write_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
