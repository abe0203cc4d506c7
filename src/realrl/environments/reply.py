"""What an environment answers to a turn of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.config.user_code import read_number, show

Message = dict[str, Any]
"""{role, content}, both text, as in a conversation."""


class WrongReplyError(Exception):
    """An environment returned something that is not a reply."""


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn of the model.

    `observation` is a text, which becomes a message of the user, or a list of messages {role, content}; None for
    nothing. `reward` is the reward of the turn; None for none. `done` ends the trajectory.
    """

    observation: str | Sequence[Message] | None = None
    reward: float | None = None
    done: bool = False


def read_reply(value: Any) -> Reply:
    """Read what `step` returned.

    Accepted are a `Reply`; a text; None, which ends the trajectory; the tuples (observation, reward, done) and
    (observation, reward, terminated, truncated, info) of Gymnasium; and a mapping or an object with
    `observation` (or `observations`), `reward` and `done`. Raises WrongReplyError for anything else.
    """
    if value is None:
        return Reply(done=True)
    if isinstance(value, str):
        return Reply(value)
    if isinstance(value, tuple) and len(value) in (3, 5):
        return _check(
            value[0], value[1], any(bool(flag) for flag in value[2:4]) if len(value) == 5 else value[2]
        )
    if isinstance(value, Mapping):
        given: Any = value.get
    elif hasattr(value, "done"):
        given = lambda name, default=None: getattr(value, name, default)  # noqa: E731
    else:
        raise WrongReplyError(
            f"step gave {show(value)}; it must give a text, (observation, reward, done), or an object with these"
        )
    observation = given("observation")
    if observation is None:
        observation = given("observations")
    return _check(observation, given("reward"), given("done", False))


def _check(observation: Any, reward: Any, done: Any) -> Reply:
    number = None if reward is None else read_number(reward)
    if reward is not None and number is None:
        raise WrongReplyError(f"the reward is {show(reward)}; it must be a finite number or None")
    return Reply(read_observation(observation), number, bool(done))


def read_observation(value: Any) -> str | list[Message] | None:
    """Read an observation: a text or messages. Raises WrongReplyError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str) for message in value
    ):
        # Other values than text mean nothing to a chat template.
        return [
            {"role": "user", **{key: text for key, text in message.items() if isinstance(text, str)}}
            for message in value
        ]
    raise WrongReplyError(
        f"the observation is {show(value)}; it must be a text, or a list of messages {{role, content}}"
    )
