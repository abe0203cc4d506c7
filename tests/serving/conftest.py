"""A small tokenizer, an engine that says what a test gives it, and a server in front of it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
from tokenizers import processors

from realrl.huggingface.tokenizers import train_bpe
from realrl.serving.conversations import ConversationMemory
from realrl.serving.endpoint import make_app
from realrl.serving.engine import Piece, SamplingOptions
from realrl.serving.listening import ApiServer, format_url, open_socket
from realrl.serving.prompts import PromptWriter
from tests.environments.test_turn_template import TEMPLATES

TOKEN = "a-token-of-a-test"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
Answer = Callable[[Sequence[int], SamplingOptions], Sequence[int]]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level, with a beginning of sequence, and a chat template like Qwen's, which writes it, too."""
    trained = train_bpe(["the cat sat on the mat", "a dog ate the cat"] * 4, 300)
    trained.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    trained.eos_token = "<|im_end|>"
    trained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", trained.bos_token_id)]
    )
    trained.chat_template = TEMPLATES["qwen"]
    return trained


@pytest.fixture
def encode(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def logprob_of(token: int) -> float:
    """The log-probability that the engine of these tests gives a token."""
    return -token / 8


class ScriptedEngine:
    """Answers with the tokens of a function, in pieces, on a thread of its own.

    The answer ends where its tokens end. An answer without end repeats its tokens until it is cancelled.
    """

    name = "tiny"
    context_setting = ""

    def __init__(self, answer: Answer, *, vocab_size: int, context_tokens: int = 400) -> None:
        self.answer, self.vocab_size, self.context_tokens = answer, vocab_size, context_tokens
        self.prompts: list[list[int]] = []
        self.options: list[SamplingOptions] = []
        self.piece_tokens = 1
        self.endless = self.closed = False
        self.problem: str | None = None
        self.error: str | None = None
        self.error_after = 0
        self.cancelled: set[int] = set()
        self.was_cancelled = threading.Event()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        if self.closed:
            raise RuntimeError("the engine is closed")
        self.prompts.append(list(prompt))
        self.options.append(options)
        number = len(self.prompts)
        self._queue.put((number, list(prompt), options, receive))
        return number

    def cancel(self, request: int) -> None:
        self.cancelled.add(request)
        self.was_cancelled.set()

    def close(self) -> None:
        self.closed = True
        self._queue.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            number, prompt, options, receive = work
            for piece in self._list_pieces(prompt, options):
                if number in self.cancelled or self.closed:
                    break
                receive(piece)

    def _list_pieces(self, prompt: Sequence[int], options: SamplingOptions) -> Iterator[Piece]:
        whole = list(self.answer(prompt, options))
        tokens = whole[: options.max_tokens]
        count, step, cached = 0, self.piece_tokens, len(prompt) - 1
        while self.endless:
            yield Piece(tokens=tokens[:1], logprobs=[logprob_of(tokens[0])], cached_tokens=cached)
        for start in range(0, len(tokens), step):
            if self.error is not None and count >= self.error_after:
                break
            part = tokens[start : start + step]
            count += len(part)
            end = "stop" if tokens == whole else "length"
            yield Piece(
                tokens=part,
                logprobs=[logprob_of(token) for token in part],
                cached_tokens=cached if start == 0 else 0,
                finish=end if start + step >= len(tokens) else None,
            )
        if self.error is not None:
            yield Piece(error=self.error)


@pytest.fixture
def engine(tokenizer: Any, encode: Any) -> Iterator[ScriptedEngine]:
    """Says `the cat sat` and ends, unless a test gives it another `answer`."""
    made = ScriptedEngine(
        lambda prompt, options: [*encode("the cat sat"), tokenizer.eos_token_id],
        vocab_size=len(tokenizer) + 3,
    )
    yield made
    if not made.closed:
        made.close()


@pytest.fixture
def say(engine: ScriptedEngine, tokenizer: Any, encode: Any) -> Callable[..., None]:
    """Sets what the engine says: one text after the other, the last one again and again."""

    def say(*texts: str) -> None:
        left = list(texts)

        def answer(prompt: Sequence[int], options: SamplingOptions) -> list[int]:
            text = left.pop(0) if len(left) > 1 else left[0]
            return [*encode(text), tokenizer.eos_token_id]

        engine.answer = answer

    return say


@pytest.fixture
def writer(tokenizer: Any) -> PromptWriter:
    return PromptWriter(tokenizer, stop_token_ids=[tokenizer.eos_token_id], memory=ConversationMemory(10_000))


@pytest.fixture
def app(engine: Any, tokenizer: Any, writer: PromptWriter) -> Any:
    return make_app(engine, tokenizer, writer, token=TOKEN)


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    """Base URL of a server on a free port, in another thread."""
    listening = open_socket("127.0.0.1", 0)
    server, url = ApiServer(app, grace_seconds=5), format_url(listening)
    thread = threading.Thread(target=server.serve_forever, args=(listening,), daemon=True)
    thread.start()
    yield url
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
