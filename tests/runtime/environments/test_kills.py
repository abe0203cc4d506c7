"""A run that is killed inside a call of its environment resumes bit for bit, if it is exact."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import World, read_metrics, thin
from tests.runtime.environments.test_agents import TEMPLATE
from tests.runtime.processes import end, start

GAME = """
import json
import os
import signal
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
KILL = HERE / "kill"


class Game:
    '''Kills its rank in the call that the file names, once.'''

    def reset(self, seed):
        self.seed, self.turns = seed, 0
        self.call("reset")
        return " begin"

    def step(self, text):
        self.turns += 1
        self.call(str(self.turns))
        return f" turn {self.turns}", float(len(text) % 5), self.turns == 2 + self.seed % 3

    def call(self, name):
        with open(HERE / "calls", "a") as file:
            print(self.seed, name, file=file)
        calls = len((HERE / "calls").read_text().splitlines())
        if KILL.exists() and KILL.read_text().split()[0] == name and calls > int(KILL.read_text().split()[1]):
            KILL.unlink()
            os.kill(os.getppid(), signal.SIGKILL)


class Agent(Game):
    '''The same as an agent.'''

    reset = step = None

    def run(self, base_url, api_key, model, seed, prompt):
        self.seed, reward = seed, 0.0
        self.call("begin")
        messages = [{"role": "user", "content": prompt}]
        for turn in range(1, 3 + seed % 3):
            body = json.dumps({"model": model, "messages": messages, "max_tokens": 6}).encode()
            headers = {"Authorization": f"Bearer {api_key}"}
            answer = json.load(urlopen(Request(f"{base_url}/chat/completions", body, headers)))
            message = answer["choices"][0]["message"]
            messages += [message, {"role": "user", "content": f" turn {turn}"}]
            reward += len(message["content"] or "") % 5
            self.call(str(turn))
        return reward
"""
STEPS = 3
SETTINGS: dict[str, Any] = {
    "exact": True,
    "data__batch": 4,
    "training__steps": STEPS,
    "checkpoint__every": 1,
    "generation__max_new_tokens": 120,
    "data__chat_template": TEMPLATE,
    "policy": {"samples": 3, "kl": {"coef": 0.0}},
    "models__actor__optimizer": {"lr": 1e-3},
}


def write(world: World, directory: Path, kind: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "game.py").write_text(GAME)
    environment = {"factory": f"{directory / 'game.py'}:{kind}", "max_turn_tokens": 6, "workers": 2}
    file = world.recipe("grpo", directory, environment=environment, **SETTINGS)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    return file


def train(file: Path) -> int:
    return end(start("train", str(file), OMP_NUM_THREADS="1"))[0]


def learnt(file: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The final weights, and what each step trained on and measured, without times."""
    run = file.parent / "run"
    metrics = (
        "actor.train/loss",
        "actor.train/grad_norm",
        "actor.generate/turns",
        "actor.generate/environment_reward",
    )
    return load_file(run / "final" / "model.safetensors"), [
        [step[name] for name in metrics] for step in read_metrics(run)
    ]


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The recipe of a run that nobody kills; it has made about as many calls in each step."""
    directory = tmp_path_factory.mktemp("kills")

    @cache
    def run(kind: str) -> Path:
        file = write(world, directory / kind, kind)
        assert train(file) == 0
        return file

    return run


CASES = [("Game", "1"), ("Game", "reset"), ("Game", "3"), ("Agent", "1"), ("Agent", "begin"), ("Agent", "3")]


@pytest.mark.parametrize(("kind", "call"), thin(CASES, 3))
def test_a_run_that_is_killed_in_a_call_continues_bit_for_bit(
    world: World, whole: Callable[[str], Path], tmp_path: Path, kind: str, call: str
) -> None:
    file, undisturbed = write(world, tmp_path / "killed", kind), whole(kind)
    calls = len((undisturbed.parent / "calls").read_text().splitlines())
    (file.parent / "kill").write_text(f"{call} {calls // 2}")
    assert train(file) == 0, "the launcher starts the killed rank again"
    assert not (file.parent / "kill").exists()
    weights, steps = learnt(file)
    expected, steps_of_whole = learnt(undisturbed)
    assert len(steps) == STEPS and steps == steps_of_whole
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
