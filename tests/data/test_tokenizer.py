"""Tokenizers are trained, written and opened again without loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.huggingface.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from tests.conftest import World

TEXTS = ["the cat sat on the mat", " 2 dogs, née Ω\n\tand <s>", "🙂 end "]


def test_any_text_survives_encoding_and_decoding(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_a_saved_tokenizer_opens_with_the_same_tokens(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    opened = load_tokenizer(str(tmp_path))
    assert opened(TEXTS).input_ids == tokenizer(TEXTS).input_ids
    assert (opened.bos_token, opened.eos_token, opened.pad_token) == ("<s>", "</s>", "<pad>")


def test_a_tokenizer_beside_a_llama_model_keeps_its_tokens(tokenizer, tmp_path):
    """transformers knows tokenizers of its own for model types, and must not take one of those."""
    save_tokenizer(tokenizer, tmp_path)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path))(TEXTS).input_ids == tokenizer(TEXTS).input_ids


MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "granite",
)
CLASSES = (
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "Qwen2TokenizerFast",
    "GPT2Tokenizer",
    "Unheard",
    None,
)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tokenizer_is_the_one_that_transformers_chooses(tokenizer, tmp_path, model_type):
    """Although the class of the model's configuration is not loaded."""
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for name in CLASSES:
        settings["tokenizer_class"] = name
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        ours, expected = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
        assert type(ours) is type(expected)
        assert ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert ours.special_tokens_map == expected.special_tokens_map


def test_a_rank_opens_its_tokenizer_without_the_compiler_of_torch(tokenizer, tmp_path):
    """Which takes longer than all else, and which most of transformers loads."""
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    script = (
        "import sys, realrl.runtime.train\n"
        "from realrl.huggingface.tokenizers import load_tokenizer\n"
        f"load_tokenizer({str(tmp_path)!r})\n"
        "print(*(name for name in ('torch', 'torch._dynamo') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch"]


def test_a_saved_tokenizer_has_a_class_that_every_transformers_knows(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_special_tokens_put_the_beginning_of_sequence_before_a_text(tokenizer):
    assert tokenizer("cat").input_ids == [
        tokenizer.bos_token_id,
        *tokenizer("cat", add_special_tokens=False).input_ids,
    ]


def test_a_prompt_cut_between_words_has_the_first_tokens_of_its_sentence(tokenizer):
    sentence = "the cat sat, on the mat"
    whole = tokenizer(sentence).input_ids
    for words in range(1, 6):
        prompt = tokenizer(" ".join(sentence.split()[:words])).input_ids
        assert whole[: len(prompt)] == prompt


def test_a_tokenizer_is_trained_on_all_text_of_the_records(write, tmp_path):
    records = [
        {"prompt": "", "answer": "zebra " * 9},
        {"messages": [{"role": "user", "content": "quokka " * 9}]},
    ]
    size = train_tokenizer(write(records), str(tmp_path / "out"), 300)
    opened = load_tokenizer(str(tmp_path / "out"))
    assert size == len(opened) <= 300
    assert all(len(opened.tokenize(word)) == 1 for word in ("zebra", "quokka"))


def test_a_vocabulary_too_small_for_bytes_is_a_user_error(write, tmp_path):
    with pytest.raises(UserError, match="vocab_size=200 is too small; give at least 259"):
        train_tokenizer(write([{"prompt": "a"}]), str(tmp_path / "out"), 200)


def test_a_tokenizer_path_may_start_at_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train_tokenizer(write([{"prompt": "a"}]), str(tmp_path / "out"), 300)
    assert load_tokenizer("~/out").eos_token == "</s>"


@pytest.mark.parametrize("path", ["./missing", "/missing", "runs/missing", "runs/sft/final"])
def test_a_missing_tokenizer_directory_is_a_user_error(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=f"tokenizer directory {path} does not exist"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("files", "complaint"), [({}, "has no tokenizer"), ({"tokenizer.json": '{"a":'}, "cannot load tokenizer")]
)
def test_a_directory_without_a_usable_tokenizer_is_a_user_error(tmp_path, files, complaint):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=complaint):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_is_replaced_only_on_demand_and_never_inside_a_model(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = str(world.root / "sft.jsonl"), tmp_path / "tokenizer"
    command = ["tokenizer", data, "--out", str(out), "--vocab-size", "300"]
    assert run_app(command) == 0
    before = (out / "tokenizer.json").read_bytes()
    assert run_app([*command[:-1], "310"]) == 2
    assert (
        "this directory has a tokenizer already; choose another one or give --overwrite"
        in capsys.readouterr().err
    )
    assert (out / "tokenizer.json").read_bytes() == before
    assert run_app([*command[:-1], "310", "--overwrite"]) == 0
    assert (out / "tokenizer.json").read_bytes() != before
    assert run_app(["tokenizer", data, "--out", world.actor, "--overwrite"]) == 2
    assert "this directory has a model" in capsys.readouterr().err
