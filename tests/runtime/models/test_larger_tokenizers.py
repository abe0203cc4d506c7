"""Tokenizers with more or other tokens than the model that was opened."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realrl.cli.app import run_app
from realrl.huggingface.tokenizers import train_bpe
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.inputs import list_tokenizer_notes, load_shared_tokenizer
from tests.conftest import World, read_metrics


@pytest.fixture
def larger(world: World, tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    tokenizer.add_tokens([f"<new{i}>" for i in range(330 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "larger")
    return str(tmp_path / "larger")


def test_a_grown_actor_and_its_reference_train_and_are_saved(
    world: World, larger: str, tmp_path: Path
) -> None:
    recipe = world.recipe(
        "dpo",
        tmp_path,
        models__actor__tokenizer=larger,
        models__actor__vocab_size=330,
        training__steps=2,
        checkpoint__every=1,
    )
    assert load_experiment(str(recipe)).models.ref.vocab_size == 330
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    run = tmp_path / "run"
    (first,) = read_metrics(run)
    # At the first step actor and reference are the same model.
    assert first["actor.train/loss"] == pytest.approx(0.6931, abs=1e-3)
    saved = AutoModelForCausalLM.from_pretrained(run / "final")
    assert saved.config.vocab_size == saved.get_input_embeddings().weight.shape[0] == 330
    assert len(AutoTokenizer.from_pretrained(run / "final")) == 330
    opened = AutoModelForCausalLM.from_pretrained(world.actor)
    opened.resize_token_embeddings(330, mean_resizing=True)
    distance = saved.get_input_embeddings().weight - opened.get_input_embeddings().weight
    assert 0 < distance.abs().max() < 0.05 and torch.isfinite(distance).all()
    assert run_app(["train", str(run), "training.steps=2", "resume=changed"]) == 0
    assert len(read_metrics(run)) == 2


def test_the_message_on_a_larger_tokenizer_leads_to_the_setting(
    world: World, larger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, advice in (
        ({}, "models.actor.vocab_size=330 grows it"),
        ({"models__actor__lora": {}}, "grow the model with transformers' resize_token_embeddings first"),
        (
            {"models__actor__lora": {}, "models__actor__vocab_size": 330},
            "lora and vocab_size exclude each other",
        ),
    ):
        recipe = world.recipe("dpo", tmp_path, models__actor__tokenizer=larger, **changes)
        assert run_app(["train", str(recipe)]) == 2
        assert advice in capsys.readouterr().err


def test_a_model_from_scratch_has_its_size_in_its_shape(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe("sft", tmp_path, models__actor__vocab_size=330)
    assert run_app(["train", str(recipe)]) == 2
    assert "vocab_size=330 needs a path" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_noted_and_a_longer_one_is_not(
    world: World, larger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_bpe(["a film", "the plot"], 270).save_pretrained(tmp_path / "other")
    own = AutoTokenizer.from_pretrained(world.actor).get_vocab()
    other = AutoTokenizer.from_pretrained(tmp_path / "other").get_vocab()
    count = sum(other.get(token) != number for token, number in own.items())
    assert 0 < count < len(own)
    recipe = world.recipe("dpo", tmp_path, models__actor__tokenizer=str(tmp_path / "other"))
    experiment = load_experiment(str(recipe))
    # The reference starts from the actor, so one note is enough.
    (note,) = list_tokenizer_notes(experiment, load_shared_tokenizer(experiment))
    assert note.startswith(
        f"models.actor.tokenizer={tmp_path}/other is not the tokenizer of {world.actor}: {count} of the model's"
        f" {len(own)} tokens have another id or are missing, such as "
    )
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    assert f"note: {note}" in capsys.readouterr().err
    for tokenizer in (larger, world.tokenizer):
        recipe = world.recipe(
            "dpo", tmp_path, models__actor__tokenizer=tokenizer, models__actor__vocab_size=330
        )
        experiment = load_experiment(str(recipe))
        assert not list(list_tokenizer_notes(experiment, load_shared_tokenizer(experiment)))
