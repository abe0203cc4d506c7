"""What training saves opens in transformers and computes there what it computes here."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from realrl.data.batch import Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import Head
from realrl.huggingface import model_files
from realrl.model.packing import Packing
from realrl.testing.records import write_sentence
from tests.conftest import World, read_metrics

TEXTS = [write_sentence(i, mood) for i in range(25) for mood in ("good", "bad")]


def load(path: Path, head: Head) -> Model:
    shape = model_files.read_shape(path)
    model = make_unsharded_model(shape, head, dtype=torch.float32, device=torch.device("cpu"))
    assert model_files.load(path, model.shape, model.layout.specs, model.parameters) == []
    return model


def tokens(path: Path) -> list[list[int]]:
    """Texts of many lengths under the tokenizer saved beside a model."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]


@pytest.mark.parametrize(("algorithm", "name"), [("sft", "final"), ("ppo", "final")])
def test_saved_language_models_have_the_same_logits_in_transformers(
    finished: Mapping[str, Path], algorithm: str, name: str
) -> None:
    path = finished[algorithm] / name
    model, theirs = load(path, "lm"), AutoModelForCausalLM.from_pretrained(path)
    rows = tokens(path)
    with torch.no_grad():
        packed = torch.tensor([token for row in rows for token in row])
        hidden = model.transformer(packed, Packing.of([len(row) for row in rows], "cpu"))
        logits = model.transformer.compute_logits(hidden).split([len(row) for row in rows])
        for row, ours in zip(rows, logits, strict=True):
            torch.testing.assert_close(ours, theirs(torch.tensor([row])).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("algorithm", "name"), [("reward", "final"), ("ppo", "final-critic")])
def test_saved_scalar_models_score_the_same_in_transformers(
    finished: Mapping[str, Path], algorithm: str, name: str
) -> None:
    path = finished[algorithm] / name
    model = load(path, "scalar")
    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    assert theirs.config.num_labels == 1
    rows = tokens(path)
    with torch.no_grad():
        packed = Ragged.of(rows)
        packing = Packing.of(packed.lengths, "cpu")
        output = model.compute_output(model.forward(packed, packing, None), packed, packing)
        assert output.values is not None
        ours = torch.stack([values[-1] for values in output.values.split(output.lengths)])
        pad = theirs.config.pad_token_id
        longest = max(map(len, rows))
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        scores = theirs(padded, attention_mask=(padded != pad).long()).logits[:, 0]
    torch.testing.assert_close(ours, scores, rtol=0, atol=1e-4)


def test_the_last_evaluation_is_of_the_model_that_is_saved(
    finished: Mapping[str, Path], world: World
) -> None:
    """The loss per token that the run reports is what transformers finds for the saved model."""
    path = finished["sft"] / "final"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    total, count = 0.0, 0
    for line in (world.root / "sft.jsonl").read_text().splitlines():
        row = [*tokenizer(json.loads(line)["answer"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([row])
        with torch.no_grad():
            total += theirs(ids, labels=ids).loss.item() * (len(row) - 1)
        count += len(row) - 1
    reported = read_metrics(finished["sft"], "eval")[-1]["actor.inference/loss"]
    assert reported == pytest.approx(total / count, rel=1e-4)


def test_saved_weights_differ_from_the_initial_ones(finished: Mapping[str, Path], world: World) -> None:
    for name, source, head in (("final", world.actor, "lm"), ("final-critic", world.reward, "scalar")):
        before, after = load(Path(source), head), load(finished["ppo"] / name, head)
        assert not torch.equal(before.sets["base"].buffer.data, after.sets["base"].buffer.data)
