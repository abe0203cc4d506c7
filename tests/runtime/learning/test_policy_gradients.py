"""Policy gradients and expert iteration learn the same under every plan, and as transformers and torch by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import EVERY_RUN, World, keep_full_precision, read_metrics, thin

PRESETS: Mapping[str, dict[str, Any]] = {
    "grpo": {"epochs": 2, "ref_ema": 0.3},
    "dr_grpo": {},
    "dapo": {"overlong_buffer": 4, "mask_truncated": True},
    "gspo": {},
    "rloo": {"recompute_logprobs": True, "sampler_correction": "sequence_truncate"},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "remax": {},
    "expert_iteration": {"keep": 2, "aggregate": "sequence_mean"},
}
SEARCHED = ("grpo", "remax")
"""Presets that also run under plans found by search: with four calls and with six."""
METRICS = (
    "policy_loss_per_token",
    "loss",
    "reward",
    "score",
    "kept_score",
    "grad_norm",
    "response_tokens",
    "entropy",
    "sampler_weight",
    "effective_sample_size",
)
PLANS = {
    "2 symmetric": (2, "symmetric"),
    "2 two TP ranks": (2, "d1 t2 p1"),
    "2 two stages": (2, "d1 t1 p2"),
    "2 found by search": (2, "search"),
    "4 disjoint": (4, "disjoint"),
    "4 both": (4, "d1 t2 p2"),
}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
TOLERANCE = 1e-4
STEPS, BATCH = 2, 8


def recipe(
    world: World, directory: Path, preset: str, *, size: int = 1, plan: str = "symmetric", **changes: Any
) -> Path:
    """The recipe of a preset, with groups of four, under a plan preset or one strategy for all calls."""
    directory.mkdir(parents=True)
    settings = {
        "cluster": f"1x{size}",
        "data__batch": BATCH,
        "training__steps": STEPS,
        "models__actor__optimizer": OPTIMIZER,
        "debug__verify_reallocation": True,
        **changes,
    }
    section = "expert_iteration" if preset == "expert_iteration" else "policy"
    settings.setdefault(section, {"minibatches": 2, **PRESETS[preset]})
    if preset not in ("reinforce_pp", "remax"):
        settings[section] = {"samples": 4, **settings[section]}
    file = world.recipe(preset, directory, **settings)
    if plan.startswith("d"):
        dp, tp, pp = (int(part[1:]) for part in plan.split()) if " " in plan else (0, 0, 0)
        if dp:
            entry = {"mesh": f"0-{size - 1}", "dp": dp, "tp": tp, "pp": pp}
            calls = {call.name: entry for call in build_graph(load_experiment(str(file))).calls}
            plan = str(directory / "plan.yaml")
            Path(plan).write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": calls}))
    document = yaml.safe_load(file.read_text()) | {"plan": plan}
    file.write_text(yaml.safe_dump(document))
    return file.rename(directory / f"{directory.name}.yaml")


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Preset -> recipe of its run in one process."""
    files = {preset: recipe(world, tmp_path_factory.mktemp("alone") / preset, preset) for preset in PRESETS}
    run_on_ranks(1, list(files.values()))
    return files


@pytest.mark.parametrize("size", thin([2, 4], 2))
def test_every_preset_learns_the_same_under_every_plan(
    world: World,
    alone: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    keep_full_precision()
    files = {
        (preset, name): recipe(world, tmp_path_factory.mktemp("plans") / preset, preset, size=size, plan=plan)
        for number, preset in enumerate(PRESETS)
        for turn, (name, (of, plan)) in enumerate(PLANS.items())
        if of == size
        # Presets take turns.
        and (preset in SEARCHED if plan == "search" else EVERY_RUN or (number + turn) % 2)
    }
    run_on_ranks(size, list(files.values()))
    for (preset, name), file in files.items():
        where = f"{preset}, {name}"
        assert sampled(file) == sampled(alone[preset]), where
        ours, expected = (read_metrics(path.parent / "run") for path in (file, alone[preset]))
        assert len(ours) == STEPS
        for step, reference in zip(ours, expected, strict=True):
            assert step.keys() == reference.keys(), where
            for metric in (name for name in METRICS if f"actor.train/{name}" in reference):
                value = reference[f"actor.train/{metric}"]
                assert step[f"actor.train/{metric}"] == pytest.approx(value, rel=TOLERANCE, abs=1e-6), (
                    f"{where}: {metric}"
                )


class Learner:
    """One step of GRPO on transformers' models and torch's AdamW, written from the paper."""

    def __init__(self, actor: str, reward: str, *, kl: float, clip: float) -> None:
        self.actor, self.ref = (AutoModelForCausalLM.from_pretrained(actor).float() for _ in range(2))
        self.reward = AutoModelForSequenceClassification.from_pretrained(reward).float()
        self.actor.model.embed_tokens.padding_idx = None
        self.kl, self.clip = kl, clip
        self.optimizer = torch.optim.AdamW(
            self.actor.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0
        )

    def logprobs(self, model: Any, tokens: list[int], prompt: int) -> Tensor:
        found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return found.gather(-1, torch.tensor(tokens[1:])[:, None])[prompt - 1 :, 0]

    def step(self, samples: list[tuple[list[int], int]], group: int, minibatches: int) -> float:
        """Train on samples; the mean loss of the mini-batches."""
        with torch.no_grad():
            old = [self.logprobs(self.actor, *sample) for sample in samples]
            ref = [self.logprobs(self.ref, *sample) for sample in samples]
            scores = torch.stack(
                [
                    self.reward.score(self.reward.model(torch.tensor([tokens])).last_hidden_state)[0, -1, 0]
                    for tokens, _ in samples
                ]
            ).view(-1, group)
        mean, deviation = scores.mean(1, keepdim=True), scores.std(1, keepdim=True)
        advantages = ((scores - mean) / (deviation + 1e-4)).flatten()
        size, found = len(samples) // minibatches, []
        for begin in range(0, len(samples), size):
            losses = []
            for i in range(begin, begin + size):
                new = self.logprobs(self.actor, *samples[i])
                ratio = (new - old[i]).exp()
                bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
                surrogate = torch.minimum(ratio * advantages[i], bounded * advantages[i])
                divergence = (ref[i] - new).exp() - (ref[i] - new) - 1
                losses.append((self.kl * divergence - surrogate).mean())
            self.optimizer.zero_grad()
            loss = torch.stack(losses).mean()
            loss.backward()
            found.append(loss.item())
            torch.nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
            self.optimizer.step()
        return sum(found) / len(found)


def test_three_optimizer_steps_of_grpo_end_with_the_weights_of_an_independent_implementation(
    world: World, tmp_path: Path
) -> None:
    file = recipe(
        world,
        tmp_path / "grpo",
        "grpo",
        policy={"samples": 4, "minibatches": 3, "kl": {"coef": 0.1}},
        data__batch=6,
        training__steps=1,
    )
    run_on_ranks(1, [file])
    tokens = sampled(file)
    samples = [(tokens[f"0/{i}"][0], int(tokens[f"0/{i} prompt"][0][0])) for i in range(24)]
    learner = Learner(world.actor, world.reward, kl=0.1, clip=0.2)
    before = {name: p.detach().clone() for name, p in learner.actor.named_parameters()}
    loss = learner.step(samples, group=4, minibatches=3)
    (metrics,) = read_metrics(file.parent / "run")
    assert metrics["actor.train/loss"] == pytest.approx(loss, abs=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(file.parent / "run" / "final")
    expected = dict(learner.actor.named_parameters())
    for name, weights in trained.named_parameters():
        assert (weights - expected[name]).abs().max() <= 1e-4, name
        assert (weights - before[name]).abs().max() > 1e-3, f"{name}: there was something to learn"
