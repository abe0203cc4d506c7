"""Notes on settings that are ignored, or changed on saving. No torch."""

from collections.abc import Collection, Iterator

from realrl.checkpoint.directory import CONFIG
from realrl.checkpoint.origin import Origin
from realrl.checkpoint.special_tokens import find_classifier_padding, list_stop_token_ids
from realrl.checkpoint.tokenizer_files import Tokenizer
from realrl.families.shape import Head


def list_saving_notes(
    origin: Origin | None, head: Head, tokenizer: Tokenizer, stop_token_ids: Collection[int], vocabulary: int
) -> Iterator[str]:
    """List notes on saving, one message each; see `huggingface.save` for `stop_token_ids`."""
    if origin is not None:
        dropout = origin.config.get("attention_dropout")
        if dropout:
            yield f"{origin.directory / CONFIG} has attention_dropout={dropout}; training here is without dropout"
        file, named = origin.find_stop_token_ids(vocabulary)
        missing = [token for token in stop_token_ids if token not in named]
        if head == "lm" and missing:
            yield (
                f"eos_token_id={[*named] or None} in {file} lacks what ends answers here:"
                f" {_list(missing, tokenizer)}; it is saved as it is, and other programs that generate with the"
                " model may not stop there"
            )
    if head == "scalar":
        stop_token_ids = {*stop_token_ids, *list_stop_token_ids(tokenizer, origin, vocabulary)}
        pad = find_classifier_padding(tokenizer, stop_token_ids, vocabulary)
        if pad != tokenizer.pad_token_id:
            yield _padding(tokenizer, pad)


def _list(tokens: Collection[int], tokenizer: Tokenizer) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)})" for token in tokens)


def _padding(tokenizer: Tokenizer, pad: int | None) -> str:
    own = tokenizer.pad_token_id
    why = (
        "the tokenizer has no padding token"
        if own is None
        else f"sequences can end with the tokenizer's padding token {tokenizer.convert_ids_to_tokens(own)}"
    )
    if pad is None:
        return f"{why}, and no other token can pad: saved without one, it scores one sequence at a time"
    chosen = tokenizer.convert_ids_to_tokens(pad)
    return (
        f"{why}: saved with the padding token {chosen}, so that transformers scores sequences at their ends"
    )
