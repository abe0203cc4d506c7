"""Removal of secrets from configs, logs, error messages and everything else that is written or shown."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

REDACTED = "<redacted>"
"""Replaces a secret."""

_LINE = 20
"""Minimum characters of a line of a secret with several lines. Such lines are also replaced on their own."""
_SHORT = 8
"""Minimum characters of an environment value that is replaced. Shorter values such as `1` occur everywhere."""


def _split(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SECRETS = _split("apikey authorization bearer credential credentials passphrase passwd password secret")
_KEYS = _split("access account api auth encryption license private secret signing ssh")
"""Words before `key` that make it secret."""
_TEXT_TOKENS = _split("begin bos class cls end eos image mask pad sep special start stop unk")
"""Words before `token` that make it a token of a vocabulary."""
_ABOUT = _split("dir directory endpoint env file name path uri url variable")
"""Last words of names that describe a secret but do not contain one."""
_QUERY = _split("auth code key sig signature")
"""Parameters of addresses that hold secrets, in addition to parameters with secret names."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_USER = re.compile(r"://[^/\s'\"<>]*@")
_PARAMETER = re.compile(r"([?&]([\w.~-]{1,64})=)[^&#\s'\"<>]+")
_BEARER = re.compile(r"(?i)\b(bearer\s{1,3})(?=\S{0,64}\d)[\w.~+/=-]{8,}")
_AUTHORIZATION = re.compile(
    r"(?i)\b(authorization['\"]?\s{0,2}[=:]\s{0,2}['\"]?(?:basic|bearer|digest|negotiate|token)\s{1,3})[^\s'\",]+"
)
_NAME = r"(?i:(?<![\w.-])([\w.-]{0,64}?(?:auth|bearer|credential|key|pass|secret|token)[\w-]{0,24}))"
_ASSIGNED = re.compile(rf"{_NAME}(['\"]?\s{{0,2}}[=:]\s{{0,2}})(['\"]?)([^\s'\",;&<>)\]}}]{{6,}})")
_QUOTED = re.compile(rf"{_NAME}(['\"]?\s{{0,2}}[=:]\s{{0,2}})(['\"])([^\s'\"<>]{{6,}})(?=['\"])")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]{0,40}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|dapi[0-9a-f]{32}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
"""Forms of keys of well-known services, and of JSON web tokens."""


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace secrets in a text by `<redacted>`.

    Secrets are: values of environment variables with secret names (WANDB_API_KEY, HF_TOKEN); users, passwords and
    key parameters in addresses; bearer tokens; keys in the form of well-known services; and text after a name such
    as `password=`.
    """
    text = redact_code(text, environment)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _ASSIGNED.sub(_replace_assigned, text)


def redact_code(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace secrets in source code, see `redact`. In assignments, only quoted text is replaced."""
    for secret in _list_values(tuple(environment.items())):
        text = text.replace(secret, REDACTED)
    text = _USER.sub(f"://{REDACTED}@", text)
    text = _PARAMETER.sub(_replace_parameter, text)
    text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    text = _KNOWN.sub(REDACTED, text)
    return _QUOTED.sub(_replace_assigned, text)


def redact_settings(settings: Any, name: str = "", environment: Mapping[str, str] = os.environ) -> Any:
    """Copy nested settings and replace secrets: the secrets of `redact`, and text under a secret name.

    `name` is the name of `settings`. Values of `headers` are names of environment variables, which are not secret.
    """
    again = partial(redact_settings, environment=environment)
    if isinstance(settings, str):
        return REDACTED if is_secret_name(name) else redact(settings, environment)
    if name == "headers" and isinstance(settings, Mapping):
        return {key: again(value) for key, value in settings.items()}
    if isinstance(settings, Mapping):
        within = is_secret_name(name)
        return {key: again(value, name if within else str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [again(value, name) for value in settings]
    # A number named `password` may be a secret, but a number named `cost_per_token` is not.
    number = isinstance(settings, int) and not isinstance(settings, bool)
    return REDACTED if number and _SECRETS & set(_words(name)) and is_secret_name(name) else settings


def is_secret_name(name: str) -> bool:
    """Return whether a name belongs to a secret: `api_key`, `HF_TOKEN`, `dbPassword`; not `eos_token`."""
    words = _words(name)
    if not words or words[-1] in _ABOUT:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _TEXT_TOKENS
    return bool(_SECRETS & set(words)) or (words[-1] == "key" and before in _KEYS)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def has_credentials(address: str) -> bool:
    """Return whether an address contains a user, a password or a key."""
    return redact(address, {}) != address


@lru_cache(maxsize=4)
def _list_values(environment: tuple[tuple[str, str], ...]) -> list[str]:
    """List the secrets in the environment, longest first, because one may contain another."""
    found = {
        value
        for name, value in environment
        if (is_secret_name(name) or name.upper().endswith("KEY"))
        and len(value) >= _SHORT
        # File names are not secrets, but secrets may also begin with a slash.
        and not (os.path.isabs(value) and os.path.exists(value))
    }
    stripped = {value.strip() for value in found}
    # Logs may contain a key of several lines line by line.
    lines = {line for value in stripped for line in value.splitlines() if len(line) >= _LINE}
    quoted = {quote(value, safe="") for value in stripped}
    return sorted(found | stripped | lines | quoted, key=len, reverse=True)


def _replace_assigned(found: re.Match[str]) -> str:
    name, between, quote, value = found.groups()
    # `token: unknown key` is prose.
    prose = between == ": " and not quote and len(value) < 20 and not re.search(r"\d", value)
    return found[0] if prose or not is_secret_name(name) else f"{name}{between}{quote}{REDACTED}"


def _replace_parameter(found: re.Match[str]) -> str:
    secret = found[2].lower() in _QUERY or is_secret_name(found[2])
    return f"{found[1]}{REDACTED}" if secret else found[0]
