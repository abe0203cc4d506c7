"""Tokenizer files beside a saved model, copied byte by byte from where it was opened. No torch."""

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

from realrl.checkpoint.special_tokens import SpecialTokens
from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.paths import is_local, local_path
from realrl.data.tokenizer import save_tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
"""Names of the files that transformers opens a tokenizer from."""
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"


class Tokenizer(SpecialTokens, Protocol):
    """Tokenizer as saved beside the weights; a fast transformers tokenizer is one."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files into a directory."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """Find the token of an id."""


def write_tokenizer(tokenizer: Tokenizer, directory: Path, model_type: str) -> None:
    """Write the tokenizer's files into the directory of a model whose `config.json` names this type.

    transformers would write them anew, in its own version's way: without settings it does not know any more, and
    with some that are only about where the tokenizer was found.
    """
    source = _source(tokenizer.name_or_path, model_type)
    if source is None:
        save_tokenizer(tokenizer, directory)
        return
    for pattern in PATTERNS:
        for file in sorted(source.glob(pattern)):
            copy = directory / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    _write_template(tokenizer, directory)


def _write_template(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer's chat template over the one in its copied files, if a recipe has given another one."""
    file, config = directory / CHAT_TEMPLATE, directory / TOKENIZER_CONFIG
    settings = read_json(config) if config.is_file() else {}
    copied = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or template == copied:
        return  # several templates by name are always those of the files
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    (directory / "chat_template.json").unlink(missing_ok=True)
    if "chat_template" in settings:
        _write(config, {name: value for name, value in settings.items() if name != "chat_template"})
    file.write_text(template, encoding="utf-8")


def set_padding(directory: Path, token: str | None) -> None:
    """Give the tokenizer in a directory another padding token, or none."""
    file = directory / TOKENIZER_CONFIG
    settings = read_json(file) if file.is_file() else {}
    _write(file, settings | {"pad_token": token})  # absent would be the default of the tokenizer's class
    older = directory / SPECIAL_TOKENS_MAP
    if older.is_file():
        tokens = {name: value for name, value in read_json(older).items() if name != "pad_token"}
        _write(older, tokens if token is None else tokens | {"pad_token": token})


def _source(name: str, model_type: str) -> Path | None:
    """Find the directory whose files open this tokenizer wherever they are copied; None where there is none.

    Files that do not name the tokenizer's class depend on the `config.json` beside them.
    """
    directory = _directory(name)
    if directory is None:
        return None
    try:
        if "tokenizer_class" in read_json(directory / TOKENIZER_CONFIG):
            return directory
        same = read_json(directory / "config.json").get("model_type") == model_type
    except UserError:
        return None
    return directory if same else None


def _directory(name: str) -> Path | None:
    if not name:
        return None
    local = local_path(name)
    if local.is_dir():
        return local
    if is_local(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, TOKENIZER_CONFIG)
    return Path(cached).parent if isinstance(cached, str) else None


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
