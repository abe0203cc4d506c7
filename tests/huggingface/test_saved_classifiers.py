"""transformers scores a saved classifier exactly as we do, whatever the tokenizer's padding token is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from realrl.data.batch import Ragged
from realrl.engine.model import make_unsharded_model
from realrl.huggingface import model_files
from realrl.huggingface.directory import read_origin
from realrl.huggingface.tokenizers import list_saving_notes
from realrl.model.packing import Packing
from tests.huggingface.models import make_model, make_tokenizer, save_again

TEXTS = ["the film is great", "the plot is dull and moving and great", "film", "the plot"]
RESERVED = ("<|reserved_0|>",)

CASES: dict[str, tuple[dict[str, str], tuple[str, ...], str | None]] = {
    "proper": ({"pad_token": "<pad>"}, (), "<pad>"),
    "end of sequence": ({"pad_token": "</s>"}, (), "<s>"),
    "another end": ({"pad_token": "<|end|>", "unk_token": "<unk>"}, (), "<unk>"),
    "none, but one is called so": ({}, ("<|finetune_right_pad_id|>",), "<|finetune_right_pad_id|>"),
    "none, but one is reserved": ({"unk_token": "<unk>"}, RESERVED, RESERVED[0]),
    "no token will do": ({"pad_token": "</s>", "bos_token": "</s>"}, (), None),
}
"""Special tokens besides BOS and EOS, reserved tokens, and the padding token that is saved."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[int, ...], str | None]:
    """A saved classifier, the tokens that end sequences, and how it is padded."""
    special, reserved, pad = CASES[request.param]
    source = make_tokenizer(tmp_path / "source", special, reserved=reserved)
    tokenizer = AutoTokenizer.from_pretrained(source)
    other = tokenizer.convert_tokens_to_ids("<|end|>") if "<|end|>" in special.values() else 1
    make_model(source, bos_token_id=0, eos_token_id=[1, other], pad_token_id=tokenizer.pad_token_id)
    return save_again(source, tmp_path / "saved", "scalar", stop_token_ids=(1, other)), (1, other), pad


def rows_of(tokenizer: Any, stop_token_ids: tuple[int, ...]) -> list[list[int]]:
    """Texts that end with each of the ends, and without one, as an answer that is cut off."""
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [row + end for row in texts for end in ([], *([end] for end in dict.fromkeys(stop_token_ids)))]


def our_scores(path: Path, rows: list[list[int]]) -> Tensor:
    model = make_unsharded_model(
        model_files.read_shape(path), "scalar", dtype=torch.float32, device=torch.device("cpu")
    )
    assert model_files.load(path, model.shape, model.layout.specs, model.parameters) == []
    with torch.no_grad():
        packed = Ragged.of(rows)
        packing = Packing.of(packed.lengths, "cpu")
        values = model.compute_output(model.forward(packed, packing, None), packed, packing).values
        assert values is not None
        return torch.stack([part[-1] for part in values.split(packed.lengths)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_scores_padded_batches_as_we_do(
    case: tuple[Path, tuple[int, ...], str | None], side: str
) -> None:
    path, stop_token_ids, pad = case
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    assert tokenizer.pad_token == pad and model.config.pad_token_id == tokenizer.pad_token_id
    rows = rows_of(tokenizer, stop_token_ids)
    with torch.no_grad():
        if pad is None:
            theirs = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])
            with pytest.raises(ValueError, match="no padding token"):
                model(torch.zeros(2, 3, dtype=torch.int64))
        else:
            tokenizer.padding_side = side
            batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
            theirs = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    torch.testing.assert_close(theirs, our_scores(path, rows), rtol=1e-5, atol=1e-5)


def test_a_padding_token_that_ends_only_the_runs_sequences_is_replaced(tmp_path: Path) -> None:
    """A critic's own settings need not name all tokens with which the actor ends."""
    source = make_tokenizer(tmp_path / "source", {"pad_token": "<|end|>", "unk_token": "<unk>"})
    end = AutoTokenizer.from_pretrained(source).pad_token_id
    make_model(source, eos_token_id=1, pad_token_id=end)
    alone, in_a_run = (
        save_again(source, tmp_path / f"{i}", "scalar", stop_token_ids)
        for i, stop_token_ids in enumerate([(), (end,)])
    )
    assert AutoTokenizer.from_pretrained(alone).pad_token == "<|end|>"
    assert AutoTokenizer.from_pretrained(in_a_run).pad_token == "<unk>"


def test_a_changed_padding_token_is_noted(tmp_path: Path) -> None:
    def said(name: str, special: dict[str, str]) -> list[str]:
        path = make_model(make_tokenizer(tmp_path / name, special), eos_token_id=1)
        return list(
            list_saving_notes(read_origin(path), "scalar", AutoTokenizer.from_pretrained(path), (1,), 32)
        )

    assert said("proper", {"pad_token": "<pad>"}) == []
    (sentence,) = said("end", {"pad_token": "</s>"})
    assert "can end with the tokenizer's padding token </s>; saved with the padding token <s>" in sentence
    (sentence,) = said("none", {})
    assert sentence.startswith("the tokenizer has no padding token; saved with the padding token <s>")
    (sentence,) = said("neither", {"pad_token": "</s>", "bos_token": "</s>"})
    assert "saved without one, it scores one sequence at a time" in sentence
