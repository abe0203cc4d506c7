"""Estimates of divergences from drawn tokens have the mean, and the mean gradient, of the whole divergence."""

from typing import Any

import pytest
import torch
from ppo_reference import random_items, to_batch

from realrl.algorithms.distillation.config import DistillationConfig
from realrl.algorithms.distillation.losses import estimate_divergence
from realrl.algorithms.distillation.method import DistillationTrain, TeacherInference
from realrl.algorithms.method import ModelOutput
from realrl.config.errors import UserError
from realrl.recipe.load import parse_experiment


def trl_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(
        student[None, None], teacher[None, None], beta=beta, reduction="sum"
    )


@pytest.mark.parametrize(
    ("divergence", "beta"), [("reverse_kl", 1.0), ("forward_kl", 0.0), ("jsd", 0.5), ("jsd", 0.1)]
)
def test_the_mean_over_all_tokens_is_the_divergence_of_trl_and_so_is_its_gradient(
    divergence: Any, beta: float
) -> None:
    config = DistillationConfig(
        divergence=divergence, jsd_beta=beta if divergence == "jsd" else 0.5, max_ratio=1e6
    )
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 13, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    expected = trl_divergence(student, teacher, beta)
    (expected_gradient,) = torch.autograd.grad(expected, student)

    logprobs = student.log_softmax(0)
    found = estimate_divergence(config, logprobs=logprobs.detach(), teacher_logprobs=teacher.log_softmax(0))
    probabilities = logprobs.detach().exp()
    assert (probabilities * found.value).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    surrogate = -(probabilities * found.advantages * logprobs).sum()
    (gradient,) = torch.autograd.grad(surrogate, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_the_ratio_of_a_forward_kl_is_bounded() -> None:
    config = DistillationConfig(divergence="forward_kl", max_ratio=3.0)
    found = estimate_divergence(
        config, logprobs=torch.tensor([-50.0, -1.0]), teacher_logprobs=torch.tensor([-0.1, -1.0])
    )
    assert found.advantages.tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_the_gradient_of_a_token_is_its_advantage_over_the_number_of_tokens(divergence: Any) -> None:
    items = random_items(3, 5)
    batch = to_batch(items)
    batch = batch.with_fields(teacher_logprobs=batch["ref_logprobs"])
    config = DistillationConfig(divergence=divergence)
    method = DistillationTrain(config)
    prepared, before = method.prepare(batch, lambda tensor: tensor)
    logprobs = batch["logprobs"].values.clone().requires_grad_()
    output = ModelOutput(batch["sequences"].lengths, logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, metrics = method.loss(prepared, output)
    (gradient,) = torch.autograd.grad(loss / method.weight(prepared), logprobs)
    actions = sum(len(item.actions) for item in items)
    expected = -prepared["advantages"].values / actions
    torch.testing.assert_close(gradient, expected)
    assert metrics.result()["importance_ratio"] == 1.0
    assert TeacherInference(config).metrics(batch).result() == pytest.approx(before.result())


def test_sampling_that_leaves_tokens_out_is_refused() -> None:
    models = {"actor": {"path": "a"}, "teacher": {"path": "t"}}
    recipe = {"algorithm": "distillation", "run_dir": "r", "models": models, "data": {"train": "t.jsonl"}}
    with pytest.raises(UserError, match="set greedy=false, top_k=0, top_p=1"):
        parse_experiment({**recipe, "generation": {"top_k": 5}})
