"""Learning from preferences, reward modelling and distillation are the same under every plan."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks
from tests.conftest import EVERY_RUN, World, read_metrics

RECIPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"preference": {"ref_ema": 0.3}}),
    "ipo": ("dpo", {"preference": {"loss": "ipo", "reference": "records"}}),
    "orpo": ("orpo", {}),
    "simpo": ("simpo", {}),
    "kto": ("kto", {}),
    "reward": ("reward", {"loss": {"center_rewards_coefficient": 0.01, "margins": True}}),
    "ranked_reward": ("ranked_reward", {"loss": {"answers": 3}}),
    "process_reward": ("process_reward", {}),
    "drawn": (
        "distillation",
        {"distillation": {"divergence": "jsd", "top_k": None, "minibatches": 2, "samples": 2}},
    ),
    "distillation": ("distillation", {"distillation": {"divergence": "jsd", "top_k": 20, "samples": 2}}),
    "offline_distillation": ("offline_distillation", {"distillation": {"divergence": "forward_kl"}}),
}
PLANS = {
    "symmetric": "symmetric",
    "two TP ranks": "d1 t2 p1",
    "two stages": "d1 t1 p2",
    "disjoint": "disjoint",
}
IN_TURNS = ("symmetric", "two TP ranks", "two stages")
PLANS_OF = {
    "drawn": ("symmetric",),
    "distillation": tuple(PLANS),
    "offline_distillation": tuple(PLANS) if EVERY_RUN else ("disjoint",),
}
"""Which of PLANS some of RECIPES are run under; the others take turns, or `make test-all` runs them under all."""
TOLERANCE = 1e-4
STEPS, BATCH = 2, 8


def recipe(world: World, directory: Path, name: str, *, size: int = 1, plan: str = "symmetric") -> Path:
    """One of RECIPES, under a plan preset or one strategy for all calls, evaluated at the start and at the end."""
    directory.mkdir(parents=True)
    algorithm, changes = RECIPES[name]
    file = world.recipe(algorithm, directory, cluster=f"1x{size}", **changes)
    document = yaml.safe_load(file.read_text())
    document["data"] |= {"batch": BATCH, "eval": document["data"]["train"], "eval_batch": 16}
    document["training"] = {"steps": STEPS}
    document["debug"] = {"verify_reallocation": True}
    for role, model in document["models"].items():
        if role != "teacher":
            model["optimizer"] = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
    file.write_text(yaml.safe_dump(document))
    if " " in plan:
        dp, tp, pp = (int(part[1:]) for part in plan.split())
        entry = {"mesh": f"0-{size - 1}", "dp": dp, "tp": tp, "pp": pp}
        calls = {call.name: entry for call in build_graph(load_experiment(str(file))).calls}
        plan = str(directory / "plan.yaml")
        Path(plan).write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": calls}))
    file.write_text(yaml.safe_dump({**document, "plan": plan}))
    return file.rename(directory / f"{directory.name}.yaml")


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Name of RECIPES -> recipe of its run in one process."""
    files = {name: recipe(world, tmp_path_factory.mktemp("alone") / name, name) for name in RECIPES}
    run_on_ranks(1, list(files.values()))
    return files


def test_all_learn_the_same_under_every_plan(
    world: World, alone: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {
        (name, plan): recipe(world, tmp_path_factory.mktemp("plans") / name, name, size=2, plan=of)
        for number, name in enumerate(RECIPES)
        for plan, of in PLANS.items()
        if plan in PLANS_OF.get(name, IN_TURNS if EVERY_RUN else (IN_TURNS[number % len(IN_TURNS)],))
    }
    run_on_ranks(2, list(files.values()))
    for (name, plan), file in files.items():
        for kind in ("train", "eval"):
            ours, expected = (read_metrics(path.parent / "run", kind) for path in (file, alone[name]))
            assert len(ours) == len(expected) == (STEPS if kind == "train" else 2)
            for step, reference in zip(ours, expected, strict=True):
                assert step.keys() == reference.keys(), f"{name}, {plan}"
                for metric, value in reference.items():
                    # At the start an answer's reward is 0 but for rounding, which decides who is right.
                    if metric.startswith(("actor", "reward", "teacher")) and not metric.endswith("accuracy"):
                        close = pytest.approx(value, rel=TOLERANCE, abs=1e-5)
                        assert step[metric] == close, f"{name}, {plan}: {metric}"


def test_losses_fall(alone: Mapping[str, Path]) -> None:
    for name, file in alone.items():
        first, last = (step for step in read_metrics(file.parent / "run", "eval"))
        key = next(
            key for key in first if key.endswith(("/loss", "/preference_loss", "/divergence", "/accuracy"))
        )
        better = first[key] < last[key] if key.endswith("accuracy") else last[key] < first[key]
        assert better, f"{name}: {key} {first[key]} {last[key]}"


def compute_logprobs(
    model: Any, tokenizer: Any, answer: str, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Tokens of an answer after the first, and the log-probabilities of all tokens in their places."""
    tokens = torch.tensor([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
    return tokens[1:], (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)


def compute_dpo(actor: Any, ref: Any, tokenizer: Any, record: dict[str, str]) -> Tensor:
    """The loss of a pair."""

    def logprob(model: Any, answer: str) -> Tensor:
        tokens, found = compute_logprobs(model, tokenizer, answer)
        return found.gather(-1, tokens[:, None]).sum()

    answers = record["chosen"], record["rejected"]
    ours = [logprob(actor, answer) for answer in answers]
    with torch.no_grad():
        theirs = [logprob(ref, answer) for answer in answers]
    difference = (ours[0] - theirs[0]) - (ours[1] - theirs[1])
    return (1 + (-0.1 * difference).exp()).log()[None]


def compute_jsd(actor: Any, teacher: Any, tokenizer: Any, record: dict[str, str]) -> Tensor:
    """The divergence at each token of an answer, over the whole vocabulary."""
    logp, logq = (compute_logprobs(m, tokenizer, record["answer"], 0.7)[1] for m in (actor, teacher))
    p, q = logp.exp(), logq.exp().detach()
    m = (0.3 * q + 0.7 * p).log()
    return (0.3 * q * (logq.detach() - m) + 0.7 * p * (logp - m)).sum(-1)


ONE_STEP: Mapping[str, tuple[dict[str, Any], Any]] = {
    "dpo": ({}, compute_dpo),
    "offline_distillation": (
        {"distillation": {"divergence": "jsd", "jsd_beta": 0.3, "temperature": 0.7, "top_k": 320}},
        compute_jsd,
    ),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_ends_with_the_weights_of_an_independent_implementation(
    name: str, world: World, alone: Mapping[str, Path], tmp_path: Path
) -> None:
    changes, compute_losses = ONE_STEP[name]
    file = recipe(world, tmp_path / name, name)
    document = yaml.safe_load(file.read_text()) | changes
    document["data"] |= {"shuffle": False, "eval": None}
    document["training"]["steps"] = 1
    other = world.actor
    if "teacher" in document["models"]:
        other = str(alone["simpo"].parent / "run" / "final")
        document["models"]["teacher"] = {"path": other}
    file.write_text(yaml.safe_dump(document))
    run_on_ranks(1, [file])

    actor, frozen = (AutoModelForCausalLM.from_pretrained(path).float() for path in (world.actor, other))
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    before = {name: weights.detach().clone() for name, weights in actor.named_parameters()}
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    records = map(json.loads, Path(document["data"]["train"]).read_text().splitlines()[:BATCH])
    torch.cat([compute_losses(actor, frozen, tokenizer, record) for record in records]).mean().backward()
    torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    optimizer.step()
    trained = AutoModelForCausalLM.from_pretrained(file.parent / "run" / "final")
    expected = dict(actor.named_parameters())
    for name, weights in trained.named_parameters():
        assert (weights - expected[name]).abs().max() <= 1e-4, name
        assert (weights - before[name]).abs().max() > 5e-4, f"{name}: there was something to learn"
