"""Text generation from a saved model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from realrl.checkpoint import huggingface
from realrl.config.errors import UserError
from realrl.config.explain import shorten
from realrl.data.batch import Batch, Ragged
from realrl.data.conversation import Message
from realrl.data.forms import Reader, Text, is_plain_text, plain_text_note
from realrl.data.sources.records import Record
from realrl.data.sources.rejects import BadRecordError
from realrl.data.tokenization import EMPTY_PROMPT, tokenize
from realrl.data.tokenizer import load_tokenizer
from realrl.data.variants import rewrite
from realrl.engine.finite import NotFiniteLogitsError
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import make_unsharded_model
from realrl.recipe.settings import GenerationConfig
from realrl.runtime.setup import check_length, check_top_k, read_stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHE_TOKENS = 65536
"""Maximum tokens in the KV cache at a time."""

_CHARACTERS = 64
"""Maximum characters of a token in meaningful text."""


@dataclass(frozen=True)
class _Limit:
    """Limit of the tokens of prompts and of what is generated after them."""

    positions: int
    max_new_tokens: int

    def check(self, origin: str, tokens: int) -> None:
        """Check that a prompt of at least `tokens` tokens leaves room; else UserError."""
        what = (
            f"{shorten(origin)}: the prompt has at least {tokens} tokens, which with"
            f" max_new_tokens={self.max_new_tokens}"
        )
        check_length(what, tokens + self.max_new_tokens, self.positions, "the model")


def generate_text(
    model_dir: str,
    prompts: Sequence[Record],
    sampling: GenerationConfig,
    seed: int,
    n: int,
    *,
    chat: bool = False,
    family: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Continue the prompt of each record, {prompt} or {messages}, `n` times.

    Yields {prompt, completion, tokens, finished}, in the order of prompts; a prompt that is a conversation is a
    list of messages.

    Prompts of plain text are used as they stand, or with `chat` as one user turn in the tokenizer's chat template;
    `say` is called with the one used, where there is a choice. `family`: see `checkpoint.directory.read_shape`.
    UserError when the directory holds no model that can be loaded, or a record has no prompt, or one that is too
    long for the model.
    """
    shape = huggingface.read_shape(model_dir, family)
    check_top_k("top_k", sampling.top_k, shape.vocab_size)
    tokenizer = load_tokenizer(model_dir)
    stop_token_ids = read_stop_token_ids(tokenizer, model_dir, shape.vocab_size)
    limit = _Limit(shape.max_positions, sampling.max_new_tokens)
    given, encoded = _encode(prompts, tokenizer, stop_token_ids, chat, say, limit)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A CPU is no faster at bfloat16, and float32 repeats what training computed.
    dtype = huggingface.read_dtype(model_dir) if device.type == "cuda" else torch.float32
    model = make_unsharded_model(shape, "lm", dtype=dtype, device=device)
    huggingface.load(model_dir, shape, model.layout.specs, model.parameters)
    rows = Ragged.of([ids for ids in encoded for _ in range(n)], dtype=torch.int64)
    try:
        batch = generate(
            model,
            Batch(tuple(range(len(rows))), {"prompts": rows}),
            "prompts",
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            seed=SamplingSeed(seed, 0),
            kv_capacity=CACHE_TOKENS,
            samples=n,
        )
    except NotFiniteLogitsError as error:
        origin, _ = prompts[error.item // n]
        raise UserError(f"{model_dir} cannot generate: {error.describe(shorten(origin))}") from None
    for i, prompt in enumerate(prompt for prompt in given for _ in range(n)):
        tokens = batch["sequences"].row(i)[len(rows.row(i)) :].tolist()
        yield {
            "prompt": prompt,
            "completion": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens,
            "finished": bool(batch["finished"].row(i)),
        }


def _encode(
    prompts: Sequence[Record],
    tokenizer: "PreTrainedTokenizerFast",
    stop_token_ids: tuple[int, ...],
    chat: bool,
    say: Callable[[str], None],
    limit: "_Limit",
) -> tuple[list[str | list[Message]], list[list[int]]]:
    """Encode the prompts of records, by the rule that training has; returned as given, and as tokens."""
    reader = Reader(tokenizer, apply_chat_template=chat)
    given, texts, plain = [], [], []
    for origin, record in prompts:
        try:
            written = rewrite("prompt", record)
            given.append(reader.prompt(written))
            plain.append(is_plain_text(written))
            texts += [text for item in reader.read("prompt", written) for text in item]
        except BadRecordError as error:
            raise UserError(f"{origin}: {error}") from None
    note = plain_text_note(tokenizer, chat, "--chat")
    if note is not None and any(plain):
        say(note)
    # Of a text of megabytes the beginning is too long already, and takes no seconds to tokenise.
    long = _CHARACTERS * limit.positions
    for (origin, _), text in zip(prompts, texts, strict=True):
        if len(text.prompt) > long:
            limit.check(
                origin, len(tokenize([Text(text.prompt[:long], None)], tokenizer, stop_token_ids)[0].ids)
            )
    rows = [row.ids for row in tokenize(texts, tokenizer, stop_token_ids)]
    for (origin, _), ids in zip(prompts, rows, strict=True):
        if not ids:
            raise UserError(f"{origin}: {EMPTY_PROMPT}")
        limit.check(origin, len(ids))
    return given, rows
