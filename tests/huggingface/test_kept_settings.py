"""What is saved is what was opened: settings, tokenizer files, and tokens that end sequences."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from realrl.config.errors import UserError
from realrl.huggingface.directory import Origin, read_origin
from realrl.huggingface.tokenizers import (
    list_saving_notes,
    list_stop_token_ids,
    save_tokenizer,
    write_tokenizer,
)
from tests.huggingface.models import change_json, make_model, make_tokenizer, save_again

GENERATION = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": [1, 5, 3],
    "pad_token_id": 2,
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.40.1",
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with several tokens that end what it writes, as Llama 3 Instruct has, and much else."""
    directory = make_tokenizer(tmp_path_factory.mktemp("source") / "m", {"pad_token": "<pad>"})
    make_model(
        directory,
        bos_token_id=0,
        eos_token_id=[1, 5, 3],
        pad_token_id=None,
        attention_dropout=0.1,
        max_position_embeddings=512,
        rope_parameters=ROPE,
    )
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    change_json(directory / "config.json", _name_or_path="somewhere", length_penalty=3.0)
    # As older versions write them, with settings that transformers 5 drops when it saves.
    change_json(
        directory / "tokenizer_config.json", add_bos_token=True, tokenizer_class="PreTrainedTokenizerFast"
    )
    change_json(directory / "special_tokens_map.json", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return directory


@pytest.fixture(scope="module")
def again(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_again(source, tmp_path_factory.mktemp("again") / "m")


def test_generation_settings_are_kept(again: Path) -> None:
    assert json.loads((again / "generation_config.json").read_text()) == GENERATION
    assert GenerationConfig.from_pretrained(again).eos_token_id == [1, 5, 3]


def test_settings_that_training_does_not_touch_are_kept(source: Path, again: Path) -> None:
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (source, again))
    for extra in ("length_penalty", "_name_or_path"):
        before.pop(extra, None), after.pop(extra, None)
    assert after == before
    assert after["eos_token_id"] == [1, 5, 3] and after["attention_dropout"] == 0.1
    written = json.loads((again / "config.json").read_text())
    assert not {"length_penalty", "_name_or_path", "transformers_version"} & set(written)


@pytest.mark.parametrize("rounds", [1, 2])
def test_tokenizer_files_are_kept_byte_by_byte(
    source: Path, again: Path, tmp_path: Path, rounds: int
) -> None:
    path = again if rounds == 1 else save_again(again, tmp_path / "m")
    names = {file.name for file in source.iterdir()} - {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert names >= {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
    }
    for name in names:
        assert (path / name).read_bytes() == (source / name).read_bytes(), name


def test_a_model_without_generation_settings_gets_those_it_ends_with(source: Path, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "m", {"pad_token": "<pad>"})
    make_model(tmp_path / "m", bos_token_id=0, eos_token_id=[3, 1], pad_token_id=2)
    (tmp_path / "m" / "generation_config.json").unlink()
    path = save_again(tmp_path / "m", tmp_path / "again")
    written = json.loads((path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 0, "eos_token_id": [1, 3], "pad_token_id": 2}


def test_a_tokenizer_whose_files_are_gone_is_written_without_anything_of_ours(
    source: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.name_or_path = str(tmp_path / "gone")
    (tmp_path / "m").mkdir()
    write_tokenizer(tokenizer, tmp_path / "m", "llama")
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & set(settings)
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows no other name
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "m")("the film")["input_ids"]
        == tokenizer("the film")["input_ids"]
    )


def test_a_tokenizer_of_the_hub_is_copied_from_the_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.name_or_path = "someone/model"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(source / file))
    write_tokenizer(tokenizer, tmp_path, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()


def test_another_chat_template_is_saved_instead_of_that_of_the_files(source: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    shutil.copytree(source, given)
    (given / "chat_template.jinja").unlink()
    change_json(given / "tokenizer_config.json", chat_template="{{ messages }}")
    tokenizer = AutoTokenizer.from_pretrained(given)
    for name, template in (("kept", "{{ messages }}"), ("other", "{{ messages[0].content }}")):
        tokenizer.chat_template = template
        (tmp_path / name).mkdir()
        write_tokenizer(tokenizer, tmp_path / name, "llama")
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == template
    files = [
        (given / "tokenizer_config.json").read_bytes(),
        (tmp_path / "kept/tokenizer_config.json").read_bytes(),
    ]
    assert files[0] == files[1]


def test_files_that_need_another_models_config_are_not_copied(source: Path, tmp_path: Path) -> None:
    """Without `tokenizer_class`, transformers looks for the class of the model beside it."""
    make_tokenizer(tmp_path / "gpt2", {"pad_token": "<pad>"})
    settings = json.loads((tmp_path / "gpt2" / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tmp_path / "gpt2" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    (tmp_path / "m").mkdir()
    write_tokenizer(tokenizer, tmp_path / "m", "llama")
    assert "tokenizer_class" in json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())


def test_the_origin_that_transformers_notes_in_a_tokenizer_is_not_saved(source: Path, tmp_path: Path) -> None:
    save_tokenizer(AutoTokenizer.from_pretrained(source), tmp_path)
    assert "local" not in (tmp_path / "tokenizer_config.json").read_text()


def origin(config: Any, generation: Any = None) -> Origin:
    return Origin(Path("m"), {"eos_token_id": config}, generation)


TOKENIZER: Any = SimpleNamespace(eos_token_id=1, name_or_path="t")


@pytest.mark.parametrize(
    ("opened", "stop_token_ids"),
    [
        (None, (1,)),
        (origin(2), (1, 2)),
        (origin([5, 1, 3]), (1, 5, 3)),
        (origin(None), (1,)),
        (origin(2, {"eos_token_id": [1, 4]}), (1, 4)),
        (origin([2, 3], {"temperature": 0.5}), (1, 2, 3)),
    ],
)
def test_end_tokens_are_the_tokenizers_then_those_of_the_models_settings(
    opened: Origin | None, stop_token_ids: tuple[int, ...]
) -> None:
    assert list_stop_token_ids(TOKENIZER, opened, 8) == stop_token_ids


@pytest.mark.parametrize("named", [8, -1, [1, 8], "two", [True], 1.0])
def test_an_end_outside_the_vocabulary_is_refused(named: Any) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id=.* from 0 to 7"):
        list_stop_token_ids(TOKENIZER, origin(1, {"eos_token_id": named}), 8)
    with pytest.raises(UserError, match="tokenizer t ends sequences with token 1"):
        list_stop_token_ids(TOKENIZER, None, 1)


def test_ignored_dropout_and_added_end_tokens_are_noted(source: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    (dropout,) = list_saving_notes(read_origin(source), "lm", tokenizer, (1, 5, 3), 32)
    assert "attention_dropout=0.1; training here uses no dropout" in dropout
    (lacking,) = list_saving_notes(origin([3, 5]), "lm", tokenizer, (1, 3, 5), 32)
    assert "eos_token_id=[3, 5] in m/config.json lacks tokens that end answers here: 1 (</s>)" in lacking
    assert list(list_saving_notes(None, "lm", tokenizer, (1,), 32)) == []


def test_a_saved_model_stops_where_the_opened_one_did(source: Path, again: Path) -> None:
    prompt = torch.tensor([[0, 7, 9]])
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).generate(prompt, do_sample=False, max_new_tokens=40)
        for path in (source, again)
    )
    assert before.tolist() == after.tolist()
