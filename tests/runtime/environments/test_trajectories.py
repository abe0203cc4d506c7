"""Algorithms learn from trajectories as an independent implementation does, and the same under every plan."""

import json
from collections.abc import Mapping
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
from tests.conftest import EVERY_RUN, World, read_metrics, thin, write_jsonl
from tests.model.small_models import SHAPES
from tests.runtime.strategies import use_strategy

GAME = """
class Game:
    '''Ends after 2, 3 or 7 turns, and rewards some turns.'''

    def reset(self, seed):
        self.left = self.turns = (2, 3, 7)[seed % 3]
        return " begin"

    def step(self, text):
        self.left -= 1
        return f" turn {self.turns - self.left} of {self.turns}.", float(len(text) % 5), not self.left
"""
PLANS = {
    "2 symmetric": (2, "symmetric"),
    "2 two TP ranks": (2, "d1 t2 p1"),
    "2 two stages": (2, "d1 t1 p2"),
    "2 two CP ranks": (2, "d1 c2 t1 p1"),
    "2 divided experts": (2, "d2 t1 p1 e2"),
    "2 CP ranks with divided experts": (2, "d1 c2 t1 p1 e2"),
    "4 both": (4, "d1 t2 p2"),
}
MIXTURE = SHAPES["mixtral"].model_copy(
    update={"vocab_size": SHAPE["vocab_size"], "mixture": Mixture(experts=6, per_token=2)}
)
"""Its training takes over the experts that generation chose."""
PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {"policy": {"samples": 4, "minibatches": 2, "kl": {"coef": 0.1}}},
    "reinforce_pp": {"policy": {"minibatches": 2}},
    "remax": {"policy": {"minibatches": 2}},
    "expert_iteration": {"expert_iteration": {"samples": 4, "keep": 2, "minibatches": 2}},
    "ppo": {},
    "dapo": {"policy": {"samples": 4, "minibatches": 2, "sampling_rounds": 2}},
    "mixture": {"policy": {"samples": 4, "minibatches": 2}, "models__actor__shape": MIXTURE.model_dump()},
}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
TOLERANCE = 1e-4


def recipe(
    world: World, directory: Path, preset: str, *, size: int = 1, plan: str = "symmetric", **changes: Any
) -> Path:
    """The recipe of a preset whose actor plays the game, under a plan preset or one strategy for all calls."""
    directory.mkdir(parents=True)
    game = directory / "game.py"
    game.write_text(GAME)
    settings = {
        "cluster": f"1x{size}",
        "data__batch": 8,
        "training__steps": 2,
        "models__actor__optimizer": OPTIMIZER,
        "generation__max_new_tokens": 200,
        "environment": {"factory": f"{game}:Game", "max_turn_tokens": 6, "workers": 1},
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
    files = {preset: recipe(world, tmp_path_factory.mktemp("alone") / preset, preset) for preset in PRESETS}
    run_on_ranks(1, list(files.values()))
    return files


@pytest.mark.parametrize("size", thin([2, 4], 2))
def test_trajectories_and_learning_are_the_same_under_every_plan(
    world: World, alone: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    files = {
        (preset, name): recipe(world, tmp_path_factory.mktemp("plans") / preset, preset, size=size, plan=plan)
        for number, preset in enumerate(PRESETS)
        for turn, (name, (of, plan)) in enumerate(PLANS.items())
        # Presets take turns, except that only a mixture has experts.
        if of == size and (preset == "mixture" if " e" in plan else EVERY_RUN or (number + turn) % 3 == 0)
    }
    run_on_ranks(size, list(files.values()))
    for (preset, name), file in files.items():
        where = f"{preset}, {name}"
        assert sampled(file) == sampled(alone[preset]), where
        ours, expected = (read_metrics(path.parent / "run") for path in (file, alone[preset]))
        for step, reference in zip(ours, expected, strict=True):
            assert step.keys() == reference.keys(), where
            for metric in ("actor.train/loss", "actor.train/grad_norm", "actor.generate/environment_reward"):
                if metric in reference:
                    assert step[metric] == pytest.approx(reference[metric], rel=TOLERANCE, abs=1e-6), where


def test_masks_fit_and_no_trajectory_is_longer_than_its_limit(alone: Mapping[str, Path]) -> None:
    """Also not those that were evicted from the small cache of these runs, and prefilled again."""
    for preset, file in alone.items():
        tokens = sampled(file)
        rows = [name for name in tokens if not name.endswith((" prompt", " mask"))]
        assert rows, preset
        for name in rows:
            for row, mask, prompt in zip(
                *(tokens[key] for key in (name, f"{name} mask", f"{name} prompt")), strict=True
            ):
                assert len(mask) == len(row) <= prompt[0] + 200, (preset, name)
                assert not any(mask[: prompt[0]]), (preset, name)


def test_equal_prompts_get_different_samples_on_every_rank(world: World, tmp_path: Path) -> None:
    changes = {"data__train": write_jsonl(tmp_path / "same.jsonl", [{"prompt": "the film"}] * 16)}
    file = recipe(world, tmp_path / "same", "grpo", size=2, training__steps=1, **changes)
    run_on_ranks(2, [file])
    tokens = sampled(file)
    turns = {tuple(tokens[f"0/{i}"][0][:20]) for i in range(8 * 4)}
    assert len(turns) == 8 * 4


def test_a_run_measures_its_environment(alone: Mapping[str, Path]) -> None:
    run = alone["grpo"].parent / "run"
    measured = json.loads((run / "lengths.json").read_text())["environment"]
    assert all(0 <= seconds < 10 for seconds in measured["seconds"])
    steps = [step["actor.generate/turns"] for step in read_metrics(run)]
    assert len(measured["turns"]) == 64, "all trajectories of two steps"
    assert np.mean(measured["turns"]) == pytest.approx(np.mean(steps))
    # Before the first turn, 6 letters; the template of these models adds nothing.
    assert min(measured["given"]) > 6


def logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Log-probability of each token after the first, by transformers."""
    found: Tensor = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("tokens_at_a_time", [256, 1], ids=["packed", "one by one"])
def test_a_step_of_grpo_on_trajectories_is_that_of_an_independent_implementation(
    world: World, tmp_path: Path, tokens_at_a_time: int
) -> None:
    file = recipe(world, tmp_path / "grpo", "grpo", training__steps=1, micro_batch_tokens=tokens_at_a_time)
    run_on_ranks(1, [file])
    tokens, count = sampled(file), 8 * 4
    actor, ref = (AutoModelForCausalLM.from_pretrained(world.actor).float() for _ in range(2))
    actor.model.embed_tokens.padding_idx = None
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    rows = [tokens[f"0/{i}"][0] for i in range(count)]
    masks = [torch.tensor(tokens[f"0/{i} mask"][0][1:]).bool() for i in range(count)]
    turns = [int((mask.int().diff() == 1).sum()) for mask in masks]
    assert set(turns) == {2, 3, 7}
    from realrl.huggingface.tokenizers import load_tokenizer

    scores = torch.tensor(
        [score(load_tokenizer(world.tokenizer), row, mask) for row, mask in zip(rows, masks, strict=True)]
    ).view(-1, 4)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)).flatten()
    with torch.no_grad():
        old = [logprobs(actor, row)[mask] for row, mask in zip(rows, masks, strict=True)]
        reference = [logprobs(ref, row)[mask] for row, mask in zip(rows, masks, strict=True)]
    losses = []
    for begin in (0, count // 2):
        terms = []
        for i in range(begin, begin + count // 2):
            new = logprobs(actor, rows[i])[masks[i]]
            ratio = (new - old[i]).exp()
            surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
            difference = reference[i] - new
            terms.append((0.1 * (difference.exp() - difference - 1) - surrogate).mean())
        optimizer.zero_grad()
        loss = torch.stack(terms).mean()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
    (metrics,) = read_metrics(file.parent / "run")
    assert metrics["actor.train/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert metrics["actor.generate/turns"] == pytest.approx(sum(turns) / count)
    assert metrics["actor.generate/environment_reward"] == pytest.approx(scores.mean().item(), abs=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(file.parent / "run" / "final")
    for name, weights in trained.named_parameters():
        assert (weights - dict(actor.named_parameters())[name]).abs().max() <= 1e-4, name


def score(tokenizer: Any, row: list[int], mask: Tensor) -> float:
    """The reward of the game for the turns that the model sampled."""
    total, turn = 0.0, list[int]()
    for token, sampled_by_model in zip([*row[1:], -1], [*mask.tolist(), False], strict=True):
        if sampled_by_model:
            turn.append(token)
        elif turn:
            ended = turn[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(turn[:-1] if ended else turn, skip_special_tokens=True)
            total += len(text) % 5
            turn = []
    return total
