"""Names of other tools in recipes: accepted if they mean the same; otherwise the message names our setting."""

import re
from pathlib import Path
from typing import Any

import pytest

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import section_class
from realrl.recipe.load import change_settings, parse_experiment
from realrl.recipe.other_names import OTHER_NAMES
from realrl.recipe.registry import find_algorithm, list_algorithms
from tests.config.minimal import least

RECIPES = [find_algorithm(name)[0].recipe for name in list_algorithms()]


def has(cls: type[Settings], path: str) -> bool:
    first, _, rest = path.partition(".")
    field = cls.written_fields().get(first)
    if field is None or not rest:
        return field is not None
    inner = section_class(field)
    return inner is not None and has(inner, rest)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_every_name_stands_for_a_setting_or_says_why_there_is_none(name: str) -> None:
    other = OTHER_NAMES[name]
    assert other.targets or other.about
    for target in other.targets:
        assert any(has(recipe, target) for recipe in RECIPES), target


def test_no_name_of_another_tool_hides_a_setting() -> None:
    for recipe in RECIPES:
        assert not [name for name in OTHER_NAMES if has(recipe, name)]


ACCEPTED = [
    ("grpo", "num_generations", 4, "policy.samples", 4),
    ("grpo", "policy.num_generations", 4, "policy.samples", 4),
    ("grpo", "generation.num_generations", 4, "policy.samples", 4),
    ("expert_iteration", "num_generations", 8, "expert_iteration.samples", 8),
    ("distillation", "num_generations", 8, "distillation.samples", 8),
    ("grpo", "learning_rate", 1e-3, "models.actor.optimizer.lr", 1e-3),
    ("reward", "learning_rate", 1e-3, "models.reward.optimizer.lr", 1e-3),
    ("ppo", "models.critic.learning_rate", 1e-3, "models.critic.optimizer.lr", 1e-3),
    ("ppo", "models.critic.optimizer.learning_rate", 1e-3, "models.critic.optimizer.lr", 1e-3),
    ("grpo", "lr_scheduler_type", "constant_with_warmup", "models.actor.optimizer.schedule", "constant"),
    ("grpo", "policy.beta", 0.2, "policy.kl.coef", 0.2),
    ("ppo", "beta", 0.2, "ppo.kl.coef", 0.2),
    ("dpo", "beta", 0.2, "preference.beta", 0.2),
    ("dpo", "loss_type", "ipo", "preference.loss", "ipo"),
    ("grpo", "loss_type", "dr_grpo", "policy.aggregate", "constant"),
    ("grpo", "loss_agg_mode", "token-mean", "policy.aggregate", "token_mean"),
    ("grpo", "scale_rewards", False, "policy.scale", "none"),
    ("grpo", "importance_sampling_level", "sequence", "policy.ratio", "sequence_mean"),
    ("grpo", "epsilon", 0.3, "policy.clip", 0.3),
    ("grpo", "policy.epsilon_high", 0.3, "policy.clip_high", 0.3),
    ("grpo", "max_completion_length", 8, "generation.max_new_tokens", 8),
    ("grpo", "data.max_prompt_length", 8, "data.max_prompt_tokens", 8),
    ("sft", "num_train_epochs", 2, "training.epochs", 2),
    ("sft", "models.actor.lora", {"r": 4, "lora_alpha": 4}, "models.actor.lora.rank", 4),
]


@pytest.mark.parametrize(("algorithm", "key", "value", "ours", "read"), ACCEPTED)
def test_a_name_with_the_same_meaning_may_be_used(
    algorithm: str, key: str, value: Any, ours: str, read: Any
) -> None:
    found: Any = parse_experiment(change_settings(least(algorithm), [(key, value)]))
    for part in ours.split("."):
        found = getattr(found, part)
    assert found == read


def test_the_last_of_two_names_of_a_setting_counts_among_overrides() -> None:
    changes = [("policy.samples", 4), ("num_generations", 16), ("clip_ratio", 0.3), ("policy.clip", 0.1)]
    policy: Any = parse_experiment(change_settings(least("grpo"), changes)).policy  # type: ignore[attr-defined]
    assert (policy.samples, policy.clip) == (16, 0.1)


def test_two_names_of_a_setting_in_one_recipe_are_refused() -> None:
    recipe = least("grpo") | {"num_generations": 4, "policy": {"samples": 8}}
    with pytest.raises(
        UserError, match=r"^num_generations and policy\.samples are the same setting; give one"
    ):
        parse_experiment(recipe)


def test_the_documents_list_every_accepted_name() -> None:
    document = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w.]+)`", document.partition("## Names from other tools")[2]))
    assert {name for name, other in OTHER_NAMES.items() if other.accepted} <= listed


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "words"),
    [
        (
            "kto",
            "preference.beta",
            0.1,
            "preference: unknown key; for preference.beta, did you mean kto.beta?",
        ),
        ("sft", "training.gradient_accumulation_steps", 4, "did you mean micro_batch_tokens?"),
        ("sft", "per_device_train_batch_size", 4, "did you mean data.batch? It counts all devices"),
        ("sft", "lora.r", 8, "lora: unknown key; for lora.r, did you mean models.actor.lora.rank?"),
        ("sft", "resize_vocab", True, "did you mean models.actor.vocab_size? It is a number of tokens"),
        ("sft", "models.actor.optimizer.warmup_ratio", 0.1, "optimizer.warmup_steps? It counts steps."),
        ("grpo", "actor_rollout_ref.rollout.n", 8, "rollout.n, did you mean policy.samples?"),
        ("grpo", "actor_rollout_ref.actor.optim.lr", 1e-6, "did you mean models.actor.optimizer.lr?"),
        ("ppo", "critic.optim.lr", 1e-6, "did you mean models.critic.optimizer.lr?"),
        ("grpo", "trainer.n_gpus_per_node", 8, "did you mean cluster? It is written as nodes x devices"),
        ("sft", "packing", True, "packing: unknown key; sequences are always packed"),
        ("sft", "polcy.x", 1, "polcy: unknown key; known keys are"),
    ],
)
def test_a_name_of_another_tool_is_translated(algorithm: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment(change_settings(least(algorithm), [(key, value)]))
    assert words in str(caught.value)
