"""KTO beside TRL's, and its estimate of the divergence under any placement of items."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppo_reference import on_ranks
from torch import Tensor

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.kto import KTOConfig
from realrl.algorithms.kto_loss import KTOTrain, LabelledInference
from realrl.data.batch import Batch, Ragged
from realrl.data.dataset import mismatch_completions


def random_batch(seed: int, count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> Ragged:
        return Ragged.scalars(-9 * torch.rand(count, generator=generator) - 1)

    starts = torch.randint(1, 5, (count,), generator=generator)
    lengths = (starts + torch.randint(1, 7, (count,), generator=generator)).tolist()
    tokens = Ragged.of([torch.randint(0, 9, (n,), generator=generator) for n in lengths], dtype=torch.int64)
    fields = {
        "tokens": tokens,
        "prompt_length": Ragged.scalars(starts),
        "mismatched": mismatch_completions(tokens, Ragged.scalars(starts), 99),
        "label": Ragged.scalars(torch.arange(count) % 3 % 2),
        **{key: numbers() for key in ("ref_logps", "mismatched_logps", "ref_mismatched_logps")},
    }
    return Batch(tuple(range(count)), fields)


def model_output(rows: Ragged, seed: int) -> ModelOutput:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(sum(rows.lengths), generator=generator)
    logprobs[list(rows.offsets[:-1])] = 0.0
    return ModelOutput(rows.lengths, logprobs=logprobs.requires_grad_())


def trl_kto(config: KTOConfig, batch: Batch, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The loss of TRL's KTOTrainer, from everything that it takes of models."""
    from accelerate import Accelerator
    from trl import KTOTrainer

    rows = batch["tokens"]
    table = torch.nn.utils.rnn.pad_sequence(list(logprobs.split(rows.lengths)), batch_first=True)
    columns, starts = torch.arange(table.shape[1]), batch["prompt_length"].values
    mask = ((columns >= starts[:, None]) & (columns < torch.tensor(rows.lengths)[:, None])).long()
    table = (table * mask)[:, 1:]
    zeros = torch.zeros_like(table)
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=config.estimates_kl,
        _compute_kl_logps=lambda *_: batch["mismatched_logps"].values,
        loss_type=config.loss,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": batch["label"].values.bool(),
        "ref_logps": batch["ref_logps"].values,
        "ref_KL_logps": batch["ref_mismatched_logps"].values,
    }
    found = SimpleNamespace(log_probs=table, entropy=zeros, mean_logits=zeros)
    loss = KTOTrainer._compute_loss(stub, lambda **_: found, inputs, False)
    return loss, {name: values[-1] for name, values in metrics["train"].items()}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_loss_gradient_and_metrics_equal_those_of_trl(loss_type: str, seed: int) -> None:
    config = KTOConfig(loss=loss_type, beta=0.2, desirable_weight=1.5, undesirable_weight=0.8)  # type: ignore[arg-type]
    batch, method = random_batch(seed), KTOTrain(config)
    prepared, before = method.prepare(batch, lambda tensor: tensor)
    output = model_output(method.sequences(prepared), 3)
    assert output.logprobs is not None
    loss, metrics = method.loss(prepared, output)
    loss = loss / method.weight(prepared)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)
    logprobs = output.logprobs.detach().clone().requires_grad_()
    expected, theirs = trl_kto(config, batch, logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert before.result().get("kl", 0.0) == pytest.approx(theirs["kl"], rel=1e-5)
    found = metrics.result()
    for side in ("chosen", "rejected"):
        assert found[f"{side}_reward"] == pytest.approx(theirs[f"rewards/{side}"], rel=1e-5)


def test_the_divergence_is_that_of_all_ranks() -> None:
    config = KTOConfig()
    batch = random_batch(4)
    _, alone = KTOTrain(config).prepare(batch, lambda tensor: tensor)

    def run(rank: int, dp_sum: Any) -> float:
        _, metrics = KTOTrain(config).prepare(batch.select(range(rank, 6, 3)), dp_sum)
        return metrics.result()["kl"]

    assert on_ranks(3, run) == pytest.approx([alone.result()["kl"]] * 3)


def test_completions_of_a_step_are_those_of_the_items_before() -> None:
    tokens = Ragged.of([[1, 2, 10], [3, 20, 21], [4, 5, 6, 30]], dtype=torch.int64)
    starts = Ragged.scalars(torch.tensor([2, 1, 3]))
    rows = mismatch_completions(tokens, starts, 4).rows()
    assert [row.tolist() for row in rows] == [[1, 2, 30], [3, 10], [4, 5, 6, 20]]


@pytest.mark.parametrize("keys", [("tokens",), ("mismatched",), ("tokens", "mismatched")])
def test_inference_sums_the_tokens_of_the_answers_that_its_call_has(keys: tuple[str, ...]) -> None:
    batch = random_batch(5)
    batch = Batch(batch.ids, {key: batch[key] for key in (*keys, "prompt_length")})
    method = LabelledInference(KTOConfig(), "ref_")
    rows = method.sequences(batch)
    output = model_output(rows, 6)
    assert output.logprobs is not None and len(rows) == len(keys) * len(batch)
    outputs = method.outputs(batch, output)
    for i, row in enumerate(output.logprobs.split(rows.lengths)):
        key = {"tokens": "ref_logps", "mismatched": "ref_mismatched_logps"}[keys[i % len(keys)]]
        start = int(batch["prompt_length"].values[i // len(keys)])
        found = outputs[key].values[i // len(keys)].item()
        assert found == pytest.approx(sum(row[start:].tolist()), rel=1e-5)
    assert len(outputs) == len(keys)
