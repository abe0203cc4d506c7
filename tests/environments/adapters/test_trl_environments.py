"""Classes for TRL's `environment_factory`, unchanged: the same tools, rewards and observations as TRL has."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from realrl.environments.reply import Reply
from tests.conftest import World
from tests.environments.adapters.playing import call, play, save

CODE = '''
class Counter:
    """In the style of TRL's documentation: the reward is an attribute, which a reward function reads."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.count, self.reward, self.goal = 0, 0.0, kwargs["goal"]
        return f" Count to {self.goal}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: The increment.

        Returns:
            The counter.
        """
        self.count += step
        self.reward = float(self.count == self.goal)
        return self.count

    async def look(self) -> str:
        """
        Look at the counter.

        Returns:
            What it says.
        """
        return f"It says {self.count}."

    def _hidden(self):
        pass


class Judged(Counter):
    def reset(self, **kwargs) -> None:
        super().reset(**kwargs)

    async def get_reward(self) -> float:
        return self.count / self.goal


def read_rewards(environments, **kwargs):
    return [environment.reward for environment in environments]
'''
TURNS = (call("increment", step=2) + call("look"), call("increment", step=1), "Done.")


def test_calls_change_the_attribute_reward(tmp_path: Path) -> None:
    factory = save(tmp_path, "Counter", CODE)
    replies, reward = play(factory, {"goal": 3, "question": "?"}, *TURNS)
    assert replies[0].observation == " Count to 3."
    assert [message["content"] for message in replies[1].observation or () if isinstance(message, dict)] == [
        "2",
        "It says 2.",
    ]
    assert replies[3] == Reply(done=True) and reward == 1.0


def test_get_reward_counts_before_the_attribute(tmp_path: Path) -> None:
    replies, reward = play(save(tmp_path, "Judged", CODE), {"goal": 4}, call("increment", step=1), "Done.")
    assert replies[0] == Reply() and reward == 0.25


@pytest.mark.parametrize(("name", "goal", "reward"), [("Counter", 3, 1.0), ("Judged", 4, 0.75)])
def test_trl_plays_the_same_trajectory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, goal: int, reward: float
) -> None:
    """Both get the same turns of a model, and have the same tools, results of calls, and reward."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template

    factory = save(tmp_path, name, CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name.lower(), raising=False)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module = __import__(name.lower())
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.chat_template = qwen3_chat_template
    seen: list[Any] = []

    def read_rewards(environments: Any, completions: Any, **further: Any) -> Any:
        seen.append(completions)
        return module.read_rewards(environments)

    record = {"prompt": [{"role": "user", "content": "?"}], "goal": goal}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(world.actor),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            report_to=[],
            use_cpu=True,
            bf16=False,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=2000,
        ),
        train_dataset=Dataset.from_list([record] * 2),
        processing_class=tokenizer,
        environment_factory=getattr(module, name),
        reward_funcs=read_rewards,
    )
    turns = iter(TURNS)

    def say(prompts: Any, *further: Any, **options: Any) -> Any:
        ids = tokenizer(next(turns) + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return [ids] * len(prompts), None

    monkeypatch.setattr(trainer, "_generate_single_turn", say)
    rewards: list[Any] = []
    calculate = trainer._calculate_rewards
    monkeypatch.setattr(
        trainer, "_calculate_rewards", lambda *given: rewards.append(calculate(*given)) or rewards[-1]
    )
    trainer._generate_and_score_completions([dict(record), dict(record)])

    assert factory.describe()["tools"] == [get_json_schema(tool) for tool in trainer.tools]
    replies, ours = play(factory, record, *TURNS)
    results = [message for reply in replies[1:] for message in reply.observation or ()]
    theirs = [message for message in seen[0][0] if message["role"] == "tool"]
    assert results == theirs and len(results) == 3
    assert ours == rewards[0][0].tolist()[-1] == reward
