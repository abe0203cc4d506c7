"""A small tokenizer, a chat template, and records on disk."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from realrl.data.dataset import Dataset
from realrl.huggingface.tokenizers import train_bpe
from realrl.recipe.data import DataConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return train_bpe(["the cat sat on the mat", "a dog ate the cat"] * 4, 300)


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def bare(tokenizer: Any) -> Any:
    """Has a bos_token but puts nothing before a text, as SmolLM2's."""
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Iterable[Any]], str]:
    """Writes records, or raw lines, to a JSON-lines file, and returns its name."""

    def write(records: Iterable[Any], name: str = "data.jsonl") -> str:
        lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def settings() -> Callable[..., DataConfig]:
    return lambda **fields: DataConfig(train="unused", **fields)


@pytest.fixture
def load(tokenizer: Any, write: Any, settings: Any) -> Callable[..., Dataset]:
    """Loads records, or a source, as a data set; `fields` are settings of the section `data`."""

    def load(source: Any, form: str, keys: tuple[str, ...], keep: Any = None, **fields: Any) -> Dataset:
        given = write(source) if isinstance(source, list) else source
        kept = (lambda name: False) if keep is None else keep
        return Dataset.load(given, form, keys, tokenizer, settings(**fields), 1, (1,), kept)

    return load
