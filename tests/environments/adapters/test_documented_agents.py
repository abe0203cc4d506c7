"""The agents that docs/agents.md walks through train as it says."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics, write_jsonl
from tests.environments.adapters.playing import DOCUMENT, read_example
from tests.runtime.environments.test_agents import TEMPLATE

TASKS = """
import verifiers.v1 as vf


class AnswerData(vf.TaskData):
    least: int


class Answer(vf.Task[AnswerData]):
    @vf.reward
    async def is_long(self, trace) -> float:
        return float(len(trace.last_reply or "") >= self.data.least)


class Answers(vf.Taskset[Answer, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Answer(AnswerData(prompt=f"Question {i}", least=0), self.config.task)


__all__ = ["Answers"]
"""


def train(
    world: World, directory: Path, name: str, records: list[dict[str, object]], **options: str
) -> dict[str, float]:
    """The metrics of a step with the agent `name`, which plays once for each record and sample."""
    (directory / "agent.py").write_text(read_example(name, DOCUMENT.with_name("agents.md")))
    file = world.recipe(
        "grpo",
        directory,
        data={
            "train": write_jsonl(directory / "data.jsonl", records),
            "batch": len(records),
            "chat_template": TEMPLATE,
        },
        training__steps=1,
        policy={"samples": 2, "kl": {"coef": 0.0}},
        generation__max_new_tokens=500,
        micro_batch_tokens=8192,
        environment={"factory": f"{directory / 'agent.py'}:{name}", "options": options, "workers": 1},
    )
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(directory / "run")
    return metrics


def test_the_agent_that_guesses_trains(world: World, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    metrics = train(world, tmp_path, "Guesser", [{"prompt": "the", "secret": 101}] * 2)
    assert metrics["actor.generate/turns"] == 8.0
    assert metrics["actor.generate/environment_reward"] == 0.0
    assert metrics["actor.generate/failed"] == 0.0


@pytest.mark.skipif(not find_spec("verifiers") or not shutil.which("uv"), reason="verifiers is not installed")
def test_a_taskset_of_verifiers_trains(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long_answers.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    records: list[dict[str, object]] = [{"prompt": "the", "task": i} for i in range(2)]
    metrics = train(world, tmp_path, "Verifiers", records, taskset="long_answers")
    assert metrics["actor.generate/turns"] == 1.0
    assert metrics["actor.generate/environment_reward"] == 1.0
