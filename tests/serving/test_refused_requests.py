"""A request without an answer gets a status and an error in OpenAI's form. No field is ignored in silence."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from realrl.serving.endpoint import EndpointLimits, make_app
from realrl.serving.requests import IGNORED, ChatBody, CompletionBody
from tests.serving.conftest import ADD, TOKEN

ASKED = [{"role": "user", "content": "ate"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def web(app: Any) -> Iterator[TestClient]:
    with TestClient(app, headers=KEY) as client:
        yield client


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and list(answer.json()) == ["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean temperature?"),
        ({"guided_json": {}}, "guided_json", "unknown field 'guided_json'"),
        ({"temperature": "1"}, "temperature", "temperature: input should be a valid number, not '1'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 0.001}, "temperature", "must be 0 or at least 0.01"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "valid integer"),
        ({"n": 129}, "n", "n is 129, and this server allows 128"),
        ({"stop": ["a"] * 17}, "stop", "the number of stop strings is 17, and this server allows 16"),
        ({"stop": ""}, "stop[0]", "at least 1 character"),
        ({"stop": [1]}, "stop[0]", "valid string"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens=4 is above the limit of 3 tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "token 1000000 is not in the vocabulary"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids", "token 1000000 is not in the vocabulary"),
        ({"prompt_token_ids": []}, "prompt", "the prompt is empty"),
        ({"top_logprobs": 2}, "top_logprobs", "log-probabilities of sampled tokens alone"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "may only be 0, not 0.5"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained to a grammar"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "may only be true, not false"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "must be auto or none"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "a tool must be"),
        ({"tools": [None]}, "tools", "must be a list of schemas"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"chat_template_kwargs": {"thinks": False}}, "chat_template_kwargs", "does not use 'thinks'"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "not an argument"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "does not use 'reasoning_effort'"),
        ({"continue_final_message": True}, "messages", "needs an assistant message at the end"),
        ({"messages": []}, "messages", "must be a list of {role, content} messages"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages", "half a surrogate pair"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages", "is of type 'image_url'; only parts of text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "must be text"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_field_is_named(web: TestClient, engine: Any, fields: Any, param: str, message: str) -> None:
    error = refused(web.post(CHAT, content=json.dumps({"model": "tiny", "messages": ASKED, **fields})))
    assert error["param"] == param and message in error["message"]
    assert error["type"] == "invalid_request_error" and not engine.prompts


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": []}, "prompt", "and not empty"),
        ({"prompt": [1, "a"]}, "prompt", "a text, a list of texts"),
        ({"prompt": [[True]]}, "prompt", "a text, a list of texts"),
        ({"prompt": [-1]}, "prompt", "token -1 is not in the vocabulary"),
        ({"prompt": "\udc00"}, "prompt", "half a surrogate pair"),
        ({"prompt": "a", "echo": True}, "echo", "echo may only be false, not true"),
        ({"prompt": "a", "logprobs": 2}, "logprobs", "must be 0 or 1"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "a", "best_of": 2}, "best_of", "use n"),
        ({"prompt": "a", "messages": ASKED}, "messages", "unknown field 'messages'"),
        ({"prompt": ["a"] * 257}, "prompt", "the number of samples is 257, and this server allows 256"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    web: TestClient, engine: Any, fields: Any, param: str, message: str
) -> None:
    error = refused(web.post(TEXT, content=json.dumps(fields)))
    assert error["param"] == param and message in error["message"] and not engine.prompts


def test_a_prompt_over_the_context_gets_the_numbers(web: TestClient) -> None:
    for path, fields in (
        (TEXT, {"prompt": [5] * 390, "max_tokens": 11}),
        (TEXT, {"prompt": [5] * 400}),
        (CHAT, {"messages": [{"role": "user", "content": "z" * 400}]}),
    ):
        error = refused(web.post(path, json=fields))
        assert error["code"] == "context_length_exceeded"
        assert "the model allows 400 tokens of prompt and answer" in error["message"]
    error = refused(web.post(TEXT, json={"prompt": [5] * 390, "max_tokens": 11}))
    assert "the prompt has 390 tokens, and the answer may have 11, together 401" in error["message"]
    assert web.post(TEXT, json={"prompt": [5] * 390, "max_tokens": 10}).status_code == 200


@pytest.mark.parametrize(
    "body", ["{", "[1]", b"\xff", "[" * 200_000, '{"temperature": NaN, "prompt": "a"}', ""]
)
def test_a_body_that_is_no_request_is_refused(web: TestClient, body: Any) -> None:
    refused(web.post(TEXT, content=body))


def test_a_body_that_is_too_long_is_refused_before_it_is_read(
    engine: Any, tokenizer: Any, writer: Any
) -> None:
    app = make_app(engine, tokenizer, writer, token=None, limits=EndpointLimits(body_bytes=1000))
    with TestClient(app) as client:
        assert refused(client.post(TEXT, content="x" * 1001), 413)["code"] == "request_too_large"
        assert refused(client.post(TEXT, content=iter([b"x" * 600] * 2)), 413)
        refused(client.post(TEXT, content="x" * 1000))


def test_a_full_queue_refuses_more_requests(engine: Any, tokenizer: Any, writer: Any) -> None:
    app = make_app(engine, tokenizer, writer, token=TOKEN, limits=EndpointLimits(samples=4))
    with TestClient(app, headers=KEY) as client:
        answers = []

        def answer(prompt: Any, options: Any) -> Any:
            if not answers:  # the first request is in progress
                answers.append(client.post(TEXT, json={"prompt": "a", "n": 2}))
            return [5, tokenizer.eos_token_id]

        engine.answer = answer
        first = client.post(TEXT, json={"prompt": "a", "n": 3})
    assert first.status_code == 200
    error = refused(answers[0], 429)
    assert error["code"] == "rate_limit_exceeded" and "3 of 4 samples" in error["message"]
    assert answers[0].headers["retry-after"] == "1"


def test_fields_without_effect_are_accepted(web: TestClient, engine: Any) -> None:
    fields = {
        **dict.fromkeys(IGNORED, "x"),
        "frequency_penalty": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "top_k": -1,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "seed": None, "unheard_of": None,
    }  # fmt: skip
    assert web.post(CHAT, json={"messages": ASKED, **fields}).status_code == 200
    assert engine.options[0].top_k == 0 and engine.options[0].seed is None


def test_options_reach_the_engine(web: TestClient, engine: Any) -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_tokens": 2, "ignore_eos": True, "seed": -1,
              "stop_token_ids": [7, 8], "max_tokens": 9}  # fmt: skip
    assert web.post(CHAT, json={"messages": ASKED, **fields}).status_code == 200
    (options,) = engine.options
    assert (options.temperature, options.top_p, options.top_k, options.min_tokens) == (0, 0.5, 3, 2)
    assert (options.ignore_eos, options.stop_token_ids, options.max_tokens) == (True, (7, 8), 9)
    assert options.seed == 2**63 - 1
    assert web.post(CHAT, json={"messages": ASKED}).status_code == 200
    assert engine.options[1].max_tokens == engine.context_tokens - len(engine.prompts[1])


def test_content_in_parts_is_joined_and_a_message_may_be_continued(
    web: TestClient, engine: Any, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    messages = [{"role": "developer", "content": "sat"}, {"role": "user", "content": parts}]
    assert web.post(CHAT, json={"messages": messages}).status_code == 200
    start = (
        "<s><|im_start|>system\nsat<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(engine.prompts[0]) == start
    messages.append({"role": "assistant", "content": "a dog"})
    assert web.post(CHAT, json={"messages": messages, "continue_final_message": True}).status_code == 200
    assert tokenizer.decode(engine.prompts[1]) == start + "a dog"


def test_the_end_token_is_no_text_and_other_special_tokens_are_on_request(web: TestClient, say: Any) -> None:
    say("the<s> cat")
    for keep, text in ((False, "the<s> cat"), (True, "the cat")):
        answer = web.post(CHAT, json={"messages": ASKED, "skip_special_tokens": keep})
        assert answer.json()["choices"][0]["message"]["content"] == text


def test_routes_and_health(web: TestClient, app: Any) -> None:
    assert refused(web.get("/v1/embeddings"), 404)["message"] == "GET /v1/embeddings: Not Found"
    refused(web.get(CHAT), 405)
    assert (
        refused(web.post(CHAT, json={"model": "gpt-4", "messages": ASKED}), 404)["code"] == "model_not_found"
    )
    del web.headers["authorization"]
    assert web.get("/health").json() == {"status": "ok"}
    answer = web.get("/v1/models")
    assert refused(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_server_whose_engine_has_failed_is_not_healthy(web: TestClient, engine: Any) -> None:
    engine.problem = "the engine has failed: out of memory"
    assert refused(web.get("/health"), 503)["message"] == engine.problem


def test_a_server_without_a_token_refuses_pages_in_browsers(engine: Any, tokenizer: Any, writer: Any) -> None:
    with TestClient(make_app(engine, tokenizer, writer, token=None)) as client:
        assert client.post(TEXT, json={"prompt": "a"}).status_code == 200
        refused(client.post(TEXT, json={"prompt": "a"}, headers={"Origin": "http://localhost"}), 403)


def test_a_tokenizer_without_a_chat_template_or_a_known_format_says_so(engine: Any, tokenizer: Any) -> None:
    from copy import deepcopy

    from realrl.serving.prompts import PromptWriter

    for template, fields, message in (
        (None, {}, "the model's tokenizer has no chat template; use /v1/completions"),
        ("{{ messages }}", {"tools": [ADD]}, "no known format of tool calls"),
        ("{{ raise_exception('No system.') }}", {}, "the chat template refuses the messages: No system."),
    ):
        changed = deepcopy(tokenizer)
        changed.chat_template = template
        writer = PromptWriter(changed, stop_token_ids=[changed.eos_token_id], memory=None)
        with TestClient(make_app(engine, changed, writer, token=None)) as client:
            assert message in refused(client.post(CHAT, json={"messages": ASKED, **fields}))["message"]


def test_a_bug_is_an_error_without_its_details(engine: Any, tokenizer: Any, writer: Any) -> None:
    writer.write_chat = None
    app = make_app(engine, tokenizer, writer, token=None)
    with TestClient(app, raise_server_exceptions=False) as client:
        error = refused(client.post(CHAT, json={"messages": ASKED}), 500)
    assert error["message"] == "internal error; the server's log has the details"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3)
    | st.sampled_from([2**70, "user", "assistant", "tool", "text", "function", "\udfff"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "x"]),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_body_is_answered_or_refused(web: TestClient, kind: Any, data: Any) -> None:
    names = st.sampled_from(sorted({*kind.model_fields, "echo", "logit_bias"} - {"model", "n"}))
    fields = data.draw(st.dictionaries(names, VALUES, max_size=4))
    base = {"messages": ASKED} if kind is ChatBody else {"prompt": "a"}
    answer = web.post(CHAT if kind is ChatBody else TEXT, content=json.dumps({**base, **fields}))
    if answer.status_code != 200:
        assert refused(answer)["message"]
