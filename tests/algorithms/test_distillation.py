"""Divergences over the whole vocabulary are TRL's; those of some tokens, and from drawn ones, approach them."""

import re
from typing import Any

import pytest
import torch
from ppo_reference import random_items, to_batch

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.distillation import DistillationConfig, OfflineDistillationConfig
from realrl.algorithms.distillation_loss import (
    DivergenceTrain,
    DrawnTeacher,
    DrawnTrain,
    compute_divergence,
    estimate_divergence,
)
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.plan.cluster import Cluster
from realrl.recipe.load import parse_experiment
from realrl.runtime.prepare.job import make_job
from realrl.testing.shrink import SHAPE

KINDS = [("reverse_kl", 1.0), ("forward_kl", 0.0), ("jsd", 0.5), ("jsd", 0.1)]
VOCABULARY = 40


def trl_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float, **options: Any) -> torch.Tensor:
    """GKD's loss, summed over T places. student, teacher: [T, V] logits"""
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, reduction="sum", **options
    )


def make_config(divergence: Any, beta: float, **options: Any) -> OfflineDistillationConfig:
    options |= {"jsd_beta": beta} if divergence == "jsd" else {}
    return OfflineDistillationConfig(divergence=divergence, **options)


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
def test_over_the_whole_vocabulary_loss_and_gradient_are_those_of_gkd_in_trl(
    divergence: Any, beta: float
) -> None:
    """Through the method, with sharp and flat distributions, prompts, and a temperature."""
    config = make_config(divergence, beta, top_k=VOCABULARY, temperature=0.7)
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 3)
    student, teacher = (
        scale * torch.randn(sum(lengths), VOCABULARY, generator=generator) for scale in (3.0, 6.0)
    )
    student.requires_grad_()
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0])
    labels = mask.masked_fill(mask == 0, -100)
    expected = trl_divergence(student, teacher, beta, labels=labels[None], temperature=0.7) / mask.sum()
    (expected_gradient,) = torch.autograd.grad(expected, student)

    best = (teacher / 0.7).log_softmax(-1).topk(VOCABULARY)
    batch = Batch(
        (0, 1),
        {
            "tokens": Ragged(torch.arange(8), lengths),
            "loss_mask": Ragged(mask, lengths),
            "teacher_ids": Ragged(best.indices.int(), lengths),
            "teacher_top_logprobs": Ragged(best.values, lengths),
        },
    )
    logprobs = (student / 0.7).log_softmax(-1).gather(1, best.indices)
    output = ModelOutput(lengths, candidates=best.indices, candidate_logprobs=logprobs)
    method = DivergenceTrain(config)
    loss, metrics = method.loss(batch, output)
    loss = loss / method.weight(batch)
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert metrics.result()["divergence"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics.result()["teacher_mass"] == pytest.approx(1)


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
def test_other_tokens_count_as_one_outcome(divergence: Any, beta: float) -> None:
    """The divergence over outcomes that are made fewer is TRL's of them, and smaller the fewer they are."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    ids = teacher.topk(VOCABULARY).indices
    found = []
    for k in (1, 5, 20, VOCABULARY):
        parts = [(p[ids[:k]], p[ids[k:]].logsumexp(0, keepdim=True)) for p in (student, teacher)]
        merged = [torch.cat(part if k < VOCABULARY else part[:1])[None] for part in parts]
        ours = compute_divergence(
            make_config(divergence, beta),
            logprobs=student[ids[None, :k]],
            teacher_logprobs=teacher[ids[None, :k]],
        )
        assert ours.item() == pytest.approx(trl_divergence(*merged, beta).item(), rel=1e-6)
        found.append(ours.item())
    assert found == sorted(found)


def test_no_probability_is_left_for_others_without_an_infinite_loss() -> None:
    logprobs = torch.tensor([[0.0, -200.0]], requires_grad=True)
    for divergence in ("reverse_kl", "forward_kl", "jsd"):
        config = make_config(divergence, 0.5)
        found = compute_divergence(config, logprobs=logprobs, teacher_logprobs=torch.tensor([[-0.3, -2.0]]))
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        assert found.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
def test_the_mean_over_all_tokens_is_the_divergence_of_trl_and_so_is_its_gradient(
    divergence: Any, beta: float
) -> None:
    config = DistillationConfig(
        divergence=divergence, jsd_beta=beta if divergence == "jsd" else 0.5, top_k=None, max_ratio=1e6
    )
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 13, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    expected = trl_divergence(student[None], teacher[None], beta)
    (expected_gradient,) = torch.autograd.grad(expected, student)

    logprobs = student.log_softmax(0)
    found = estimate_divergence(config, logprobs=logprobs.detach(), teacher_logprobs=teacher.log_softmax(0))
    probabilities = logprobs.detach().exp()
    assert (probabilities * found.value).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    surrogate = -(probabilities * found.advantages * logprobs).sum()
    (gradient,) = torch.autograd.grad(surrogate, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_the_ratio_of_a_forward_kl_is_bounded() -> None:
    config = DistillationConfig(divergence="forward_kl", top_k=None, max_ratio=3.0)
    found = estimate_divergence(
        config, logprobs=torch.tensor([-50.0, -1.0]), teacher_logprobs=torch.tensor([-0.1, -1.0])
    )
    assert found.advantages.tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_the_gradient_of_a_token_is_its_advantage_over_the_number_of_tokens(divergence: Any) -> None:
    items = random_items(3, 5)
    batch = to_batch(items)
    batch = batch.with_fields(teacher_logprobs=batch["ref_logprobs"])
    config = DistillationConfig(divergence=divergence, top_k=None)
    method = DrawnTrain(config)
    prepared, before = method.prepare(batch, lambda tensor: tensor)
    logprobs = batch["logprobs"].values.clone().requires_grad_()
    output = ModelOutput(batch["sequences"].lengths, logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, metrics = method.loss(prepared, output)
    (gradient,) = torch.autograd.grad(loss / method.weight(prepared), logprobs)
    actions = sum(len(item.actions) for item in items)
    expected = -prepared["advantages"].values / actions
    torch.testing.assert_close(gradient, expected)
    assert metrics.result()["importance_ratio"] == 1.0
    assert DrawnTeacher(config).metrics(batch).result() == pytest.approx(before.result())


def test_estimates_from_drawn_tokens_need_all_of_them_and_have_settings_of_their_own() -> None:
    models = {"actor": {"path": "a"}, "teacher": {"path": "t"}}
    recipe = {"algorithm": "distillation", "run_dir": "r", "models": models, "data": {"train": "t.jsonl"}}
    with pytest.raises(UserError, match="set greedy=false, top_k=0, top_p=1"):
        parse_experiment({**recipe, "generation": {"top_k": 5}, "distillation": {"top_k": None}})
    parse_experiment({**recipe, "generation": {"top_k": 5}})
    with pytest.raises(
        UserError, match="clip is for an estimate from drawn tokens; leave it out, or set top_k"
    ):
        parse_experiment({**recipe, "distillation": {"clip": 0.3}})


@pytest.mark.parametrize(
    ("top_k", "vocabulary", "problem"),
    [
        (321, 320, "distillation.top_k=321 is more than the 320 tokens of the vocabulary of models.teacher"),
        (64, 352, "models.teacher has a vocabulary of 352 tokens and models.actor one of 320; actor.train"),
    ],
)
@pytest.mark.parametrize("algorithm", ["distillation", "offline_distillation"])
def test_models_need_one_vocabulary_of_at_least_as_many_tokens(
    algorithm: str, top_k: int, vocabulary: int, problem: str
) -> None:
    recipe: dict[str, Any] = {
        "algorithm": algorithm,
        "run_dir": "r",
        "data": {"train": "t.jsonl"},
        "models": {
            "actor": {"shape": SHAPE, "tokenizer": "t"},
            "teacher": {"shape": {**SHAPE, "vocab_size": vocabulary}, "tokenizer": "t"},
        },
    }
    with pytest.raises(UserError, match=re.escape(problem)):
        make_job(parse_experiment({**recipe, "distillation": {"top_k": top_k}}), Cluster(1, 1))
    recipe["models"]["teacher"]["shape"] = SHAPE
    make_job(parse_experiment({**recipe, "distillation": {"top_k": 320}}), Cluster(1, 1))
