"""What environments and reward functions get by the arguments that they name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import World, read_metrics

CODE = """
import json
from pathlib import Path

HERE = Path(__file__).parent


class Game:
    def reset(self, prompt, seed, **record):
        with open(HERE / "starts", "a") as starts:
            print(json.dumps([prompt, seed, record]), file=starts)

    def step(self, text):
        return " again", 0.5, len(text) > 1000


def double(environment_reward, **further):
    assert "prompt" not in further or all(further["prompt"])
    return [2 * reward for reward in environment_reward]


def read_objects(environments, **further):
    return [environment.reward for environment in environments]


def read_objects_if_any(completions, environments=None):
    return [0.0 for _ in completions]
"""


def write_recipe(world: World, directory: Path, reward: str, prompts: list[object]) -> Path:
    code = directory / "code.py"
    code.write_text(CODE)
    data = directory / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": prompt, "number": i}) + "\n" for i, prompt in enumerate(prompts))
    )
    file = world.recipe(
        "grpo",
        directory,
        environment={"factory": f"{code}:Game", "max_turn_tokens": 3, "max_turns": 3, "workers": 1},
        data={"train": str(data), "batch": 2},
        reward=f"{code}:{reward}",
        policy={"samples": 2},
        training__steps=1,
        generation__max_new_tokens=60,
    )
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    return file


def test_the_reward_of_the_environment_and_the_prompt_are_arguments(
    world: World, tmp_path: Path, realrl: Callable[..., tuple[int, str]]
) -> None:
    file = write_recipe(world, tmp_path, "double", ["the cat", "a dog"])
    status, printed = realrl("train", str(file))
    assert status == 0, printed
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/environment_reward"] == 1.5 and metrics["actor.train/score"] == 3.0
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert sorted({(prompt, record["number"]) for prompt, _, record in starts}) == [
        ("a dog", 1),
        ("the cat", 0),
    ]
    assert len({seed for _, seed, _ in starts}) == 2 and len(starts) == 4
    status, printed = realrl("data", str(file))
    assert status == 0, printed


@pytest.mark.parametrize("reward", ["read_objects", "read_objects_if_any"])
@pytest.mark.parametrize("command", ["train", "data"])
def test_a_reward_function_that_asks_for_the_objects_is_refused(
    world: World, tmp_path: Path, realrl: Callable[..., tuple[int, str]], command: str, reward: str
) -> None:
    status, printed = realrl(command, str(write_recipe(world, tmp_path, reward, ["the cat", "a dog"])))
    last = printed.strip().splitlines()[-1]
    assert status == 2 and f"code.py:{reward} names the argument 'environments'" in last
    assert "get_reward" in last and "'environment_reward'" in last
