"""Loading of tokenizers, and training of small ones."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.paths import is_local, local_path
from realrl.data.sources.records import read_records
from realrl.data.sources.rejects import Rejects
from realrl.families.adapter_config import find_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"


def load_tokenizer(path: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a Hugging Face directory or hub name. UserError where there is none.

    Of a directory with adapters and no tokenizer, that of their base.
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
    """Option with which transformers does not load the class of the model's configuration, where it need not.

    It looks there for the class of the tokenizer, which most tokenizers name themselves; importing it takes longer
    than all else. Of a user's own family it would warn that the model may not be supported, and that its settings
    are deprecated, which matters to nobody who only wants the tokenizer.
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

    Called with special tokens, it puts BOS before a text, as training here does. UserError where `vocab_size`
    cannot hold the 256 bytes and three special tokens.
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

    What transformers notes there about the origin of the tokenizer is left out.
    """
    tokenizer.save_pretrained(str(directory))
    config = directory / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 does not know its new name
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(source: str, out: str, vocab_size: int) -> int:
    """Train a tokenizer on the records of `source` (see `read_records`) and write it to the directory `out`.

    Returns its number of tokens: fewer than `vocab_size` where the texts do not yield enough.
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
