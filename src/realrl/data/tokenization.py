"""Tokenization of the texts of an item into rows of a graph's source keys.

A row of plain text consists of beginning of sequence, prompt, answer and end of sequence. Prompt, answer and the
steps of an answer are tokenised separately, so that a prompt has the same tokens in training and generation. The
beginning of sequence is what the tokenizer's post-processor puts before a text; a bos_token alone does not count.
Neither beginning nor end of sequence is added twice.

Conversations are tokenised whole, exactly as `apply_chat_template(tokenize=True)` does, and then divided by
character offsets. A token belongs to the turn of its last character. So a token that joins the end of a prompt with
the beginning of an answer belongs to the answer. Generation starts from the tokens of the prompt alone. If a row
does not begin with these tokens, template and tokenizer do not fit each other. This is noted (`Row.joined`) but not
repaired, because other tokens would not be the template's.

An answer ends with its end of sequence. If the template writes none, an earlier turn ends where the template ends
it. The last turn then gets an end of sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from realrl.config.errors import UserError
from realrl.data.chat_template import Conversation, Turn
from realrl.data.record_forms import Steps, Text
from realrl.recipe.data import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SAME_ANSWERS = "the chosen and the rejected answer are the same"
EMPTY_PROMPT = (
    "the prompt is empty, and the tokenizer puts no beginning of sequence before a text; generation needs at "
    "least one token"
)


@dataclass(frozen=True)
class Row:
    """Tokens of one text."""

    ids: list[int]
    answers: tuple[tuple[int, int], ...] = ()
    """Position of the first token of each answer to train on, and of the token after its end of sequence."""
    joined: bool = False
    """Whether the tokenizer splits the end of the prompt differently when the answer follows."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first answer."""
        return self.answers[0][0] if self.answers else len(self.ids)

    @property
    def loss_mask(self) -> list[int]:
        """Mask with 1 for each token to train on; 0 for the first token of a row, which has no predecessor."""
        mask = [0] * len(self.ids)
        for first, stop in self.answers:
            mask[first:stop] = [1] * (stop - first)
        return [0, *mask[1:]]


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Check that the tokenizer can end a sequence. Raises UserError if not."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {tokenizer.name_or_path} has no end-of-sequence token (eos_token)")


def find_beginning(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Find the tokens that the tokenizer puts before every text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    return encoded["input_ids"][: [*encoded["special_tokens_mask"], 0].index(0)]


def tokenize(
    texts: Sequence[Text | Conversation | Steps],
    tokenizer: "PreTrainedTokenizerFast",
    stop_token_ids: tuple[int, ...],
) -> list[Row]:
    """Tokenize texts into one row each.

    `stop_token_ids` are the ids that end a sequence, at least one; the first one is appended.
    """
    before = find_beginning(tokenizer)
    parts = _encode([piece for text in texts for piece in _pieces(text)], tokenizer)
    wholes = _Wholes(
        [text.text for text in texts if isinstance(text, Conversation) and text.turns],
        tokenizer,
        stop_token_ids,
    )
    rows = []
    for text in texts:
        if isinstance(text, Conversation):
            rows.append(wholes.row(text, parts[text.prompt]) if text.turns else Row(parts[text.prompt]))
        elif isinstance(text, Steps):
            rows.append(_step_row(before, parts[text.prompt], [parts[step] for step in text.steps]))
        else:
            answer = None if text.answer is None else parts[text.answer]
            rows.append(_plain_row(before, parts[text.prompt], answer, tokenizer, stop_token_ids))
    return rows


def find_excess(rows: Sequence[Row], config: DataConfig) -> str | None:
    """Find the limit that an item with these rows exceeds; None if it exceeds none."""
    for row in rows:
        if row.prompt_length > config.max_prompt_tokens:
            return (
                f"the prompt has {row.prompt_length} tokens, more than data.max_prompt_tokens="
                f"{config.max_prompt_tokens}"
            )
        if len(row.ids) > config.max_tokens:
            return (
                f"prompt and answer have {len(row.ids)} tokens, more than data.max_tokens={config.max_tokens}"
            )
    return None


def cut_rows(rows: Sequence[Row], config: DataConfig, bos: int | None) -> list[Row]:
    """Cut the rows of an item to the token limits, as `config.on_too_long` says. Rows may still be too long.

    The prompts of all rows lose the same tokens at their beginning, after `bos` if a row begins with it. So the two
    sides of a pair keep the same prompt, and the text that announces the answer stays. The last answer keeps its
    beginning.
    """
    keep_end = config.on_too_long == "keep_end"
    excess = max(row.prompt_length for row in rows) - config.max_prompt_tokens
    if keep_end:
        excess = max(excess, *(len(row.ids) - config.max_tokens for row in rows))
    kept = [_cut_beginning(row, max(excess, 0), bos) for row in rows]
    return [row if keep_end else _cut_end(row, config.max_tokens) for row in kept]


def _cut_beginning(row: Row, tokens: int, bos: int | None) -> Row:
    """Remove tokens from the beginning of a row, except `bos` and the last answer."""
    first = int(row.ids[:1] == [bos])
    if not tokens or (row.answers and row.answers[-1][0] < first + tokens):
        return row
    spans = ((max(start - tokens, first), stop - tokens) for start, stop in row.answers)
    ids = [*row.ids[:first], *row.ids[first + tokens :]]
    return replace(row, ids=ids, answers=tuple(span for span in spans if span[0] < span[1]))


def _cut_end(row: Row, longest: int) -> Row:
    """Cut the answers of a row, unless no answer would be left."""
    answers = tuple((start, min(stop, longest)) for start, stop in row.answers if start < longest)
    return replace(row, ids=row.ids[:longest], answers=answers) if answers else row


def find_problem(rows: Sequence[Row], form: str) -> str | None:
    """Find the reason, other than length, why an item with these rows is unusable; None if it is usable."""
    for row in rows:
        if not row.ids:
            return EMPTY_PROMPT
        if row.answers and not any(row.loss_mask):
            return "prompt and answer are empty"
    if form == "pair":
        if rows[0].ids == rows[1].ids:
            return SAME_ANSWERS
        for side, row in zip(("chosen", "rejected"), rows, strict=True):
            first, stop = row.answers[-1]
            if stop - first < 2:
                return f"the {side} answer is empty"
    return None


def make_field(key: str, rows: Sequence[Row]) -> list[int]:
    """Make the row of a source key for an item with these rows."""
    match key:
        case "loss_mask":
            return rows[0].loss_mask
        case "rejected":
            return rows[1].ids
        case "prompt_length" | "chosen_prompt_length":
            return [rows[0].prompt_length]
        case "rejected_prompt_length":
            return [rows[1].prompt_length]
        case "step_ends":
            return [stop - 1 for _, stop in rows[0].answers]
    if key.startswith("answer_"):
        return rows[int(key.removeprefix("answer_"))].ids
    return rows[0].ids


def _encode(texts: Sequence[str | None], tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[int]]:
    """Encode each text without adding tokens."""
    parts = list(dict.fromkeys(text for text in texts if text))
    if not parts:
        return {"": []}
    encoded = tokenizer(parts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return {"": [], **dict(zip(parts, encoded, strict=True))}


def _pieces(text: Text | Conversation | Steps) -> tuple[str | None, ...]:
    """List the parts of a text that are tokenised separately."""
    if isinstance(text, Steps):
        return (text.prompt, *text.steps)
    return (text.prompt, text.answer) if isinstance(text, Text) else (text.prompt,)


def _step_row(before: list[int], prompt: list[int], steps: Sequence[list[int]]) -> Row:
    """Make the row of a prompt and steps. Each step is an answer to train on. No end of sequence is added."""
    ids = prompt if prompt[: len(before)] == before else before + prompt
    answers = []
    for step in steps:
        answers.append((len(ids), len(ids) + len(step)))
        ids = [*ids, *step]
    return Row(ids, tuple(answers))


def _plain_row(
    before: list[int],
    prompt: list[int],
    answer: list[int] | None,
    tokenizer: "PreTrainedTokenizerFast",
    stop_token_ids: tuple[int, ...],
) -> Row:
    """Make the row of a prompt, and possibly its answer; `before` is the beginning of sequence."""
    if not prompt and answer is not None and answer[: len(before)] == before:
        prompt = before
        answer = answer[len(before) :]
    elif prompt[: len(before)] != before:
        prompt = before + prompt
    if answer is None:
        return Row(prompt)
    last = next((i for i in reversed(range(len(answer))) if answer[i] in stop_token_ids), None)
    if last is None or tokenizer.decode(answer[last + 1 :]).strip():
        answer = [*answer, stop_token_ids[0]]
    else:
        answer = answer[: _first_of_run(answer, last, stop_token_ids) + 1]
    return Row([*prompt, *answer], ((len(prompt), len(prompt) + len(answer)),))


def _first_of_run(ids: Sequence[int], last: int, stop_token_ids: tuple[int, ...]) -> int:
    """Find the first of the consecutive end-of-sequence tokens up to `last`, at which generation stops."""
    while last and ids[last - 1] in stop_token_ids:
        last -= 1
    return last


class _Wholes:
    """Conversations that are tokenised whole."""

    def __init__(
        self, texts: Sequence[str], tokenizer: "PreTrainedTokenizerFast", stop_token_ids: tuple[int, ...]
    ) -> None:
        self.stop_token_ids = stop_token_ids
        # Some added tokens include the white space after them, which may belong to the next speaker.
        self.rstripping = {id for id, token in tokenizer.added_tokens_decoder.items() if token.rstrip}
        parts = list(dict.fromkeys(texts))
        self.encoded: dict[str, tuple[list[int], list[int]]] = {}
        if parts:
            encoded = tokenizer(
                parts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
            )
            for text, ids, offsets in zip(
                parts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            ):
                self.encoded[text] = ids, self._stops(text, ids, offsets)

    def _stops(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
        """Compute the end of each token, in characters from the start of the text. Ends never decrease."""
        stops = (
            first + len(text[first:stop].rstrip()) if id in self.rstripping else stop
            for id, (first, stop) in zip(ids, offsets, strict=True)
        )
        return list(accumulate(stops, max))

    def row(self, conversation: Conversation, prompt: list[int]) -> Row:
        """Make the row of a conversation with turns to train on; `prompt` has the tokens of its prompt alone."""
        ids, stops = self.encoded[conversation.text]
        answers = [self._answer(turn, ids, stops) for turn in conversation.turns]
        first, stop, closed = answers[-1]
        if not closed:
            ids, stop = [*ids, self.stop_token_ids[0]], len(ids) + 1
        elif conversation.cut:
            ids = ids[:stop]
        spans = (*((a, b) for a, b, _ in answers[:-1]), (first, stop))
        return Row(ids, spans, joined=ids[: len(prompt)] != prompt)

    def _answer(self, turn: Turn, ids: Sequence[int], stops: Sequence[int]) -> tuple[int, int, bool]:
        """Find the first token of a turn, the token after its last, and whether the last is an end of sequence."""
        first = bisect_right(stops, turn.start)
        behind = bisect_right(stops, turn.stop)
        # An end of sequence inside the content does not end the turn. Generation stops at the first end of sequence
        # after the content, even if the template writes more.
        content = max(first, bisect_right(stops, turn.content - 1))
        end = next((i for i in range(content, behind) if ids[i] in self.stop_token_ids), None)
        if end is None:
            return first, behind, False
        return first, max(first, _first_of_run(ids, end, self.stop_token_ids)) + 1, True
