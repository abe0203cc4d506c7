"""`realrl check` runs agents against made-up answers."""

from pathlib import Path

import pytest

from realrl.cli.check import check_experiment
from realrl.recipe.load import load_experiment
from realrl.testing.agent_probes import probe_agent
from realrl.testing.data_probes import open_environment, probe_data, take_records
from realrl.testing.findings import Finding
from tests.conftest import World
from tests.runtime.environments.test_agent_behaviour import write_recipe

pytest.importorskip("openai")

AGENT = """
import random
from openai import OpenAI


class Agent:
    reward = 0.25

    def run(self, base_url, api_key, model, case):
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": f"{case} {random.random() if case == 'random' else ''}"}]
        for _ in range(100 if case == "endless" else 0 if case == "silent" else 5):
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12)
            messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
            if case == "seven" and answer.choices[0].message.content == "7":
                raise ValueError("seven")
        return 1.0
"""


def probe(world: World, directory: Path, case: str, **environment: object) -> list[Finding]:
    file = write_recipe(world, directory, [case] * 8, **environment)
    (directory / "agent.py").write_text(AGENT)
    experiment = load_experiment(str(file))
    environments = open_environment(experiment)
    assert environments is not None
    try:
        data = probe_data(experiment, take_records(experiment), environments)
        findings, shown = probe_agent(experiment, environments, data)
    finally:
        environments.close()
    assert case in ("silent", "seven") or shown[0][1][0].answers
    return findings


def test_a_good_agent_has_no_problems_nor_has_its_training(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = probe(world, tmp_path, "good")
    assert [finding.problem for finding in findings] == [None] * 4
    assert findings[0].check == "environment: an agent, run gets case"
    assert findings[1].check == "environment: 4 runs of the agent, with 20 made-up answers"
    # Its five turns are more than a check allows an environment.
    assert check_experiment(load_experiment(str(tmp_path / "recipe.yaml")), processes=1)
    assert "no problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("seven", "the agent raised ValueError: seven"),
        ("silent", "ended without an answer of the model"),
        ("random", "has another prompt or reward"),
    ],
)
def test_a_mistake_is_a_problem(world: World, tmp_path: Path, case: str, problem: str) -> None:
    findings = probe(world, tmp_path, case)
    found = [finding.problem for finding in findings if finding.problem is not None]
    assert len(found) == 1 and problem in found[0]


def test_an_agent_without_end_is_ended_by_the_limit_and_gives_its_reward(
    world: World, tmp_path: Path
) -> None:
    findings = probe(world, tmp_path, "endless")
    assert all(finding.problem is None and not finding.notes for finding in findings)
