"""Application with OpenAI's routes in front of an engine.

The routes are /v1/models, /v1/completions, /v1/chat/completions and /health. The extra `serve` has the packages
for it.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from realrl.serving.answers import Answer, Usage, make_answer, write_message
from realrl.serving.decoding import TokenTexts
from realrl.serving.engine import Engine, Piece, SamplingOptions
from realrl.serving.prompts import Prompt, PromptWriter
from realrl.serving.refusal import BusyError, RefusedError, fail
from realrl.serving.requests import Chat, ChatBody, CompletionBody, SamplingBody, check_tokens
from realrl.serving.samples import Delta, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_PATIENCE = 1.0
"""Seconds for which a request to a busy engine is tried again."""


@dataclass(frozen=True, kw_only=True)
class EndpointLimits:
    """Limits of what clients may ask for. Beyond the context of the model, these protect the server."""

    body_bytes: int = 16 * 2**20
    """Maximum size of a request's body."""
    samples: int = 256
    """Maximum number of samples that are queued or in progress, of all requests together."""
    samples_per_prompt: int = 128
    """Maximum `n` of a request."""
    stop_strings: int = 16
    """Maximum number of stop strings of a request."""


def make_app(
    engine: Engine,
    tokenizer: "PreTrainedTokenizerFast",
    writer: PromptWriter,
    *,
    token: str | None,
    limits: EndpointLimits | None = None,
) -> Starlette:
    """Make the application. It closes the engine when the server shuts down.

    `token`: what clients must send as `Authorization: Bearer TOKEN`; None lets everybody in who reaches the server,
    except pages in browsers.
    """
    served = Served(engine, writer)
    endpoint = Endpoint(lambda _: served, tokenizer, limits or EndpointLimits())

    def close() -> None:
        endpoint.close()
        engine.close()

    async def tell_health(request: Request, send: Send) -> None:
        if engine.problem is not None:
            raise RefusedError(engine.problem, status=503, code="engine_error")
        await _send_json({"status": "ok"}, request, send)

    health = Route("/health", _Guarded(tell_health, None), methods=["GET"])
    return assemble_app([health, *endpoint.list_routes(token)], close)


def assemble_app(routes: Sequence[BaseRoute], close: Callable[[], None]) -> Starlette:
    """Make an application that answers all errors in OpenAI's form, and that calls `close` when it shuts down."""

    @asynccontextmanager
    async def close_at_end(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(close)

    handlers = {HTTPException: _answer_other_errors, Exception: _answer_bug}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=close_at_end)


@dataclass(frozen=True)
class Served:
    """What answers a request."""

    engine: Engine
    writer: PromptWriter
    stop: Sequence[str] = ()
    """Texts that end an answer, in addition to those of the request."""
    note_answer: Callable[[Sequence[int], Delta], None] = lambda prompt, sampled: None
    """Gets the prompt and the tokens of each answer, before the client does."""
    note_refusal: Callable[[RefusedError], None] = lambda error: None
    """Gets the error of a request that gets no answer."""
    handle: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which a request is handled."""


class Endpoint:
    """Answers requests with samples of an engine."""

    def __init__(
        self,
        find: Callable[[Request], Served],
        tokenizer: "PreTrainedTokenizerFast",
        limits: EndpointLimits,
    ) -> None:
        """`find` chooses what answers a request, or raises RefusedError."""
        self._find, self._limits = find, limits
        self._texts = TokenTexts(tokenizer)
        self._running = 0
        # Tokenizers must not be used by several threads that encode. Long prompts would block the event loop.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def list_routes(self, token: str | None) -> list[Route]:
        """List OpenAI's routes. `token` as for `make_app`."""

        def guard(handle: Callable[[Request, Send], Awaitable[None]]) -> "_Guarded":
            return _Guarded(handle, token)

        return [
            Route("/v1/models", guard(self.list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", guard(self.show_model), methods=["GET"]),
            Route("/v1/completions", guard(partial(self.sample, CompletionBody)), methods=["POST"]),
            Route("/v1/chat/completions", guard(partial(self.sample, ChatBody)), methods=["POST"]),
        ]

    def close(self) -> None:
        """End the threads. Engines are left alone."""
        self._encoding.shutdown(cancel_futures=True)

    async def list_models(self, request: Request, send: Send) -> None:
        """Answer /v1/models: the one model."""
        content = {"object": "list", "data": [_describe_model(self._find(request).engine)]}
        await _send_json(content, request, send)

    async def show_model(self, request: Request, send: Send) -> None:
        """Answer /v1/models/NAME."""
        engine = self._find(request).engine
        _check_model(request.path_params["name"], engine)
        await _send_json(_describe_model(engine), request, send)

    async def sample(self, kind: type[SamplingBody], request: Request, send: Send) -> None:
        """Answer a request for samples. If the client closes the connection, the samples are cancelled."""
        served = self._find(request)
        with served.handle():
            try:
                body = kind.read(await _read_body(request, self._limits.body_bytes))
                _check_model(body.model, served.engine)
                count = self._count_samples(body)
                with self._reserve(count):
                    await _run_while_connected(self._sample(served, body, request, send), request)
            except RefusedError as error:
                served.note_refusal(error)
                raise

    async def _sample(self, served: Served, body: SamplingBody, request: Request, send: Send) -> None:
        work = await asyncio.get_running_loop().run_in_executor(self._encoding, self._prepare, served, body)
        if body.stream:
            await _send_events(self._stream(work), request, send)
        else:
            await _send_json(await self._collect(work), request, send)

    def _prepare(self, served: Served, body: SamplingBody) -> "_Work":
        """Write the prompts of a request. Raises RefusedError if they cannot be answered."""
        engine, writer = served.engine, served.writer
        chat = body.read_chat() if isinstance(body, ChatBody) else None
        if isinstance(body, CompletionBody):
            prompts = [
                writer.write_text(given) if isinstance(given, str) else _take_tokens(given, "prompt", engine)
                for given in body.prompts
            ]
        else:
            assert isinstance(body, ChatBody) and chat is not None
            given = body.prompt_token_ids
            writer.check_tools(chat)
            prompts = [
                writer.write_chat(chat) if given is None else _take_tokens(given, "prompt_token_ids", engine)
            ]
        options = [body.make_options(prompt.tokens, engine) for prompt in prompts]
        tokens = [prompt.tokens for prompt in prompts]
        answer = make_answer(body, engine.name, tokens, self._texts)
        form = writer.tool_format if chat is not None else None
        samples = [
            Sample(
                self._texts,
                prompt.tokens,
                stop=[*body.stop, *served.stop],
                min_tokens=body.min_tokens,
                continues=isinstance(body, CompletionBody),
                form=form,
                tools=chat.tools if chat is not None else (),
                keep_special=not body.skip_special_tokens,
            )
            for prompt in prompts
            for _ in range(body.n)
        ]
        return _Work(served, body, chat, prompts, options, answer, samples)

    async def _collect(self, work: "_Work") -> dict[str, Any]:
        async with aclosing(self._run(work)) as news:
            async for _ in news:
                pass
        return work.answer.write_whole(work.whole, work.count_tokens())

    async def _stream(self, work: "_Work") -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a stream. Tokens without text wait for the next chunk with text."""
        waiting = [Delta() for _ in work.samples]
        async with aclosing(self._run(work)) as news:
            async for i, delta in news:
                waiting[i].add(delta)
                if delta.text or delta.finish is not None:
                    yield work.answer.write_chunk(i, waiting[i])
                    waiting[i] = Delta()
        if work.body.include_usage:
            yield work.answer.write_usage(work.count_tokens())

    async def _run(self, work: "_Work") -> AsyncGenerator[tuple[int, Delta], None]:
        """Submit all samples, and yield their news. Samples that are left at the end are cancelled."""
        engine = work.served.engine
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def receive(sample: int, piece: Piece) -> None:
            with suppress(RuntimeError):  # the server has stopped, and its loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (sample, piece))

        requests: dict[int, int] = {}
        try:
            for i, (prompt, options) in enumerate(work.list_requests()):
                requests[i] = await _submit(engine, prompt.tokens, options, partial(receive, i))
            while requests:
                i, piece = await queue.get()
                if i not in requests:
                    continue  # a piece after a stop string
                if piece.error is not None:
                    raise fail(piece.error)
                delta = work.samples[i].read(piece)
                work.whole[i].add(delta)
                if work.samples[i].finished:
                    request = requests.pop(i)
                    if piece.finish is None:
                        engine.cancel(request)
                    work.note_answer(i)
                yield i, delta
        finally:
            for request in requests.values():
                engine.cancel(request)

    def _count_samples(self, body: SamplingBody) -> int:
        """Count the samples of a request. Raises RefusedError if there are too many of something."""
        prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        for param, what, number, limit in (
            ("n", "n", body.n, self._limits.samples_per_prompt),
            ("stop", "the number of stop strings", len(body.stop), self._limits.stop_strings),
            ("prompt", "the number of samples", body.n * prompts, self._limits.samples),
        ):
            if number > limit:
                raise RefusedError(f"{what} is {number}, and this server allows {limit}", param=param)
        return body.n * prompts

    @contextmanager
    def _reserve(self, samples: int) -> Iterator[None]:
        if self._running + samples > self._limits.samples:
            raise RefusedError(
                f"the queue is full: {self._running} of {self._limits.samples} samples are queued or in progress;"
                " try again later",
                status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        self._running += samples
        try:
            yield
        finally:
            self._running -= samples


async def _submit(
    engine: Engine, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
) -> int:
    """Submit a sample. A busy engine gets a moment, because the end of another connection may not be known yet."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return engine.submit(prompt, options, receive)
        except BusyError:
            if time.monotonic() > give_up:
                raise
        except RefusedError:
            raise
        except Exception as error:  # an engine may fail in any way, and the client needs an answer
            raise fail(str(error) or type(error).__name__) from error
        await asyncio.sleep(_PATIENCE / 50)


def _take_tokens(tokens: Sequence[int], param: str, engine: Engine) -> Prompt:
    check_tokens(tokens, engine.vocab_size, param)
    return Prompt(tokens)


def _describe_model(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.name,
        "object": "model",
        "created": 0,
        "owned_by": "realrl",
        "max_model_len": engine.context_tokens,
    }


def _check_model(name: str | None, engine: Engine) -> None:
    if name not in (None, engine.name):
        raise RefusedError(
            f"there is no model {str(name)[:80]!r}; this server has {engine.name!r}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip


@dataclass
class _Work:
    """What a request asks for."""

    served: Served
    body: SamplingBody
    chat: Chat | None
    prompts: list[Prompt]
    options: list[SamplingOptions]
    """Options of each prompt."""
    answer: Answer
    samples: list[Sample]
    """Samples of all prompts: `n` of the first one, then of the second, and so on."""
    whole: list[Delta] = field(init=False)
    """What the samples have so far."""

    def __post_init__(self) -> None:
        self.whole = [Delta() for _ in self.samples]

    def list_requests(self) -> Iterator[tuple[Prompt, SamplingOptions]]:
        """Yield prompt and options of each sample. Samples of one prompt have different seeds."""
        for prompt, options in zip(self.prompts, self.options, strict=True):
            for i in range(self.body.n):
                seed = None if options.seed is None else (options.seed + i) % 2**63
                yield prompt, replace(options, seed=seed)

    def note_answer(self, i: int) -> None:
        """Note that sample `i` is complete."""
        served, sampled = self.served, self.whole[i]
        prompt = self.prompts[i // self.body.n]
        if self.chat is not None:
            served.writer.remember(self.chat, prompt, write_message(sampled), sampled.tokens)
        served.note_answer(prompt.tokens, sampled)

    def count_tokens(self) -> Usage:
        """Count the tokens of the prompts and of the samples."""
        return Usage(
            prompt=sum(len(prompt.tokens) for prompt in self.prompts),
            completion=sum(len(sample.tokens) for sample in self.whole),
            cached=sum(sample.cached_tokens for sample in self.samples[:: self.body.n]),
        )


class _Guarded:
    """A route that checks the token, and turns refused requests into answers."""

    def __init__(self, handle: Callable[[Request, Send], Awaitable[None]], token: str | None) -> None:
        self._handle, self._token = handle, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            self._check(request)
            await self._handle(request, send)
        except RefusedError as error:
            await _refuse(error)(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody waits for an answer

    def _check(self, request: Request) -> None:
        if self._token is None:
            # Only pages in browsers send an origin. Without a token, any page could use a server on this machine.
            if "origin" in request.headers:
                raise RefusedError("a server without a token answers no pages in browsers", status=403)
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise RefusedError(
                "send the server's token as the API key: Authorization: Bearer TOKEN",
                status=401, code="invalid_api_key",
            )  # fmt: skip


async def _read_body(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    body = bytearray()
    too_long = length.isdecimal() and int(length[:20]) > limit
    if not too_long:
        async for chunk in request.stream():
            body += chunk
            too_long = len(body) > limit
            if too_long:
                break
    if too_long:
        raise RefusedError(f"the body has more than {limit} bytes", status=413, code="request_too_large")
    return bytes(body)


async def _run_while_connected(work: Awaitable[None], request: Request) -> None:
    """Wait for work. If the client closes the connection first, cancel it."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _send_json(content: Any, request: Request, send: Send) -> None:
    await _respond(content)(request.scope, request.receive, send)


def _respond(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Escapes keep an error message that quotes half a character valid.
    return Response(json.dumps(content), status, headers, "application/json")


async def _send_events(chunks: AsyncGenerator[dict[str, Any], None], request: Request, send: Send) -> None:
    """Send server-sent events. The response starts with the first of them, so that errors before it have a status.

    Raises RefusedError for such an error. Later errors are events.
    """
    started = False
    async with aclosing(chunks) as events:
        try:
            async for chunk in events:
                if not started:
                    await send(_START)
                    started = True
                await _send_event(json.dumps(chunk), send)
        except RefusedError as error:
            if not started:
                raise
            await _send_event(json.dumps(error.to_json()), send)
        else:
            await _send_event("[DONE]", send)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would keep the events back
    ],
}


async def _send_event(text: str, send: Send) -> None:
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


def _refuse(error: RefusedError) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
    return _respond(error.to_json(), error.status, headers)


async def _answer_other_errors(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    return _refuse(
        RefusedError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    )


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _refuse(RefusedError("internal error; the server's log has the details", status=500))
