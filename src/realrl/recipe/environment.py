"""Setting `environment` of a recipe: the environment in which the actor acts, turn by turn."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationInfo

from realrl.config.base import Settings
from realrl.config.explain import brief
from realrl.config.user_code import FunctionReference
from realrl.recipe.generation import GenerationConfig

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "gpt_oss"]
"""How a model writes tool calls."""


class EnvironmentConfig(Settings):
    """Environment in which the actor acts, turn by turn. See docs/environments.md."""

    factory: FunctionReference
    """`FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object. Each trajectory
    gets an object of its own. An object has `reset`, and either `step` or public methods that the model calls as
    tools. Or it is an agent: it has `run`, which talks to the model as to OpenAI's API."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of `factory`."""
    max_turns: PositiveInt | None = None
    """Maximum turns of the model in a trajectory; null for no limit."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum tokens of one turn of the model. A longer turn is cut, and goes to the environment as it is. null
    for no limit other than `generation.max_new_tokens`."""
    max_observation_tokens: PositiveInt = 2048
    """Maximum tokens of the text that the environment adds after a turn. A longer text loses its end. Agents write
    their prompts themselves, and have no such limit."""
    tool_format: ToolFormat = "auto"
    """How the model writes tool calls: `hermes` (Qwen and many others), `llama3`, `mistral` or `gpt_oss`. `auto`
    finds it in the chat template."""
    earlier_turns: Literal["refuse", "keep"] = "refuse"
    """What to do if the chat template writes earlier turns differently once others follow, for example without
    their reasoning. `refuse` is an error. `keep` keeps every turn as it was sampled, in sampling and in
    training."""
    workers: PositiveInt = 2
    """Processes that hold the objects, for each data-parallel rank that generates."""
    threads: PositiveInt | None = None
    """Maximum calls of objects that run at the same time in one of these processes. null for 16; for agents, whose
    only call is the whole trajectory, null is no limit."""
    timeout: PositiveFloat = 60.0
    """Maximum seconds of one call of an object; of an agent, from an answer of the model to its next request. After
    that, the process that holds the object is killed, and its trajectories fail."""
    retries: int = Field(default=1, ge=0)
    """How often a failed trajectory starts again from its beginning."""
    on_error: Literal["fail", "skip"] = "fail"
    """If a trajectory still fails: end the run (`fail`), or leave it out of the loss and all means (`skip`)."""


def _read(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return {"factory": value}
    if value is None or isinstance(value, Mapping | EnvironmentConfig):
        return value
    raise ValueError(
        f"{brief(value)} is not an environment; give FILE.py:CLASS, package.module:CLASS or a section"
    )


CALLS_AT_ONCE = 16
"""`environment.threads` of objects that are no agents, if it is null."""

EnvironmentSetting = Annotated[EnvironmentConfig | None, BeforeValidator(_read)]
"""Setting `environment` of a recipe: a reference to a class, or a section. null for none."""


def check_environment(environment: EnvironmentConfig, generation: GenerationConfig, *, skips: bool) -> None:
    """Check an environment against other settings. Raises ValueError if they contradict each other.

    `skips`: whether the reward may leave trajectories without a score.
    """
    for name in ("min_new_tokens", "ignore_eos"):
        if getattr(generation, name):
            raise ValueError(
                f"generation.{name}={brief(getattr(generation, name))} is not for an environment, whose turns end"
                " when the model ends them"
            )
    limit = environment.max_turn_tokens
    if limit is not None and limit > generation.max_new_tokens:
        raise ValueError(
            f"environment.max_turn_tokens={limit} is above generation.max_new_tokens={generation.max_new_tokens},"
            " the limit of all turns together"
        )
    if environment.on_error == "skip" and not skips:
        raise ValueError(
            "environment.on_error=skip leaves trajectories without a score, which models.reward alone gives to all;"
            " give reward"
        )
