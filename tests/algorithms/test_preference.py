"""Losses of preference pairs beside those of TRL, and what they are made of beside plain Python."""

import math
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput
from realrl.algorithms.preference import PreferenceConfig
from realrl.algorithms.preference_loss import PreferenceMethod, RefLogprobs, compute_preference_loss
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.load import parse_experiment
from realrl.recipe.registry import find_algorithm

VOCABULARY = 7


def alone(tensor: Tensor) -> Tensor:
    return tensor


def config_of(preset: str, **changes: Any) -> PreferenceConfig:
    section: PreferenceConfig = find_algorithm(preset)[0].recipe.model_fields["preference"].default
    return type(section).model_validate(section.model_dump() | changes)


def random_pairs(seed: int, count: int = 5, *, of_prompt: int = 1) -> Batch:
    rng = random.Random(seed)
    prompts = [rng.randint(1, 4) for _ in range(count)]

    def rows() -> Ragged:
        lengths = [prompt + rng.randint(1, 6) for prompt in prompts]
        return Ragged.of([[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths], dtype=torch.int64)

    starts = Ragged.scalars(torch.tensor(prompts))
    fields = {
        "chosen": rows(),
        "rejected": rows(),
        "chosen_prompt_length": starts,
        "rejected_prompt_length": starts,
        "pairs_of_prompt": Ragged.scalars(torch.tensor([1 + i % of_prompt for i in range(count)])),
    }
    for side in ("chosen", "rejected"):
        fields[f"ref_{side}_logps"] = Ragged.scalars(
            torch.tensor([rng.uniform(-9, -2) for _ in range(count)])
        )
    return Batch(tuple(range(count)), fields)


def model_output(rows: Ragged, seed: int) -> ModelOutput:
    """Log-probabilities of a language model: 0 for the first token of each row."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(sum(rows.lengths), generator=generator) - 0.01
    logprobs[list(rows.offsets[:-1])] = 0.0
    return ModelOutput(rows.lengths, logprobs=logprobs.requires_grad_())


def padded(values: Tensor, rows: Ragged) -> Tensor:
    """A number per token, one row each, in TRL's order: all chosen ones, then all rejected ones."""
    split = values.split(rows.lengths)
    return torch.nn.utils.rnn.pad_sequence([*split[0::2], *split[1::2]], batch_first=True)


def answer_mask(batch: Batch, rows: Ragged) -> Tensor:
    starts = batch["chosen_prompt_length"].values.repeat(2)
    lengths = torch.tensor([*rows.lengths[0::2], *rows.lengths[1::2]])
    columns = torch.arange(max(rows.lengths))
    return ((columns >= starts[:, None]) & (columns < lengths[:, None])).long()


def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def trl_dpo(batch: Batch, rows: Ragged, logprobs: Tensor, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of TRL's DPOTrainer, from everything that it takes of models."""
    from trl import DPOTrainer

    mask = answer_mask(batch, rows)
    table = (padded(logprobs, rows) * mask)[:, 1:]
    zeros = torch.zeros_like(table)
    found = SimpleNamespace(log_probs=table, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        use_weighting=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        **{key: batch[key].values for key in ("ref_chosen_logps", "ref_rejected_logps")},
    }
    loss = DPOTrainer._compute_loss(stub, lambda **_: found, inputs, False)
    return loss, {name: values[-1] for name, values in metrics["train"].items()}


class Logits:
    """Logits of which the log-probability of each token is as given: all others share what is left."""

    def __init__(self, batch: Batch, rows: Ragged, logprobs: Tensor) -> None:
        self.ids = padded(rows.values, rows)
        table = padded(logprobs, rows)[:, 1:]
        rest = torch.log1p(-table.exp().clamp(max=1 - 1e-6)) - math.log(VOCABULARY - 1)
        logits = rest[..., None].expand(*table.shape, VOCABULARY)
        logits = logits.scatter(-1, self.ids[:, 1:, None], table[..., None])
        self.logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))


def trl_without_reference(
    kind: str, batch: Batch, rows: Ragged, logprobs: Tensor, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """The loss of TRL's ORPOTrainer or CPOTrainer."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    trainer: Any = {"orpo": ORPOTrainer, "cpo": CPOTrainer}[kind]
    model = Logits(batch, rows, logprobs)
    count, mask = len(batch), answer_mask(batch, rows)
    lengths = torch.tensor([*rows.lengths[0::2], *rows.lengths[1::2]])
    present = (torch.arange(mask.shape[1]) < lengths[:, None]).long()
    labels = model.ids.masked_fill(mask == 0, -100)
    stub = SimpleNamespace(
        accelerator=accelerator(),
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        pad_token_id=0,
        padding_value=0,
        **settings,
    )
    stub.concatenated_inputs = lambda *_, **__: {
        "concatenated_input_ids": model.ids,
        "concatenated_attention_mask": present,
        "concatenated_labels": labels,
    }
    for name in ("odds_ratio_loss", "cpo_loss", "concatenated_forward"):
        if hasattr(trainer, name):
            setattr(stub, name, getattr(trainer, name).__get__(stub))
    stub.get_batch_logps = trainer.get_batch_logps
    given = {"chosen_labels": labels[:count]}
    loss, metrics = trainer.get_batch_loss_metrics(
        stub, lambda *_, **__: SimpleNamespace(logits=model.logits), given, "train"
    )
    return loss, metrics


def ours(config: PreferenceConfig, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
    method = PreferenceMethod(config)
    prepared, _ = method.prepare(batch, alone)
    loss, metrics = method.loss(prepared, output)
    return loss / method.weight(prepared), metrics


DPO_SETTINGS = {"beta": 0.3, "label_smoothing": 0.0, "loss_types": ["sigmoid"]}
CPO_SETTINGS = {"beta": 0.3, "cpo_alpha": 0, "label_smoothing": 0.0}
SIMPO_SETTINGS = {**CPO_SETTINGS, "beta": 2.0, "simpo_gamma": 0.6, "loss_type": "simpo"}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "sigmoid": ("dpo", {}, "dpo", {}),
    "hinge": ("dpo", {"loss": "hinge"}, "dpo", {"loss_types": ["hinge"]}),
    "ipo": ("dpo", {"loss": "ipo"}, "dpo", {"loss_types": ["ipo"]}),
    "robust": (
        "dpo",
        {"loss": "robust", "label_smoothing": 0.2},
        "dpo",
        {"label_smoothing": 0.2, "loss_types": ["robust"]},
    ),
    "normalised": ("dpo", {"length_normalization": True}, "dpo", {"loss_types": ["sigmoid_norm"]}),
    "orpo": ("orpo", {}, "orpo", {"beta": 0.3}),
    "simpo": ("simpo", {"beta": 2.0, "gamma": 0.6}, "cpo", SIMPO_SETTINGS),
    "cpo": (
        "dpo",
        {"reference": "none", "label_smoothing": 0.1, "nll_coef": 0.7},
        "cpo",
        {"beta": 0.3, "loss_type": "sigmoid", "cpo_alpha": 0.7, "label_smoothing": 0.1},
    ),
    "hinge-without-reference": (
        "dpo",
        {"reference": "none", "loss": "hinge"},
        "cpo",
        {**CPO_SETTINGS, "loss_type": "hinge"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_equal_those_of_trl(case: str) -> None:
    preset, changes, trainer, settings = CASES[case]
    config, batch = config_of(preset, **{"beta": 0.3, **changes}), random_pairs(1)
    method = PreferenceMethod(config)
    rows = method.sequences(batch)
    output = model_output(rows, 2)
    assert output.logprobs is not None
    loss, metrics = ours(config, batch, output)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)
    logprobs = output.logprobs.detach().clone().requires_grad_()
    if trainer == "dpo":
        expected, theirs = trl_dpo(batch, rows, logprobs, **{**DPO_SETTINGS, **settings})
    else:
        settings = {"alpha": 0.0, **settings} if trainer == "cpo" else settings
        expected, theirs = trl_without_reference(trainer, batch, rows, logprobs, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    found = metrics.result()
    assert found["accuracy"] == pytest.approx(theirs["rewards/accuracies"])
    if not config.per_token or trainer == "cpo":
        assert found["margin"] == pytest.approx(theirs["rewards/margins"], rel=1e-4)
        assert found["chosen_reward"] == pytest.approx(theirs["rewards/chosen"], rel=1e-4)


def test_certain_answers_have_a_finite_odds_ratio() -> None:
    sure = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = compute_preference_loss(config_of("orpo"), chosen=sure, rejected=torch.tensor([-1.0, 0.0]))
    loss.sum().backward()
    assert loss.isfinite().all() and sure.grad is not None and sure.grad.isfinite().all()


@pytest.mark.parametrize("preset", ["dpo", "orpo", "simpo"])
def test_micro_batches_and_ranks_add_up_to_the_batch(preset: str) -> None:
    config, batch = config_of(preset), random_pairs(3, 6, of_prompt=2)
    rows = PreferenceMethod(config).sequences(batch)
    output = model_output(rows, 4)
    assert output.logprobs is not None
    whole, _ = ours(config, batch, output)
    split = output.logprobs.split(rows.lengths)
    method = PreferenceMethod(config)
    method.prepare(batch, alone)
    total = torch.zeros((), dtype=torch.float64)
    metrics = Metrics()
    for positions in ([5], [0, 2], [1, 4, 3]):
        part = batch.select(positions)
        values = torch.cat([split[2 * i + side] for i in positions for side in (0, 1)])
        loss, of_part = method.loss(part, ModelOutput(method.sequences(part).lengths, logprobs=values))
        total, _ = total + loss.detach(), metrics.update(of_part)
    assert (total / method.weight(batch)).item() == pytest.approx(whole.item(), rel=1e-6)
    assert metrics.result()["loss"] == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("preset", ["dpo", "orpo"])
def test_evaluation_reports_what_training_does(preset: str) -> None:
    config, batch = config_of(preset), random_pairs(5)
    method = PreferenceMethod(config)
    output = model_output(method.sequences(batch), 6)
    found = method.metrics(batch.with_fields(**method.outputs(batch, output))).result()
    _, trained = ours(config, batch, output)
    expected = {name: value for name, value in trained.result().items() if name in found}
    assert found == pytest.approx(expected, rel=1e-5)
    assert ("loss" in found) is (config.nll_coef == 0) and ("nll" in found) is (config.nll_coef > 0)


def test_the_reference_gives_sums_over_the_tokens_of_answers() -> None:
    batch, method = random_pairs(7), RefLogprobs()
    rows = method.sequences(batch)
    output = model_output(rows, 8)
    assert output.logprobs is not None
    found = method.outputs(batch, output)
    for i, row in enumerate(output.logprobs.split(rows.lengths)):
        start = int(batch["chosen_prompt_length"].values[i // 2])
        key = f"ref_{('chosen', 'rejected')[i % 2]}_logps"
        assert found[key].values[i // 2].item() == pytest.approx(sum(row[start:].tolist()), rel=1e-5)


def recipe(preset: str, **changes: Any) -> Experiment:
    models = changes.pop("models", {"actor": {"path": "m"}})
    data = {"train": "t.jsonl", "eval": "e.jsonl"}
    return parse_experiment({"algorithm": preset, "run_dir": "r", "models": models, "data": data, **changes})


@pytest.mark.parametrize(
    ("preset", "section", "calls"),
    [
        ("dpo", {}, ["ref.inference", "actor.train"]),
        ("dpo", {"reference": "records"}, ["actor.train"]),
        ("dpo", {"reference": "none"}, ["actor.train"]),
        ("orpo", {}, ["actor.train"]),
        ("simpo", {}, ["actor.train"]),
    ],
)
def test_a_reference_is_loaded_only_where_one_is_needed(
    preset: str, section: dict[str, Any], calls: list[str]
) -> None:
    experiment = recipe(preset, preference=section)
    graph, evaluation = build_graph(experiment), build_eval_graph(experiment)
    assert [call.name for call in graph.order] == calls
    assert evaluation is not None and len(evaluation.calls) == len(calls)
    assert ("ref_chosen_logps" in graph.sources) is (section.get("reference") == "records")


@pytest.mark.parametrize(
    ("section", "models", "message"),
    [
        ({"gamma": 1.0, "loss": "hinge"}, {}, "gamma=1 is the margin of loss=sigmoid"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, {}, "label_smoothing=0.1 goes with"),
        ({"loss": "odds_ratio"}, {}, "set reference=none"),
        (
            {"loss": "ipo", "length_normalization": False},
            {},
            "loss=ipo compares means over tokens; leave it out",
        ),
        (
            {"loss": "odds_ratio", "reference": "none", "length_normalization": False},
            {},
            "loss=odds_ratio compares means over tokens",
        ),
        ({"ref_ema": 0.1, "reference": "none"}, {}, "ref_ema=0.1 moves models.ref"),
        ({"ref_every": 9, "reference": "none"}, {}, "ref_every=9 moves models.ref"),
        ({}, {"ref": None}, "models.ref is null, and preference.reference=model needs it"),
        ({"reference": "none"}, {"ref": {"path": "m"}}, "models.ref is given, and preference.reference=none"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    section: dict[str, Any], models: dict[str, Any], message: str
) -> None:
    with pytest.raises((UserError, ValidationError), match=message):
        recipe("dpo", preference=section, models={"actor": {"path": "m"}, **models})
