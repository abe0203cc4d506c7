"""Agents that talk to the model by OpenAI's API: what is learnt is what they saw, under every plan."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from realrl.families.shape import Mixture
from realrl.testing.ranks import run_on_ranks, sampled
from realrl.testing.shrink import SHAPE
from tests.conftest import EVERY_RUN, World, read_metrics, thin
from tests.model.small_models import SHAPES
from tests.runtime.strategies import use_strategy

pytest.importorskip("openai")

AGENT = """
import json
from itertools import pairwise
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent


class Agent:
    '''Says something for 2, 3 or 4 turns, and writes down which tokens it gets.'''

    def run(self, base_url, api_key, model, prompt, seed):
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        turns = 2 + seed % 3
        messages = [{"role": "user", "content": prompt}]
        tokens, mask, reward = [], [], 0.0
        for turn in range(turns):
            answer = client.chat.completions.create(
                model=model, messages=messages, max_tokens=6, extra_body={"return_token_ids": True}
            )
            (choice,) = answer.choices
            prompt_ids, ids = answer.prompt_token_ids, choice.token_ids
            assert prompt_ids[: len(tokens)] == tokens
            mask += [0] * (len(prompt_ids) - len(mask)) + [1] * len(ids)
            tokens = prompt_ids + ids
            text = choice.message.content or ""
            reward += len(text) % 5
            messages += [choice.message.to_dict(), {"role": "user", "content": f"Turn {turn} of {turns}."}]
        with open(HERE / f"seen-{Path(base_url).parts[-2]}.json", "w") as file:
            json.dump([tokens, mask, reward], file)
        return reward
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][:1] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PLANS = {
    "two replicas": (2, "symmetric"),
    "two TP ranks": (2, "d1 t2 p1"),
    "two stages": (2, "d1 t1 p2"),
    "two CP ranks": (2, "d1 c2 t1 p1"),
    "both": (4, "d1 t2 p2"),
}
MIXTURE = SHAPES["mixtral"].model_copy(
    update={"vocab_size": SHAPE["vocab_size"], "mixture": Mixture(experts=6, per_token=2)}
)
PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {"policy": {"samples": 2, "minibatches": 2, "kl": {"coef": 0.1}}},
    "ppo": {},
    "mixture": {"policy": {"samples": 2}, "models__actor__shape": MIXTURE.model_dump()},
}


def write_recipe(
    world: World,
    directory: Path,
    preset: str = "grpo",
    *,
    agent: str = AGENT,
    size: int = 1,
    plan: str = "symmetric",
    environment: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "agent.py").write_text(agent)
    settings = {
        "cluster": f"1x{size}",
        "data__batch": 8,
        "data__chat_template": TEMPLATE,
        "training__steps": 2,
        "models__actor__optimizer": {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"},
        "generation__max_new_tokens": 300,
        "micro_batch_tokens": 8192,  # rows of several agents at a time
        "environment": {"factory": f"{directory / 'agent.py'}:Agent", "workers": 1, **(environment or {})},
        **PRESETS[preset],
        **changes,
    }
    file = world.recipe("grpo" if preset == "mixture" else preset, directory, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    if preset == "mixture":
        del document["models"]["actor"]["path"]
        document["models"]["actor"]["tokenizer"] = world.tokenizer
    file.write_text(yaml.safe_dump(document))
    use_strategy(file, plan, size)
    return file.rename(directory / f"{directory.name}.yaml")


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Preset -> recipe of its run in one process."""
    files = {
        preset: write_recipe(world, tmp_path_factory.mktemp("alone") / preset, preset) for preset in PRESETS
    }
    run_on_ranks(1, list(files.values()))
    return files


def logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Log-probability of each token after the first, by transformers."""
    found: Tensor = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_what_is_learnt_is_what_the_agents_saw(world: World, alone: Mapping[str, Path]) -> None:
    directory = alone["grpo"].parent
    seen = sorted(json.loads(file.read_text()) for file in directory.glob("seen-*.json"))
    tokens = sampled(alone["grpo"])
    learnt = [(row[0], tokens[f"{name} mask"][0]) for name, row in tokens.items() if " " not in name]
    assert sorted([row, mask] for row, mask in learnt) == [[row, mask] for row, mask, _ in seen]
    assert len(seen) == 2 * 8 * 2
    steps = read_metrics(directory / "run")
    mean = np.mean([step["actor.generate/environment_reward"] for step in steps])
    assert mean == pytest.approx(np.mean([reward for *_, reward in seen]))
    turns = [sum(b > a for a, b in pairwise(mask)) for _, mask in learnt]
    assert np.mean([step["actor.generate/turns"] for step in steps]) == pytest.approx(np.mean(turns))
    assert set(turns) == {2, 3, 4}
    measured = json.loads((directory / "run" / "lengths.json").read_text())["environment"]
    assert np.mean(measured["turns"]) == pytest.approx(np.mean(turns), abs=0.2)


def test_the_loss_of_an_agents_step_is_that_of_transformers(world: World, tmp_path: Path) -> None:
    file = write_recipe(
        world,
        tmp_path / "one",
        training__steps=1,
        policy={"samples": 2, "minibatches": 1, "kl": {"coef": 0.1}},
    )
    run_on_ranks(1, [file])
    rewards = {
        tuple(tokens): reward
        for tokens, _, reward in map(json.loads, (f.read_text() for f in file.parent.glob("seen-*.json")))
    }
    tokens = sampled(file)
    rows = [tokens[f"0/{i}"][0] for i in range(16)]
    masks = [torch.tensor(tokens[f"0/{i} mask"][0][1:]).bool() for i in range(16)]
    scores = torch.tensor([rewards[tuple(row)] for row in rows]).view(-1, 2)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten()
    actor = AutoModelForCausalLM.from_pretrained(world.actor).float()
    # In the first minibatch, the policy is the one that sampled, and also the reference.
    grads = []
    for row, mask, advantage in zip(rows, masks, advantages, strict=True):
        new = logprobs(actor, row)[mask]
        grads.append((-(new - new.detach()).exp() * advantage).mean())
    torch.stack(grads).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    (metrics,) = read_metrics(file.parent / "run")
    assert metrics["actor.train/loss"] == pytest.approx(sum(g.item() for g in grads) / 16, abs=1e-5)
    assert metrics["actor.train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("size", thin([2, 4], 2))
def test_agents_and_learning_are_the_same_under_every_plan(
    world: World, alone: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    files = {
        (preset, name): write_recipe(
            world, tmp_path_factory.mktemp("plans") / preset, preset, size=size, plan=plan
        )
        for number, preset in enumerate(PRESETS)
        for turn, (name, (of, plan)) in enumerate(PLANS.items())
        # Presets take turns.
        if of == size and (EVERY_RUN or (number + turn) % 3 == 0)
    }
    run_on_ranks(size, list(files.values()))
    for (preset, name), file in files.items():
        where = f"{preset}, {name}"
        assert sampled(file) == sampled(alone[preset]), where
        ours, expected = (read_metrics(path.parent / "run") for path in (file, alone[preset]))
        for step, reference in zip(ours, expected, strict=True):
            for metric in ("actor.train/loss", "actor.train/grad_norm", "actor.generate/environment_reward"):
                assert step[metric] == pytest.approx(reference[metric], rel=1e-4, abs=1e-6), where
