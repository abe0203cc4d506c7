"""Environments of SkyRL-Gym, unchanged: `init` in place of `reset`, and the record in the constructor."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("skyrl_gym")

from realrl.cli.app import run_app
from realrl.environments.objects import Factory
from realrl.environments.reply import WrongReplyError
from tests.conftest import World, read_metrics
from tests.environments.adapters.playing import DOCUMENT, play, read_example, save

PROMPT = "What is 1 + 2?"
RECORD = {"prompt": PROMPT, "reward_spec": {"ground_truth": "3"}, "max_turns": 3}
MULTI_TURN = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
OWN = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Echo(BaseTextEnv):
    def __init__(self, extras, loud=False):
        super().__init__()
        self.extras, self.loud = extras, loud

    def init(self, prompt):
        hint = str(sorted(self.extras))
        return [*prompt, {"role": "user", "content": hint.upper() if self.loud else hint}], {}

    def step(self, action):
        said = {"role": "user", "content": action}
        return BaseTextEnvStepOutput(observations=[said], reward=0.5, done=action == "end", metadata={})


class Rewriting(Echo):
    def init(self, prompt):
        prompt[0]["content"] = "something else"
        return prompt, {}


class Replacing(Echo):
    def step(self, action):
        given = super().step(action)
        return {**given, "postprocessed_action": action.strip()}
"""


def test_an_environment_of_several_turns_is_played(tmp_path: Path) -> None:
    factory = Factory(MULTI_TURN, {})
    described = factory.describe()
    assert described["takes_all"] and described["named"] == ["prompt"] and described["tools"] is None
    replies, reward = play(factory, RECORD, "It is #### 4", "It is #### 3")
    assert replies[0].observation == []
    (said,) = replies[1].observation or ()
    assert isinstance(said, dict) and said["role"] == "user" and "####" in said["content"]
    assert replies[2].done and reward == pytest.approx(1.0 + 0.2 / 3)


def test_the_documentation_names_it() -> None:
    assert f"environment: {MULTI_TURN}\n" in DOCUMENT.read_text()


@pytest.mark.parametrize("prompt", [PROMPT, [{"role": "system", "content": "Be brief."}]])
def test_init_gets_the_prompt_and_adds_messages(tmp_path: Path, prompt: Any) -> None:
    replies, reward = play(save(tmp_path, "Echo", OWN, loud=True), {**RECORD, "prompt": prompt}, "hi", "end")
    assert replies[0].observation == [{"role": "user", "content": "['MAX_TURNS', 'REWARD_SPEC']"}]
    assert replies[1].observation == [{"role": "user", "content": "hi"}] and reward == 1.0


def test_init_must_not_rewrite_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(WrongReplyError, match="init changed the prompt; it may only add messages"):
        play(save(tmp_path, "Rewriting", OWN), RECORD)


def test_step_must_not_replace_the_turn(tmp_path: Path) -> None:
    factory = save(tmp_path, "Replacing", OWN)
    assert play(factory, RECORD, "end")[1] == 0.5
    with pytest.raises(WrongReplyError, match="the model learns its turns as they were sampled"):
        play(factory, RECORD, " end")


def test_a_function_makes_an_environment_that_needs_objects(tmp_path: Path) -> None:
    factory = save(tmp_path, "search", read_example("search"))
    record = {"prompt": PROMPT, "reward_spec": {"ground_truth": {"target": ["3"]}}}
    replies, reward = play(factory, record, "<answer>3</answer>")
    assert replies[-1].done and reward == 1.0


def test_grpo_learns_in_it(world: World, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({**RECORD, "max_turns": turns}) + "\n" for turns in (1, 2, 3, 2)))
    file = world.recipe(
        "grpo",
        tmp_path,
        environment={"factory": MULTI_TURN, "max_turn_tokens": 4, "workers": 1},
        data={"train": str(data), "batch": 4},
        policy={"samples": 2},
        training__steps=1,
        generation__max_new_tokens=400,
    )
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/turns"] == 2.0 and metrics["actor.generate/environment_reward"] == 0.0
