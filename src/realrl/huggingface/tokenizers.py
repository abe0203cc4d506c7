"""Load and train tokenizers, save them with models, and find their special tokens. Does not import torch."""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.paths import is_local, local_path
from realrl.data.records import read_records
from realrl.data.rejects import Rejects
from realrl.families.adapter_config import find_adapters
from realrl.families.config_json import SPECIAL_TOKENS
from realrl.families.shape import Head
from realrl.huggingface.directory import CONFIG, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


BOS, EOS, PAD = "<s>", "</s>", "<pad>"


def load_tokenizer(path: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a Hugging Face directory or hub name. Raises UserError if there is none.

    If a directory has adapters but no tokenizer, the tokenizer of their base model is loaded.
    """
    from transformers import AutoTokenizer

    local = local_path(path)
    if is_local(path):
        if not local.is_dir():
            raise UserError(f"tokenizer directory {path} does not exist")
        if not any((local / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            adapters = find_adapters(path)
            if adapters is not None:
                return load_tokenizer(adapters.base)
            raise UserError(
                f"directory {path} has no tokenizer: neither tokenizer.json nor tokenizer_config.json"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else path, trust_remote_code=False, **_config_option(local)
        )
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" :")
        raise UserError(f"cannot load tokenizer {path}: {reason}") from None
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {path} has no fast version (tokenizer.json)")
    return tokenizer


def _config_option(directory: Path) -> dict[str, Any]:
    """Return the option that keeps transformers from importing the model's configuration class, if possible.

    transformers looks in this class for the tokenizer's class, although most tokenizers name it themselves. The
    import takes longer than everything else. For a user's own family, it would also print warnings about the model.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    config = PreTrainedConfig(name_or_path=str(directory))
    file, tokenizer_file = directory / "config.json", directory / "tokenizer_config.json"
    model_type = read_json(file).get("model_type") if file.is_file() else None
    if model_type not in (None, *CONFIG_MAPPING):
        return {"config": config}
    declared = read_json(tokenizer_file) if tokenizer_file.is_file() else {}
    if not declared.get("tokenizer_class") or "auto_map" in declared:
        return {}
    config.model_type = model_type or ""
    return {"config": config}


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens; write it with `save_tokenizer`.

    With `add_special_tokens`, the tokenizer puts BOS before a text, as training does. Raises UserError if
    `vocab_size` is too small for the 256 bytes and three special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [BOS, EOS, PAD]
    if vocab_size < len(alphabet) + len(special):
        raise UserError(f"vocab_size={vocab_size} is too small; give at least {len(alphabet) + len(special)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json so that transformers 4 and 5 can open them.

    Settings in which transformers records the tokenizer's origin are left out.
    """
    tokenizer.save_pretrained(str(directory))
    config = directory / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 does not know this name
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(source: str, out: str, vocab_size: int) -> int:
    """Train a tokenizer on the records of `source` (see `read_records`) and write it to the directory `out`.

    Returns the tokenizer's number of tokens, which is below `vocab_size` if the texts yield too few tokens.
    """
    texts = (text for text in _record_texts(source) if text)
    first = next(texts, None)
    if first is None:
        raise UserError(f"{source} holds no text, and a tokenizer needs some to learn from")
    tokenizer = train_bpe(chain([first], texts), vocab_size)
    save_tokenizer(tokenizer, Path(out))
    return len(tokenizer)


def _record_texts(source: str) -> Iterator[str]:
    for _, record in read_records(source, Rejects("fail")):
        yield from _texts(record)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


class AddedToken(Protocol):
    """Token that a tokenizer does not split."""

    content: str
    special: bool


class SpecialTokens(Protocol):
    """The attributes of a transformers tokenizer that identify its special tokens."""

    name_or_path: str
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""


def list_stop_token_ids(tokenizer: SpecialTokens, origin: Origin | None, vocabulary: int) -> tuple[int, ...]:
    """List all tokens that end a sequence: first the tokenizer's token, then the tokens in the model's settings.

    A model may have several of these tokens; Llama 3 Instruct has three. `vocabulary` is the number of tokens in
    the model's vocabulary. Raises UserError for an id outside the vocabulary.
    """
    stop_token_ids: dict[int, None] = {}
    if tokenizer.eos_token_id is not None:
        stop_token_ids[tokenizer.eos_token_id] = None
        if tokenizer.eos_token_id >= vocabulary:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path} ends sequences with token {tokenizer.eos_token_id},"
                f" but the model's vocabulary has {vocabulary} tokens"
            )
    if origin is not None:
        stop_token_ids |= dict.fromkeys(origin.find_stop_token_ids(vocabulary)[1])
    return tuple(stop_token_ids)


def find_classifier_padding(
    tokenizer: SpecialTokens, stop_token_ids: Collection[int], vocabulary: int
) -> int | None:
    """Choose the padding token for a saved classifier; None if no token is suitable.

    transformers scores a sequence at its last token that is not padding, so a sequence must never end with the
    padding token. The tokenizer's own padding token is used unless it is among the `stop_token_ids`. Otherwise a
    special token is used: one with "pad" in its name, a reserved token, the unknown token, or the token that begins
    sequences.
    """
    special = {
        token: added.content.lower()
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    candidates: list[int | None] = [tokenizer.pad_token_id]
    for word in ("pad", "reserved", "unused"):
        candidates += (token for token, content in special.items() if word in content)
    candidates += [tokenizer.unk_token_id, tokenizer.bos_token_id]
    for token in candidates:
        if token is not None and token not in stop_token_ids and token < vocabulary:
            return token
    return None


def find_saved_ids(tokenizer: SpecialTokens | None, origin: Origin | None) -> dict[str, Any]:
    """Return the special tokens for the `config.json` of a saved model.

    They are copied from the model that was loaded. A model that started from scratch gets the special tokens of the
    tokenizer.
    """
    if origin is not None:
        return {name: origin.config[name] for name in SPECIAL_TOKENS if name in origin.config}
    return {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}


CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
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
"""Patterns of the files that transformers reads to open a tokenizer."""
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"


class Tokenizer(SpecialTokens, Protocol):
    """A tokenizer that can be saved with a model, such as a fast tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files into a directory."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """Return the token with this id."""


def write_tokenizer(tokenizer: Tokenizer, directory: Path, model_type: str) -> None:
    """Write the tokenizer's files into the directory of a model whose `config.json` names this type.

    If the tokenizer has a directory, its files are copied byte by byte. transformers would drop settings that its
    version does not know, and would add settings about the tokenizer's origin.
    """
    source = _find_files(tokenizer.name_or_path, model_type)
    if source is None:
        save_tokenizer(tokenizer, directory)
        return
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            copy = directory / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    _write_template(tokenizer, directory)


def _write_template(tokenizer: Tokenizer, directory: Path) -> None:
    """Replace the chat template in the copied files if the recipe has set another one."""
    file, config = directory / CHAT_TEMPLATE, directory / TOKENIZER_CONFIG
    settings = read_json(config) if config.is_file() else {}
    copied = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or template == copied:
        return  # if the tokenizer has several named templates, the copied files contain them
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    (directory / "chat_template.json").unlink(missing_ok=True)
    if "chat_template" in settings:
        _write_json(config, {name: value for name, value in settings.items() if name != "chat_template"})
    file.write_text(template, encoding="utf-8")


def set_padding(directory: Path, token: str | None) -> None:
    """Change the padding token of the tokenizer in a directory, or remove it."""
    file = directory / TOKENIZER_CONFIG
    settings = read_json(file) if file.is_file() else {}
    _write_json(
        file, settings | {"pad_token": token}
    )  # without the entry, the tokenizer's class would choose a default
    older = directory / SPECIAL_TOKENS_MAP
    if older.is_file():
        tokens = {name: value for name, value in read_json(older).items() if name != "pad_token"}
        _write_json(older, tokens if token is None else tokens | {"pad_token": token})


def _find_files(name: str, model_type: str) -> Path | None:
    """Find a directory whose files can be copied to save this tokenizer; None if there is none.

    Files that do not name the tokenizer's class depend on the model type in the `config.json` of their directory.
    """
    directory = _find_directory(name)
    if directory is None:
        return None
    try:
        if "tokenizer_class" in read_json(directory / TOKENIZER_CONFIG):
            return directory
        same = read_json(directory / "config.json").get("model_type") == model_type
    except UserError:
        return None
    return directory if same else None


def _find_directory(name: str) -> Path | None:
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


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def list_saving_notes(
    origin: Origin | None, head: Head, tokenizer: Tokenizer, stop_token_ids: Collection[int], vocabulary: int
) -> Iterator[str]:
    """Yield notes about settings that saving ignores or changes.

    `stop_token_ids` are the additional tokens that can end a sequence, as in `model_files.save`.
    """
    if origin is not None:
        dropout = origin.config.get("attention_dropout")
        if dropout:
            yield f"{origin.directory / CONFIG} has attention_dropout={dropout}; training here uses no dropout"
        file, named = origin.find_stop_token_ids(vocabulary)
        missing = [token for token in stop_token_ids if token not in named]
        if head == "lm" and missing:
            yield (
                f"eos_token_id={[*named] or None} in {file} lacks tokens that end answers here:"
                f" {_name_tokens(missing, tokenizer)}; it is saved unchanged, so other programs may not stop"
                " generating at these tokens"
            )
    if head == "scalar":
        stop_token_ids = {*stop_token_ids, *list_stop_token_ids(tokenizer, origin, vocabulary)}
        pad = find_classifier_padding(tokenizer, stop_token_ids, vocabulary)
        if pad != tokenizer.pad_token_id:
            yield _describe_padding(tokenizer, pad)


def _name_tokens(tokens: Collection[int], tokenizer: Tokenizer) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)})" for token in tokens)


def _describe_padding(tokenizer: Tokenizer, pad: int | None) -> str:
    own = tokenizer.pad_token_id
    why = (
        "the tokenizer has no padding token"
        if own is None
        else f"sequences can end with the tokenizer's padding token {tokenizer.convert_ids_to_tokens(own)}"
    )
    if pad is None:
        return f"{why}, and no other token can pad; saved without one, it scores one sequence at a time"
    chosen = tokenizer.convert_ids_to_tokens(pad)
    return (
        f"{why}; saved with the padding token {chosen}, so that transformers scores sequences at their ends"
    )
