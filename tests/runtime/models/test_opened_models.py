"""Models as they are opened for a run, and saved by it: what is checked first, kept, and said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.engine.finite import NotFiniteError
from realrl.huggingface import model_files
from realrl.recipe.load import load_experiment
from realrl.runtime.train import train
from realrl.testing.ranks import Silent
from tests.conftest import World, read_metrics, write_jsonl

NORM = "model.norm.weight"


def copied(source: str, directory: Path, name: str = "model") -> Path:
    """A copy of a model that may be spoilt."""
    return Path(shutil.copytree(source, directory / name))


def change(path: Path, **tensors: torch.Tensor) -> None:
    content = load_file(path / "model.safetensors")
    save_file({**content, **tensors}, path / "model.safetensors")


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


def with_nan(source: str, directory: Path) -> Path:
    path = copied(source, directory)
    norm = load_file(path / "model.safetensors")[NORM]
    norm[7] = float("nan")
    change(path, **{NORM: norm})
    return path


@pytest.mark.parametrize("role", ["actor", "critic", "ref", "reward"])
def test_no_role_may_have_weights_that_are_not_finite(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    path = with_nan(world.actor if role in ("actor", "ref") else world.reward, tmp_path)
    recipe = world.recipe("ppo", tmp_path, **{f"models__{role}": {"path": str(path)}})
    assert run_app(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert f"{path / 'model.safetensors'}: tensor {NORM} has values that are not finite" in error
    assert not (tmp_path / "run").exists()


def test_a_model_with_weights_that_are_not_finite_generates_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_nan(world.actor, tmp_path)
    assert run_app(["generate", str(path), "--prompt", "the"]) == 2
    assert f"tensor {NORM} has values that are not finite" in capsys.readouterr().err


def test_finite_weights_whose_logits_overflow_generate_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(world.actor, tmp_path)
    change(path, **{NORM: torch.full((32,), 3e38)})
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "the"}])
    assert run_app(["generate", str(path), "--prompts", file, "--n", "4"]) == 2
    error = capsys.readouterr().err
    assert f"{path} cannot generate: the logits of token 1 after {file}:1 are not finite" in error


def test_a_call_whose_logits_overflow_is_named(world: World, tmp_path: Path) -> None:
    path = copied(world.actor, tmp_path)
    change(path, **{NORM: torch.full((32,), 3e38)})
    recipe = world.recipe(
        "ppo", tmp_path, models__actor={"path": str(path)}, models__ref={"path": world.actor}
    )
    with pytest.raises(
        NotFiniteError, match=r"^actor\.generate: the logits of token 1 after the prompt of item \d+ of"
    ):
        train(load_experiment(str(recipe), []), Silent())


def wrong_shape(world: World, directory: Path) -> dict[str, object]:
    change(path := copied(world.reward, directory), **{NORM: torch.ones(3)})
    return {"models__reward": {"path": str(path)}}


def not_tied(world: World, directory: Path) -> dict[str, object]:
    edit((path := copied(world.actor, directory)) / "config.json", tie_word_embeddings=False)
    return {"models__ref": {"path": str(path)}}


def without_end(world: World, directory: Path) -> dict[str, object]:
    edit((path := copied(world.actor, directory)) / "generation_config.json", eos_token_id=[1, 320])
    return {"models__actor": {"path": str(path)}}


def critic_without_end(world: World, directory: Path) -> dict[str, object]:
    edit((path := copied(world.reward, directory)) / "config.json", eos_token_id=-1)
    return {"models__critic": {"path": str(path)}}


def bad_data(world: World, directory: Path) -> dict[str, object]:
    (directory / "data.jsonl").write_text("{\n")
    return {"data__train": str(directory / "data.jsonl")}


def below_a_file(world: World, directory: Path) -> dict[str, object]:
    (directory / "file").write_text("")
    return {"run_dir": str(directory / "file" / "inside" / "run")}


EARLY: dict[str, tuple[Callable[[World, Path], dict[str, object]], str]] = {
    "shape of a tensor of the last role": (wrong_shape, "has shape [3], but the model needs [32]"),
    "a tensor that is not there": (not_tied, "tensor lm_head.weight is missing"),
    "an end outside the vocabulary": (without_end, "eos_token_id=[1, 320] must be the id of a token"),
    "an end that saving would stumble over": (
        critic_without_end,
        "eos_token_id=-1 must be the id of a token",
    ),
    "a language model for a reward": (
        lambda w, d: {"models__reward": {"path": w.actor}},
        "is not a sequence classifier: it has no tensor score.weight",
    ),
    "data": (bad_data, "data.jsonl:1: not valid JSON"),
    "positions": (lambda w, d: {"data__max_prompt_tokens": 2040}, "is more than the 2048 positions"),
    "profile": (lambda w, d: {"profile": str(d / "nowhere.json")}, "nowhere.json"),
    "run directory": (below_a_file, "file/inside/run cannot be written"),
}


@pytest.mark.parametrize("case", EARLY)
def test_mistakes_that_show_without_weights_come_before_weights_are_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(model_files, "load", loads)
    fields, words = EARLY[case]
    recipe = world.recipe("ppo", tmp_path, **{"data__max_tokens": 4096, **fields(world, tmp_path)})
    with pytest.raises(UserError) as caught:
        train(load_experiment(str(recipe), []), Silent())
    assert words in str(caught.value)


def test_every_end_of_the_actor_ends_answers_and_is_saved(world: World, tmp_path: Path) -> None:
    path, stop_token_ids = copied(world.actor, tmp_path), list(range(3, 320, 2))
    settings = {"do_sample": True, "eos_token_id": stop_token_ids, "pad_token_id": 2, "temperature": 0.7}
    (path / "generation_config.json").write_text(json.dumps(settings))
    recipe = world.recipe(
        "ppo",
        tmp_path,
        models__actor={"path": str(path)},
        training__steps=1,
        data__eval=str(world.root / "ppo.jsonl"),
        generation__max_new_tokens=40,
    )
    assert run_app(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    assert read_metrics(run)[0]["actor.train/finished"] == 1
    assert [step["reward.inference/finished"] for step in read_metrics(run, "eval")] == [1, 1]
    # Half of all tokens end a sequence, so that one has about two; else nearly all would have forty.
    assert max(step["actor.train/response_tokens"] for step in read_metrics(run)) < 10
    saved = run / "final"
    assert json.loads((saved / "generation_config.json").read_text()) == settings
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (saved / name).read_bytes() == (path / name).read_bytes()
    out = tmp_path / "out.jsonl"
    command = ["generate", str(saved), "--prompt", "the film", "--n", "8", "--out", str(out)]
    assert run_app([*command, "--max-new-tokens", "40", "--min-new-tokens", "3"]) == 0
    for row in map(json.loads, out.read_text().splitlines()):
        assert (
            row["finished"]
            and row["tokens"][-1] in stop_token_ids
            and not set(row["tokens"][:3]) & set(stop_token_ids)
        )


def test_ignored_and_changed_settings_of_opened_models_are_noted(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(world.actor, tmp_path)
    edit(path / "config.json", attention_dropout=0.1)
    edit(path / "tokenizer_config.json", pad_token="</s>")
    recipe = world.recipe("reward", tmp_path, models__reward={"path": str(path)}, training__steps=1)
    assert run_app(["train", str(recipe)]) == 0
    error = capsys.readouterr().err
    assert (
        "note: models.reward: " in error and "attention_dropout=0.1; training here uses no dropout" in error
    )
    assert "padding token </s>; saved with the padding token <pad>" in error
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["pad_token_id"] == 2 and config["attention_dropout"] == 0.1
