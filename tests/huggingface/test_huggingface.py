"""Hugging Face directories: what we read, what we write, and what we say when something is wrong."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.engine.finite import NotFiniteError
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface import (
    directory,
    model_files,
)
from realrl.huggingface.directory import known_shape, read_origin
from realrl.layout.region import Region
from realrl.recipe.model import ModelConfig
from tests.model.small_models import make_theirs

SIZES = {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4}


def shape_of(tied: bool = False) -> ModelShape:
    return ModelShape(vocab_size=37, tied_embeddings=tied, **SIZES)


def random_buffer(shape: ModelShape, head: Head, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    buffer = FlatBuffer(model_tensors(shape, head), dtype, "cpu")
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=torch.Generator().manual_seed(0)))
    return buffer


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "hello": 3}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def saved(path: Path, head: Head = "lm", *, tied: bool = False, shard: float = 5e9) -> Path:
    shape = shape_of(tied)
    model_files.save(path, shape, head, random_buffer(shape, head), tokenizer(), torch.float32, shard)
    return path


def loaded(path: Path, head: Head = "lm") -> tuple[FlatBuffer, list[str]]:
    shape = model_files.read_shape(path)
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    return buffer, model_files.load(path, shape, tensors, buffer)


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("shard", [5e9, 2000.0], ids=["one-file", "sharded"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_saved_models_load_bit_for_bit(head: Head, tied: bool, shard: float, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", head, tied=tied, shard=shard)
    buffer, missing = loaded(path, head)
    assert missing == [] and torch.equal(buffer.data, random_buffer(shape_of(tied), head).data)
    assert (path / model_files.INDEX).exists() == (shard < 5e9)


FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "5GB"), (torch.bfloat16, "3KB")])
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_survives_import_and_export_bit_for_bit(
    family: str, head: Head, tied: bool, dtype: torch.dtype, shard: str, tmp_path: Path
) -> None:
    shape = shape_of(tied).model_copy(update={"family": family})
    theirs = make_theirs(shape, head).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert model_files.read_shape(tmp_path / "theirs") == shape
    buffer, missing = loaded(tmp_path / "theirs", head)
    assert missing == []
    origin = read_origin(tmp_path / "theirs")
    model_files.save(tmp_path / "ours", shape, head, buffer, None, dtype, 3000, origin=origin)
    written, source = stored_tensors(tmp_path / "ours"), stored_tensors(tmp_path / "theirs")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], values) for name, values in source.items())
    assert {values.dtype for values in written.values()} == {dtype}
    opened = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    again = opened.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(again) is type(theirs) and type(again.config) is type(theirs.config)
    tokens = torch.tensor([[3, 9, 4, 30]])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs.eval()(tokens).logits)


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory's files."""
    return {name: values for file in path.glob("*.safetensors") for name, values in load_file(file).items()}


def test_transformers_opens_a_scalar_head_as_a_classifier_with_one_label(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", "scalar")
    model = AutoModelForSequenceClassification.from_pretrained(path)
    assert model.config.num_labels == 1 and model.config.pad_token_id == 2
    assert torch.equal(model.score.weight, random_buffer(shape_of(), "scalar")["score.weight"])


def test_tokenizer_and_generation_settings_are_saved_beside_a_language_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    assert AutoTokenizer.from_pretrained(path).encode("hello") == [3]
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id == 1


def test_only_the_score_may_be_missing_when_a_language_model_becomes_scalar(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    buffer, missing = loaded(path, "scalar")
    assert missing == ["score.weight"]
    assert torch.equal(buffer["model.norm.weight"], random_buffer(shape_of(), "lm")["model.norm.weight"])


def test_a_tied_model_whose_file_repeats_the_table_is_accepted(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", tied=True)
    content = load_file(path / model_files.SINGLE)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    save_file(content, path / model_files.SINGLE)
    assert loaded(path)[1] == []


def test_a_tied_model_fills_an_untied_head_from_its_table(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", tied=True)
    tensors = model_tensors(shape_of(tied=False), "lm")
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    assert model_files.load(path, shape_of(), tensors, buffer) == []
    assert torch.equal(buffer["lm_head.weight"], buffer["model.embed_tokens.weight"])


def test_saving_again_replaces_the_directory_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    saved(tmp_path / "m", shard=2000.0)
    path = saved(tmp_path / "m")
    assert not (path / model_files.INDEX).exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_save_that_dies_leaves_the_old_directory_whole(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    before = sorted(entry.name for entry in path.iterdir())

    class Dying:
        name_or_path = ""
        bos_token_id = eos_token_id = pad_token_id = None

        def save_pretrained(self, _: str) -> None:
            raise KeyboardInterrupt

    shape = shape_of()
    with pytest.raises(KeyboardInterrupt):
        model_files.save(path, shape, "lm", random_buffer(shape, "lm"), Dying(), torch.float32)
    assert sorted(entry.name for entry in path.iterdir()) == before and loaded(path)[1] == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def truncate(path: Path) -> None:
    file = path / model_files.SINGLE
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    (path / model_files.SINGLE).write_bytes(b"\x00" * 5)


def change(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    content = load_file(path / model_files.SINGLE)
    content.pop(name, None)
    save_file(content if tensor is None else {**content, name: tensor}, path / model_files.SINGLE)


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "model.safetensors: not a complete safetensors file"),
    "no-header": (cut_header, "model.safetensors: not a complete safetensors file"),
    "no-weights": (lambda p: (p / model_files.SINGLE).unlink(), "only safetensors are read"),
    "no-config": (lambda p: (p / "config.json").unlink(), "config.json: no such file"),
    "bad-config": (lambda p: (p / "config.json").write_text("{"), "config.json: not valid JSON"),
    "list-config": (lambda p: (p / "config.json").write_text("[]"), "a JSON object is expected"),
    "family": (lambda p: edit_config(p, model_type="bert"), "model_type 'bert' is not supported"),
    "missing": (lambda p: change(p, NORM, None), "tensor model.norm.weight is missing"),
    "shape": (
        lambda p: change(p, NORM, torch.ones(3)),
        "tensor model.norm.weight has shape [3], but the model needs [16]",
    ),
    "type": (lambda p: change(p, NORM, torch.ones(16, dtype=torch.int8)), "has type I8; accepted are"),
    "unknown": (
        lambda p: change(p, "model.layers.0.self_attn.q_proj.bias", torch.ones(16)),
        "q_proj.bias does not belong to the model",
    ),
    "fewer-layers": (lambda p: edit_config(p, num_hidden_layers=1), "model.layers.1."),
    "not-tied": (
        lambda p: edit_config(p, tie_word_embeddings=True),
        "lm_head.weight differs from the embeddings",
    ),
    "no-shard": (
        lambda p: (p / model_files.INDEX).write_text(json.dumps({"weight_map": {NORM: "gone.safetensors"}})),
        "missing",
    ),
    "bad-index": (lambda p: (p / model_files.INDEX).write_text("{}"), "weight_map is missing"),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    weights = torch.ones(16)
    weights[5] = value
    change(path, NORM, weights)
    with pytest.raises(UserError) as caught:
        loaded(path)
    expected = f"{path / 'model.safetensors'}: tensor {NORM} has values that are not finite (NaN or infinity)"
    assert str(caught.value) == expected


def test_weights_that_the_runs_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    change(path, NORM, torch.full((16,), 1e300, dtype=torch.float64))
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight has values that float32 cannot hold"):
        loaded(path)


def test_only_the_regions_that_are_read_are_looked_at(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    table = torch.ones(37, 16)
    table[30] = float("nan")
    change(path, "model.embed_tokens.weight", table)
    tensors = model_tensors(shape_of(), "lm")
    for rows, finite in (((0, 30), True), ((20, 17), False)):
        region = Region("model.embed_tokens.weight", (rows[0], 0), (rows[1], 16))
        buffer = FlatBuffer(tensors, torch.float32, "cpu")
        with nullcontext() if finite else pytest.raises(UserError, match="not finite"):
            model_files.load(path, shape_of(), tensors, buffer, {region.tensor: region})


@pytest.mark.parametrize("shard", [5e9, 2000.0], ids=["one-file", "sharded"])
def test_a_model_that_is_not_finite_is_not_saved(shard: float, tmp_path: Path) -> None:
    path, shape = saved(tmp_path / "m"), shape_of()
    buffer = random_buffer(shape, "lm")
    buffer[NORM][3] = float("nan")
    with pytest.raises(NotFiniteError, match=NORM):
        model_files.save(path, shape, "lm", buffer, tokenizer(), torch.float32, shard)
    assert loaded(path)[1] == [] and [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_headers_alone_show_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m")
    monkeypatch.setattr(model_files, "read_parts", None)
    assert model_files.check(path, shape_of(), model_tensors(shape_of(), "scalar")) == ["score.weight"]
    change(path, NORM, torch.ones(3))
    with pytest.raises(UserError, match=r"norm\.weight has shape \[3\]"):
        model_files.check(path, shape_of(), model_tensors(shape_of(), "lm"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_in_one_error_message(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    act, message = DAMAGES[damage]
    act(path)
    with pytest.raises(UserError) as caught:
        loaded(path)
    text = str(caught.value)
    assert message in text and str(path) in text and "\n" not in text


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", shard=2000.0)
    lost = next(path.glob("model-00002*"))
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        loaded(path)


@pytest.mark.parametrize("name", ["./nowhere/model", "/nowhere/model", "../m", "a/b/c"])
def test_a_missing_model_directory_is_named(name: str) -> None:
    with pytest.raises(UserError, match="no such model directory"):
        model_files.read_shape(name)


def test_a_model_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "m")
    assert model_files.read_shape("~/m") == known_shape(ModelConfig(path="~/m")) == shape_of()
    assert known_shape(ModelConfig(path="~/nowhere")) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_is_no_language_model(tied: bool, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", "scalar", tied=tied)
    with pytest.raises(UserError, match="m is a sequence classifier, not a language model"):
        loaded(path, "lm")


def test_a_hub_name_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object, **__: object) -> str:
        raise OSError(f"cannot reach the hub for {name}\ndetails")

    for function in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{function}", refuse)
    with pytest.raises(
        UserError, match="someone/model: no such model directory, and the Hugging Face hub"
    ) as caught:
        model_files.load("someone/model", shape_of(), (), FlatBuffer((), torch.float32, "cpu"))
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(path / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(path))
    assert model_files.check("someone/model", shape_of(), model_tensors(shape_of(), "lm")) == []


@pytest.mark.parametrize("generation", [None, {"eos_token_id": [3, 5]}])
def test_settings_of_a_hub_model_are_read_without_its_weights(
    generation: dict[str, list[int]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m")
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))

    def download(name: str, file: str) -> str:
        if not (path / file).is_file():
            raise EntryNotFoundError(f"{name} has no {file}")
        return str(path / file)

    def refuse(name: str, **_: object) -> str:
        raise AssertionError(f"{name} is downloaded")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert model_files.read_shape("someone/model") == shape_of()
    assert model_files.read_dtype("someone/model") == torch.float32
    origin = read_origin("someone/model")
    assert origin.config["hidden_size"] == shape_of().hidden_size
    assert origin.generation == generation


def test_the_size_of_a_hub_model_is_read_from_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m")
    asked = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert directory.find_model_shape(ModelConfig(path="someone/model")) == shape_of()
    assert {*asked} == {("someone/model", "config.json")}


def test_a_hub_model_whose_size_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, file: str) -> str:
        raise OSError(f"cannot reach the hub for {name}\ndetails")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(
        UserError, match=r"someone/model: .* gave none: cannot reach the hub for someone/model$"
    ):
        directory.find_model_shape(ModelConfig(path="someone/model"))
