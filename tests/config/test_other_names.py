"""Names of other tools in recipes: the error message says what they are called here."""

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


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "words"),
    [
        ("grpo", "num_generations", 8, "num_generations: unknown key; did you mean policy.samples?"),
        ("grpo", "policy.num_generations", 8, "did you mean policy.samples?"),
        ("grpo", "generation.num_generations", 8, "did you mean policy.samples?"),
        ("expert_iteration", "num_generations", 8, "did you mean expert_iteration.samples?"),
        ("distillation", "num_generations", 8, "did you mean distillation.samples?"),
        ("grpo", "learning_rate", 1e-5, "did you mean models.actor.optimizer.lr?"),
        ("reward", "learning_rate", 1e-5, "did you mean models.reward.optimizer.lr?"),
        ("ppo", "models.critic.learning_rate", 1e-5, "did you mean models.critic.optimizer.lr?"),
        ("ppo", "models.critic.optimizer.learning_rate", 1e-5, "did you mean models.critic.optimizer.lr?"),
        ("grpo", "policy.beta", 0.1, "did you mean policy.kl.coef?"),
        ("ppo", "beta", 0.1, "did you mean ppo.kl.coef?"),
        ("dpo", "beta", 0.1, "did you mean preference.beta?"),
        (
            "kto",
            "preference.beta",
            0.1,
            "preference: unknown key; for preference.beta, did you mean kto.beta?",
        ),
        ("sft", "training.gradient_accumulation_steps", 4, "did you mean micro_batch_tokens?"),
        ("sft", "per_device_train_batch_size", 4, "did you mean data.batch? It counts all devices"),
        ("sft", "lora.r", 8, "lora: unknown key; for lora.r, did you mean models.actor.lora.rank?"),
        ("sft", "models.actor.lora", {"r": 8, "lora_alpha": 4}, "did you mean models.actor.lora.alpha?"),
        ("sft", "models.actor.lora.target_modules", ["q"], "did you mean models.actor.lora.targets?"),
        ("sft", "resize_vocab", True, "did you mean models.actor.vocab_size? It is a number of tokens"),
        ("grpo", "max_completion_length", 8, "did you mean generation.max_new_tokens?"),
        ("grpo", "data.max_prompt_length", 8, "did you mean data.max_prompt_tokens?"),
        ("sft", "num_train_epochs", 1, "did you mean training.epochs?"),
        ("sft", "models.actor.optimizer.warmup_ratio", 0.1, "optimizer.warmup_steps? It counts steps."),
        ("grpo", "policy.epsilon", 0.2, "did you mean policy.clip?"),
        ("grpo", "actor_rollout_ref.rollout.n", 8, "rollout.n, did you mean policy.samples?"),
        ("grpo", "actor_rollout_ref.actor.optim.lr", 1e-6, "did you mean models.actor.optimizer.lr?"),
        ("ppo", "critic.optim.lr", 1e-6, "did you mean models.critic.optimizer.lr?"),
        ("grpo", "trainer.n_gpus_per_node", 8, "did you mean cluster? It is written as nodes x devices"),
        ("sft", "packing", True, "packing: unknown key; sequences are always packed"),
        ("sft", "num_generations", 8, "did you mean evaluation.samples?"),
        ("sft", "polcy.x", 1, "polcy: unknown key; known keys are"),
    ],
)
def test_a_name_of_another_tool_is_translated(algorithm: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment(change_settings(least(algorithm), [(key, value)]))
    assert words in str(caught.value)
