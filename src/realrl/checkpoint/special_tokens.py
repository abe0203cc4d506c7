"""Tokens that end a sequence, and the one that pads a saved classifier. No torch."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from realrl.checkpoint.origin import Origin
from realrl.config.errors import UserError
from realrl.families.config_json import SPECIAL_TOKENS


class AddedToken(Protocol):
    """A token that a tokenizer does not split."""

    content: str
    special: bool


class SpecialTokens(Protocol):
    """Special tokens of a transformers tokenizer, as far as they are used here."""

    name_or_path: str
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id."""


def list_stop_token_ids(tokenizer: SpecialTokens, origin: Origin | None, vocabulary: int) -> tuple[int, ...]:
    """List all tokens that end a sequence: the tokenizer's first, then those of the model's own settings.

    Llama 3 Instruct has three.

    `vocabulary` is the model's. UserError for an id outside it.
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
    """Find the token that a saved classifier is padded with; None where no token will do.

    transformers scores a sequence at its last token that is not padding, so padding must be nothing that a
    sequence can end with. If the tokenizer's own padding token is none of the `stop_token_ids` it is taken,
    else a special token that texts do not end with: one that is called padding, a reserved one, the unknown
    token, or the beginning of sequence.
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
    """Find the special tokens for a saved `config.json`.

    Those of the model that was opened, as they stood there, or the tokenizer's where a model started from
    scratch.
    """
    if origin is not None:
        return {name: origin.config[name] for name in SPECIAL_TOKENS if name in origin.config}
    return {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
