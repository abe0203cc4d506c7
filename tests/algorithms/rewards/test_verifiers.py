"""Verifiers beside tables made by hand."""

import threading
from typing import Any

import pytest
from reward_functions import load_method, make_input, scores_of

from realrl.algorithms.rewards.verifiers.numeric import find_number
from realrl.algorithms.rewards.verifiers.verifier import extract
from realrl.config.errors import UserCodeError, UserError


def verify(term: dict[str, Any], completion: str, **fields: Any) -> float:
    given = {name: [value] for name, value in fields.items()}
    (score,) = scores_of(load_method({"verifier": term}), make_input([completion], **given))
    return score


EXACT = [
    ({}, "Lima", "Lima", 1),
    ({}, " Lima\n", "Lima", 1),
    ({"strip": False}, " Lima", "Lima", 0),
    ({}, "lima", "Lima", 0),
    ({"ignore_case": True}, "STRASSE", "Straße", 1),
    ({}, "The answer is Lima", "Lima", 0),
    ({"extract": "answer is (.+)"}, "The answer is Lima", "Lima", 1),
    ({"extract": r"#### (\S+)"}, "#### 3 no, #### 4", "4", 1),
    ({"extract": r"#### (\S+)"}, "so it is 4", "4", 0),
    ({"extract": r"#### (\S+)"}, "#### 4", "2 + 2 = 4 #### 4", 1),
    ({"extract": "boxed"}, r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    ({"extract": "boxed"}, r"\boxed{1} or \boxed{2", "1", 1),
    ({"extract": "boxed"}, "1", "1", 0),
    ({}, "4", 4, 1),
    ({}, "", "x", 0),
]


@pytest.mark.parametrize(("options", "completion", "answer", "score"), EXACT)
def test_exact_match(options: dict[str, Any], completion: str, answer: Any, score: int) -> None:
    assert verify({"kind": "exact_match", **options}, completion, answer=answer) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42), ("x = -3", -3), ("5-3", 3), ("3 - 5", 5), ("−7", -7), ("1,234,567.5", 1234567.5), ("1,2", 2),
        ("1,23", 23), ("2.5e-3", 0.0025), ("2.5E3", 2500), (".5", 0.5), ("7.", 7), ("3/4", 0.75), ("-3 / 4", -0.75),
        ("1/0", None), ("$12.50", 12.5), (r"\$1,000", 1000), ("12%", 12), ("no number", None), ("", None),
        ("1 or 2", 2), ("x1", None), ("1e999", None), ("1e99999999999", None), ("1e-99999999999", 0),
        (r"-\frac{1}{2}", -0.5), (r"$-\frac12$", -0.5), (r"\dfrac{-3}{4}", -0.75), (r"\tfrac 3 4", 0.75),
        (r"\boxed{-\frac{1}{2}}", -0.5), (r"\cfrac{1}{-2}", -0.5), (r"-\frac{-1}{2}", 0.5), (r"2\frac{1}{2}", 2.5),
        (r"-1\frac12", -1.5), (r"5-\frac{1}{2}", 0.5), (r"x\frac{1}{2}", 0.5), (r"\frac{1,000}{2.5}", 400),
        (r"\frac{a}{2}", None), (r"\frac{\sqrt{3}}{2}", None), (r"\frac\pi2", None), (r"\frac{1}{0}", None),
        (r"\frac{1}{", None), (r"\frac{1", None), (r"3 or \frac{1}{x}", None), (r"\frac{a}{2} = 7", 7),
        (r"\sqrt{3}", None), (r"2\sqrt[3]{5}", None), (r"1{,}234", 1234), (r"12\%", 12), ("-{3}", -3),
        ("- 3", -3), ("- {3}", -3), ("x = - 3", -3), ("The answer is - 3", -3), ("$- 3$", -3), (r"\boxed{- 3}", -3),
        ("so\n- 3", 3), ("x - 3", 3), ("= +7", 7), ("+ 7", 7), ("\u20107", -7), ("\u20117", -7), ("\u20127", -7),
        ("\u20137", -7), ("\ufe637", -7), ("\uff0d7", -7), ("3\u20135", 5), ("Lima \u2014 3", 3),
        ("v1.2.3", None), ("9" * 500, None), (rf"\frac{{{'9' * 5000}}}{{2}}", None),
        (rf"{'9' * 5000}\frac{{1}}{{2}}", None),
        (r"The speed is 20\frac{km}{h}", 20), (r"20~\frac{km}{h}", 20), (r"9.8\frac{\text{m}}{\text{s}^2}", 9.8),
        (r"-20\,\frac{m}{s^{2}}", -20), (r"step 2: x=\frac{a}{b}", None), (r"5\frac{a}{2}", None),
        (r"5\sqrt{x}", None), (r"7\frac{N \cdot m}{s}", 7), (rf"2\frac{{{'a' * 300}!}}{{b}}", None),
        ("3\n\n\\frac{1}{2}", 0.5), (r"3\,\frac{1}{2}", 3.5), (r"1,234\frac{1}{2}", 1234.5),
        ("+8", 8), ("(9)", 9), ("answer: 10.", 10), ("0x1F", 0),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert find_number(text) == number


@pytest.mark.parametrize(
    "piece", ["\\frac", "\\frac{", "\\frac{1}{", "\\frac1", "- ", "-{", "\\sqrt[", "{{", "1/", "\n" * 200]
)
def test_long_texts_that_lead_nowhere_are_read(piece: str) -> None:
    for end in ("", "}}", "}7"):
        assert find_number(piece * 2000 + end) in (None, 7, 1)


def test_percentages_can_be_fractions() -> None:
    assert find_number("12.5 %", "fraction") == 0.125


@pytest.mark.parametrize(
    ("options", "completion", "answer", "score"),
    [
        ({}, "It is 1,000.", "1000", 1),
        ({}, "It is 1001", 1000, 0),
        ({"abs_tolerance": 1.0}, "It is 1001", 1000, 1),
        ({"rel_tolerance": 0.01}, "991", -1000, 0),
        ({"rel_tolerance": 0.01}, "-991", -1000, 1),
        ({}, "0.333333333333", "1/3", 1),
        ({}, "nothing", 0, 0),
        ({}, "NaN", "3", 0),
        ({"extract": "boxed"}, r"\boxed{3} of 4", 3, 1),
        ({"extract": "boxed"}, r"\boxed{-\frac{1}{2}}", -0.5, 1),
        ({}, r"\frac{1}{2}", r"-\frac{1}{2}", 0),
        ({}, "2", r"\frac{1}{2}", 0),
    ],
)
def test_numeric(options: dict[str, Any], completion: str, answer: Any, score: int) -> None:
    assert verify({"kind": "numeric", **options}, completion, answer=answer) == score


def test_an_answer_that_cannot_be_compared_is_a_failure_and_not_a_wrong_completion() -> None:
    for answer in ("Lima", [1], True):
        with pytest.raises(UserCodeError, match=r"^reward \(verifier numeric\) .*; record data.jsonl:10$"):
            verify({"kind": "numeric"}, "3", answer=answer)


def test_a_record_without_answer_is_left_out() -> None:
    assert verify({"kind": "numeric"}, "3", answer=None) != verify({"kind": "numeric"}, "3", answer=None)


@pytest.mark.parametrize(
    ("options", "completion", "score"),
    [
        ({"pattern": "b+"}, "abbc", 1),
        ({"pattern": "b+", "whole": True}, "abbc", 0),
        ({"pattern": "<think>.*</think>.+", "whole": True}, "<think>a\nb</think>c", 1),
        ({"pattern": "(?i)YES"}, "yes", 1),
        ({"pattern": "^x"}, "yx", 0),
    ],
)
def test_regex(options: dict[str, Any], completion: str, score: int) -> None:
    assert verify({"kind": "regex", **options}, completion) == score


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "completion", "score"),
    [
        ({}, '{"name": "Ana", "age": 3}', 1),
        ({}, '{"name": "Ana", "age": -3}', 0),
        ({}, '{"age": 3}', 0),
        ({}, '{"name": "Ana"} and more', 0),
        ({}, '{"name": "Ana", "name": "Bo"}', 0),
        ({}, '{"name": "Ana", "age": NaN}', 0),
        ({}, "[" * 100_000, 0),
        ({}, "", 0),
        ({"extract": "```json\n([^`]*)```"}, 'Here:\n```json\n{"name": "Ana"}\n```', 1),
        ({"extract": "```json\n([^`]*)```"}, '{"name": "Ana"}', 0),
    ],
)
def test_json_schema(options: dict[str, Any], completion: str, score: int) -> None:
    pytest.importorskip("jsonschema")
    assert verify({"kind": "json_schema", "json_schema": SCHEMA, **options}, completion) == score


def test_a_schema_that_is_none_is_refused() -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(
        UserError, match=r"^verifier json_schema: this is not a schema: 'strnig' is not valid"
    ):
        load_method({"verifier": {"kind": "json_schema", "json_schema": {"type": "strnig"}}})


MATH = [
    ("", "1/2", "0.5", 1), ("", r"so $\frac{1}{2}$", "1/2", 1), ("", r"\boxed{x^2+1}", "1 + x^2", 1),
    ("", "The answer is 3", "4", 0), ("", "1,234", "1234", 1), ("boxed", r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    ("boxed", r"\boxed{(1,2)}", "(1, 2)", 1), ("boxed", r"\boxed{\{1,2\}}", r"\{2,1\}", 1), ("boxed", "3", "3", 0),
    ("boxed", r"\boxed{x=5}", "5", 1), ("", "", "3", 0), ("boxed", r"\boxed{}", "3", 0),
    ("boxed", r"\boxed{-\frac{3}{4}}", "-0.75", 1), ("boxed", r"\boxed{[0,1)}", "[0, 1)", 1),
    ("", "+7", "7", 1), ("", "The answer is +7", "7", 1), ("", "7", "+7", 1), ("", "- 3", "-3", 1),
    ("", "- 3", "3", 0),
    ("", "-{3}", "-3", 1), ("", "–3", "-3", 1), ("", "$−3$", "-3", 1), ("", "-3", "－3", 1), ("", "‐3", "-3", 1),
    ("", r"$-\frac12$", "-0.5", 1), ("boxed", r"\boxed{+7}", "7", 1),
    ("boxed", r"\boxed{-\dfrac{1}{2}}", "-1/2", 1),
    ("boxed", r"\boxed{‑\frac{1}{2}}", "-0.5", 1), ("boxed", r"\boxed{\frac12}", "-0.5", 0),
    ("boxed", r"\boxed{[0,1]}", "[0, 1)", 0), ("boxed", r"\boxed{2\pi}", r"2 \cdot \pi", 1),
]  # fmt: skip


def test_mathematical_equality_also_outside_the_main_thread() -> None:
    pytest.importorskip("math_verify")
    found: dict[str, list[float]] = {}

    def compare() -> None:
        for kind in ("", "boxed"):
            rows = [row for row in MATH if row[0] == kind]
            term = {"kind": "math"} | ({"extract": kind} if kind else {})
            inputs = make_input([row[1] for row in rows], answer=[row[2] for row in rows])
            found[kind] = scores_of(load_method({"verifier": term}), inputs)

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    for kind, scores in found.items():
        rows = [row for row in MATH if row[0] == kind]
        assert [row for row, score in zip(rows, scores, strict=True) if score != row[3]] == []
    assert set(found) == {"", "boxed"}


def test_expressions_that_take_for_ever_are_not_equal() -> None:
    pytest.importorskip("math_verify")
    assert verify({"kind": "math", "seconds": 1.0}, "$9^{9^{9^{9}}}$", answer="9") == 0
    with pytest.raises(UserCodeError, match="finds no expression in answer=''"):
        verify({"kind": "math"}, "3", answer="")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.algorithms.rewards.verifiers.verifier.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^verifier math needs math-verify, which is not installed; run pip install"
    ):
        load_method({"verifier": {"kind": "math"}})


def test_the_last_closed_box_counts() -> None:
    assert extract(r"\boxed{a{b}c} \boxed{d", "boxed") == "a{b}c"
    assert extract(r"\boxed{\boxed{x}}", "boxed") == "x"
