"""Process that compares expressions. It runs as a script, and imports nothing from this package.

It writes a line after it has imported math-verify, and then answers each line of JSON with a line of JSON.
"""

import json
import logging
import sys
from typing import Any


def _parse(text: str, *, extracted: bool, seconds: int) -> Any:
    """Read the expressions of a text. The list is empty if there are none."""
    from math_verify import parse

    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    # From plain text such as x^2 + 1, the library would take only the last number, 1.
    found = parse(f"${text}$", parsing_timeout=seconds) if extracted and not marked else []
    return found or parse(text, parsing_timeout=seconds)


def _compare(question: dict[str, Any]) -> bool | None:
    from math_verify import verify

    seconds = max(1, round(question["seconds"]))
    right = _parse(question["right"], extracted=True, seconds=seconds)
    if not right:
        return None
    found = _parse(question["text"], extracted=question["extracted"], seconds=seconds)
    return bool(found) and bool(verify(right, found, timeout_seconds=seconds))


def answer_questions() -> None:
    logging.disable()
    sys.set_int_max_str_digits(0)
    answers, sys.stdout = sys.stdout, sys.stderr
    import math_verify

    print(json.dumps(math_verify.__file__), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_compare(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    answer_questions()
