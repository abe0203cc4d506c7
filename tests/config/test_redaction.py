"""Secrets are recognised by where they stand and by their form, and nothing else is taken for one."""

import pytest

from realrl.config.redaction import has_credentials, is_secret_name, redact, redact_code, redact_settings

ENVIRONMENT = {
    "WANDB_API_KEY": "abcdefgh-wandb",
    "HF_TOKEN": "from-the-hub",
    "DB_PASSWORD": "no",
    "AWS_SECRET_ACCESS_KEY": "/aws+secret/abc",
    "SSH_KEY": "/etc/passwd",
    "SIGNING_KEY": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n",
    "SECRET_FILE": "/run/secrets/all",
    "PWD": "/home/somebody",
    "TOKENIZERS_PARALLELISM": "falsefalse",
}
HIDDEN = {
    "cannot reach http://me:p@ss@host:80/score": "cannot reach http://<redacted>@host:80/score",
    "http://host/score?n=3&api_key=abc&key=d#x": "http://host/score?n=3&api_key=<redacted>&key=<redacted>#x",
    "value abcdefgh-wandb, from-the-hub": "value <redacted>, <redacted>",
    "Invalid header value b'Bearer abc12345xyz\\n'": "Invalid header value b'Bearer <redacted>\\n'",
    "{'api_key': 'abcdefgh', 'b': 2}": "{'api_key': '<redacted>', 'b': 2}",
    "Authorization: Basic dXNlcjp3b3Jk": "Authorization: Basic <redacted>",
    "{'Authorization': 'Token abcdefgh'}": "{'Authorization': 'Token <redacted>'}",
    "/aws+secret/abc, %2Faws%2Bsecret%2Fabc": "<redacted>, <redacted>",
    "read MIIEvQIBADANBgkqhkiG9w0B": "read <redacted>",
    "override reward.password=hunter": "override reward.password=<redacted>",
    f"401 for hf_{'a1' * 15}": "401 for <redacted>",
    "sk-proj-0123456789abcdef is wrong": "<redacted> is wrong",
}
LEFT = (
    "bearer authentication is wanted",
    "max_tokens=123456 tokenizer=/a/b/cdef eos_token='<|endoftext|>'",
    "data.token: unknown key; did you mean data.train?",
    "models.actor.path=runs/sft/final, no, falsefalse, /home/somebody",
    "answer_key=longer than this",
    "Authorization: basic",
    "/etc/passwd",
    "user@host and a@b",
    "https://huggingface.co/datasets/openai/gsm8k@main",
)


@pytest.mark.parametrize("text", HIDDEN)
def test_secrets_in_a_text_are_replaced(text: str) -> None:
    assert redact(text, ENVIRONMENT) == HIDDEN[text]


@pytest.mark.parametrize("text", LEFT)
def test_what_only_resembles_a_secret_is_left(text: str) -> None:
    assert redact(text, ENVIRONMENT) == text


def test_names_of_secrets_are_told_from_those_of_tokens_and_keys() -> None:
    secret = ("token", "HF_TOKEN", "accessToken", "api_key", "dbPassword", "AWS_SECRET_ACCESS_KEY", "APIKEY")
    open_ = ("eos_token", "max_tokens", "tokenizer", "key", "answer_key", "secret_file", "PWD", "url", "")
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, open_))


def test_source_code_keeps_its_meaning() -> None:
    code = "api_key = os.environ['SCORER_KEY']\ntoken = text.split()[0]\n"
    assert redact_code(code, {}) == code
    assert redact_code("API_KEY = 'abcdef'\nurl = 'http://u:p@host'", {}) == (
        "API_KEY = '<redacted>'\nurl = 'http://<redacted>@host'"
    )


def test_nested_settings_keep_their_order_and_the_names_of_variables() -> None:
    given = {
        "arguments": {"api_key": "abc", "list": ["http://u:p@host", 1], "max_tokens": 7},
        "headers": {"Authorization": "SCORER_KEY"},
        "credentials": {"user": "me", "words": ["abc"], "pin": 123456},
        "password": 123456,
        "cost_per_token": 0.5,
        "end": None,
    }
    found = redact_settings(given, environment={})
    assert found == {
        "arguments": {"api_key": "<redacted>", "list": ["http://<redacted>@host", 1], "max_tokens": 7},
        "headers": {"Authorization": "SCORER_KEY"},
        "credentials": {"user": "<redacted>", "words": ["<redacted>"], "pin": "<redacted>"},
        "password": "<redacted>",
        "cost_per_token": 0.5,
        "end": None,
    }
    assert list(found) == list(given)


def test_addresses_with_credentials_are_recognised() -> None:
    assert has_credentials("postgresql://me:word@db/mlflow") and has_credentials("https://h/?token=abc")
    assert not has_credentials("https://mlflow.example.com:5000/api")


def test_long_texts_take_no_longer_per_character() -> None:
    for text in ("a" * 300_000, "://" * 100_000, "?" * 300_000, "token=" * 50_000, "a_" * 150_000):
        redact(text, {})  # the limit of time of tests would end it
