"""An environment that fails costs its own trajectories and nothing else: no hang, and no invented reward."""

import json
import queue
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.environments.pool import EnvironmentPool
from realrl.recipe.environment import EnvironmentConfig
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from tests.conftest import EVERY_RUN, World, read_metrics
from tests.runtime.processes import PATIENCE, until

FAULTS = (
    "raise",
    "raise in reset",
    "hang",
    "wrong type",
    "flood",
    "exit",
    "kill",
    "quit",
    "no number",
    "odd",
)
HARMLESS = ("flood", "odd")
"""What is answered, and costs the game a turn."""
GAME = """
import json, os, signal, sys, time
from pathlib import Path

HERE = Path(__file__).parent


class Game:
    def reset(self, seed):
        self.fault = json.loads((HERE / "faults.json").read_text()).get(str(seed))
        with open(HERE / "seeds", "a") as seeds:
            print(seed, self.fault, file=seeds)
        self.turns = 0
        if self.fault == "raise in reset":
            raise ValueError("no such game")
        return " begin"

    def step(self, text):
        self.turns += 1
        if self.turns == 2 or self.fault is None:
            match self.fault:
                case "raise":
                    raise KeyError("lost")
                case "hang":
                    time.sleep(1000)
                case "wrong type":
                    return 3
                case "flood":
                    print("x" * 1_000_000)
                    return "x" * 10_000_000, 1.0, False
                case "odd":
                    return [{"role": "user", "content": "\\ud800", "more": object()}], 1.0, False
                case "exit":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "quit":
                    sys.exit(3)
                case "no number":
                    return "", "a lot", False
        return " go on", 1.0, self.turns >= 2
"""
PROMPTS, SAMPLES, STEPS = 8, 2, 2


def write_recipe(world: World, directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "game.py").write_text(GAME)
    environment = {
        "factory": f"{directory / 'game.py'}:Game",
        "max_turn_tokens": 4,
        "max_observation_tokens": 20,
        "timeout": 1.5,
        "on_error": "skip",
        "retries": 1,
        **changes.pop("environment", {}),
    }
    settings = {
        "data__batch": PROMPTS,
        "training__steps": STEPS,
        "generation__max_new_tokens": 60,
        "policy": {"samples": SAMPLES},
        "environment": environment,
        **changes,
    }
    file = world.recipe("grpo", directory, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture(scope="module")
def seeds(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The seeds of the prompts of each step, in a run without faults."""
    directory = tmp_path_factory.mktemp("whole")
    file = write_recipe(world, directory)
    (directory / "faults.json").write_text("{}")
    assert run_app(["train", str(file)]) == 0
    assert [step["actor.generate/failed"] for step in read_metrics(directory / "run")] == [0.0, 0.0]
    found = list(
        dict.fromkeys(int(line.split()[0]) for line in (directory / "seeds").read_text().splitlines())
    )
    assert len(found) == PROMPTS * STEPS
    return [found[:PROMPTS], found[PROMPTS:]]


@pytest.mark.parametrize("number", range(200 if EVERY_RUN else 3))
def test_trajectories_that_fail_are_left_out_and_counted(
    world: World, seeds: list[list[int]], tmp_path: Path, number: int
) -> None:
    draw = random.Random(number)
    faults = {seed: draw.choice(FAULTS) for step in seeds for seed in draw.sample(step, 3)}
    file = write_recipe(world, tmp_path)
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    assert run_app(["train", str(file)]) == 0
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == STEPS
    for metrics, prompts in zip(steps, seeds, strict=True):
        failing = sum(faults.get(seed, "odd") not in HARMLESS for seed in prompts)
        assert metrics["actor.generate/failed"] == pytest.approx(failing / PROMPTS)
        assert metrics["actor.train/skipped"] == pytest.approx(failing / PROMPTS)
        # A flood is cut, and its trajectory goes on for another turn.
        rewards = [2.0 + (seed in faults) for seed in prompts if faults.get(seed, "odd") in HARMLESS]
        assert metrics["actor.generate/environment_reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics["actor.train/score"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "raised KeyError: 'lost'"),
        ("hang", "did not answer within 1.5 s (environment.timeout)"),
        ("wrong type", "step gave 3; it must give a text"),
        ("kill", "ended its process (status -9)"),
        ("no number", "the reward is str 'a lot'; it must be a finite number"),
    ],
)
def test_without_skipping_the_first_failure_ends_the_run_with_one_message(
    world: World,
    seeds: list[list[int]],
    tmp_path: Path,
    realrl: Callable[..., tuple[int, str]],
    fault: str,
    message: str,
) -> None:
    file = write_recipe(world, tmp_path, environment={"on_error": "fail", "retries": 0})
    (tmp_path / "faults.json").write_text(json.dumps({seeds[0][3]: fault}))
    status, printed = realrl("train", str(file))
    last = printed.strip().splitlines()[-1]
    assert status == 2 and message in last and "environment=" in last and "record " in last
    assert last.count("realrl:") <= 1
    if fault == "raise":  # the traceback begins in the user's code
        trace = printed.partition("Traceback (most recent call last):\n")[2]
        assert trace.lstrip().startswith(f'File "{tmp_path / "game.py"}"')


@pytest.mark.parametrize("degrees", ["dp", "tp", "pp"])
def test_the_failure_of_one_replica_ends_all_ranks(
    world: World, seeds: list[list[int]], tmp_path: Path, realrl: Callable[..., tuple[int, str]], degrees: str
) -> None:
    file = write_recipe(world, tmp_path, cluster="1x2", environment={"on_error": "fail"})
    graph = build_graph(load_experiment(str(file)))
    calls = {
        call.name: {"mesh": "0-1", "dp": 2} if call.is_function else {"mesh": "0-1", "dp": 1, degrees: 2}
        for call in graph.calls
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"cluster": "1x2", "calls": calls}))
    (tmp_path / "faults.json").write_text(json.dumps({seeds[0][5]: "raise"}))
    status, printed = realrl("train", str(file), f"plan={tmp_path / 'plan.yaml'}")
    last = printed.strip().splitlines()[-1]
    assert status == 2 and "raised KeyError: 'lost' (" in last and "game.py:23), 2 times; record " in last


def test_a_field_that_cannot_be_sent_to_an_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    pool = EnvironmentPool(EnvironmentConfig(factory=f"{tmp_path / 'game.py'}:Game"), "auto")
    try:
        pool.describe()
        answers: list[Any] = []
        pool.reset(0, {"when": date(2026, 1, 1)}, answers.append, alone=False)
        assert answers[0].reason == "cannot get the field 'when': a date is not a value of JSON"
    finally:
        pool.close()


AGENTS = """
import os, time
from pathlib import Path


class Agent:
    def run(self, base_url, case):
        Path(__file__).with_name(base_url).touch()
        while not Path(__file__).with_name("end").exists():
            time.sleep(0.01)
        if case == "exit":
            os._exit(3)
        time.sleep(1000)
"""


@pytest.mark.parametrize(("waiting", "blamed"), [((0, 1), [2]), ((0,), [])])
def test_an_agent_that_waits_for_the_model_is_not_blamed_for_the_end_of_its_process(
    tmp_path: Path, waiting: tuple[int, ...], blamed: list[int]
) -> None:
    (tmp_path / "agent.py").write_text(AGENTS)
    pool = EnvironmentPool(EnvironmentConfig(factory=f"{tmp_path / 'agent.py'}:Agent", workers=1), "auto")
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    try:
        pool.describe()
        for number, case in enumerate(("stay", "stay", "exit")):
            pool.run(
                number,
                {"case": case},
                {"base_url": str(number)},
                lambda answer, of=number: answers.put((of, answer)),
                alone=False,
            )
        until(lambda: all((tmp_path / str(number)).exists() for number in range(3)))
        for number in waiting:
            pool.hold(number)
        (tmp_path / "end").touch()
        failures = dict(answers.get(timeout=PATIENCE) for _ in range(3))
    finally:
        pool.close()
    assert [number for number, failure in sorted(failures.items()) if failure.own] == blamed
    suspects = [number for number, failure in sorted(failures.items()) if failure.suspect]
    assert suspects == ([] if blamed else [1, 2])


SCRIPT = """
import realrl


class Echo:
    def reset(self):
        return " say"

    async def step(self, text):
        return " again", 1.0, False


run = realrl.GRPO(
    model="{actor}", data="{data}", environment={{"factory": Echo, "max_turns": 3, "max_turn_tokens": 3}}, batch=4,
    samples=2, max_new_tokens=60, steps=1, cluster="{cluster}", device="cpu", run_dir="{run}", kl=dict(coef=0),
).train()
print(run.metrics[-1]["actor.generate/turns"], run.metrics[-1]["actor.train/score"])
"""


@pytest.mark.parametrize("cluster", ["1x1", "1x2"])
def test_a_class_of_a_script_is_an_environment(world: World, tmp_path: Path, cluster: str) -> None:
    script = tmp_path / "script.py"
    data = world.root / "ppo.jsonl"
    script.write_text(SCRIPT.format(actor=world.actor, data=data, cluster=cluster, run=tmp_path / "run"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split()[-2:] == ["3.0", "3.0"], done.stderr
