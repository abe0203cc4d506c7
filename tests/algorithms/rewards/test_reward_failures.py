"""What reward functions do wrong: the message, or the samples that are skipped."""

import math
import time
from pathlib import Path

import pytest
import torch
from reward_functions import load_method, make_input, scores_of, write_function

from realrl.algorithms.base.scoring import MOST_ABANDONED
from realrl.algorithms.rewards.config import RewardTerm
from realrl.algorithms.rewards.reward_methods import RewardSum
from realrl.config.errors import UserCodeError
from realrl.data.batch import Ragged

INPUT = make_input(["a", "b", "x", "d"], samples=2, first=4)

RAISES_AT_X = """
def score(completions):
    return [1 / ("x" != text) for text in completions]
"""
FAILURES = {
    RAISES_AT_X: "raised ZeroDivisionError: division by zero (FILE:3); record data.jsonl:13, sample 1 of 2",
    """
async def score(completions):
    return [1 / ("x" != text) for text in completions]
""": "raised ZeroDivisionError: division by zero (FILE:3); record data.jsonl:13, sample 1 of 2",
    """
def score(completions):
    return [float("nan") if text == "b" else 0 for text in completions]
""": "gave nan for a completion; it must give one number for each of 4 completions; record data.jsonl:12,"
    " sample 2 of 2",
    """
def score(completions):
    return [10**400 if text == "b" else 0 for text in completions]
""": "gave 1000000000000000000000000000000000000000... for a completion; it must give one number for each of 4"
    " completions; record data.jsonl:12, sample 2 of 2",
    """
def score(completions):
    return [1e39] * 4
""": "gave 1e+39, which is too large for float32; record data.jsonl:12, sample 1 of 2",
    """
def score(completions):
    return completions[1:]
""": "gave 3 numbers for 4 completions; it must give one each",
    """
def score(completions):
    if len(completions) > 1:
        raise RuntimeError("too many")
    return [0.0]
""": "raised RuntimeError: too many (FILE:4)",
    """
def score(completions):
    while True:
        yield 1.0
""": "gave more than 4 numbers for 4 completions; it must give one each",
    """
class Odd(Exception):
    def __str__(self):
        raise self
def score(completions):
    raise Odd
""": "raised Odd (FILE:6); record data.jsonl:12, sample 1 of 2",
    """
class Odd:
    def __float__(self):
        raise Exception
    def __repr__(self):
        raise Exception
def score(completions):
    return [Odd() for _ in completions]
""": "gave a Odd for a completion; it must give one number for each of 4 completions; record data.jsonl:12, sample"
    " 1 of 2",
}  # fmt: skip


@pytest.mark.parametrize("code", FAILURES)
def test_a_failure_is_said_with_function_record_and_sample(tmp_path: Path, code: str) -> None:
    reference = write_function(tmp_path, code)
    with pytest.raises(UserCodeError) as raised:
        load_method({"function": reference}).call(INPUT)
    expected = FAILURES[code].replace("FILE", reference.removesuffix(":score"))
    assert str(raised.value) == f"reward={reference} {expected}"
    assert ("raised" in expected) == ("Traceback" in raised.value.trace)


def test_a_skipped_sample_has_no_score_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_function(tmp_path, RAISES_AT_X)
    method = load_method({"function": reference, "on_error": "skip"})
    for _ in range(2):
        outputs, metrics = method.call(INPUT)
        scores = outputs["score"].values.tolist()
        assert [math.isnan(score) for score in scores] == [False, False, True, False]
        assert [score for score in scores if not math.isnan(score)] == [1.0] * 3
        assert metrics.result()["skipped"] == 0.25
    notes = capsys.readouterr().err.splitlines()
    assert (
        len(notes) == 1 and "ZeroDivisionError" in notes[0] and "record data.jsonl:13, sample 1" in notes[0]
    )


def test_none_means_that_a_reward_does_not_apply(tmp_path: Path) -> None:
    code = "def score(completions):\n    return [None if text == 'x' else 2 for text in completions]\n"
    reference = write_function(tmp_path, code)
    alone, term = load_method({"function": reference}), load_method({"function": reference}, in_mixture=True)
    assert math.isnan(scores_of(alone, INPUT)[2])
    assert scores_of(term, INPUT) == [2, 2, -math.inf, 2]
    assert alone.call(INPUT)[1].result()["not_applicable"] == 0.25
    assert alone.call(INPUT)[1].result()["skipped"] == 0


HANGS = """
import time
def score(completions):
    while "x" in completions:
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


def test_a_function_that_hangs_is_given_up_at_its_time_limit(tmp_path: Path) -> None:
    reference = write_function(tmp_path, HANGS)
    started = time.monotonic()
    with pytest.raises(UserCodeError) as raised:
        load_method({"function": reference, "timeout": 0.2}).call(INPUT)
    assert str(raised.value) == (
        f"reward={reference} did not give the scores of 4 completions within 0.2 s (timeout); record data.jsonl:12,"
        " sample 1 of 2"
    )
    assert time.monotonic() - started < 30


def test_a_function_that_hangs_again_and_again_ends_a_run_that_skips(tmp_path: Path) -> None:
    reference = write_function(tmp_path, HANGS)
    method = load_method({"function": reference, "timeout": 0.02, "on_error": "skip"})
    for _ in range(MOST_ABANDONED - 1):
        assert all(map(math.isnan, scores_of(method, INPUT)))
    assert scores_of(method, make_input(["a"])) == [1.0]
    with pytest.raises(UserCodeError, match="too many of its calls are still running"):
        method.call(INPUT)


def mixed(
    a: list[float], b: list[float], weights: tuple[float, float] = (2.0, 1.0), **second: str
) -> list[float]:
    terms = {
        "a": RewardTerm.model_construct(function="f.py:f", weight=weights[0]),
        "b": RewardTerm.model_construct(**{"function": "g.py:g", **second}, weight=weights[1]),
    }
    batch = make_input(["a"] * len(a)).batch.with_fields(
        score_a=Ragged.scalars(torch.tensor(a)), score_b=Ragged.scalars(torch.tensor(b))
    )
    inputs = make_input(["a"] * len(a))
    summed, _ = RewardSum(terms).call(type(inputs)(batch, {}, None))
    return summed["score"].values.tolist()


def test_a_mixture_adds_weighted_terms_and_leaves_out_those_that_do_not_apply() -> None:
    nan, none = math.nan, -math.inf
    total = mixed([1.0, none, nan, none, 1.0], [0.5, 0.5, 0.5, none, nan])
    assert total[:2] == [2.5, 0.5] and all(map(math.isnan, total[2:]))
    assert mixed([nan, none], [1.0, 2.0], (0.0, 1.0)) == [1.0, 2.0]


def test_a_reward_model_that_is_not_finite_is_no_skipped_sample() -> None:
    for broken in (math.nan, math.inf, -math.inf):
        assert mixed([1.0], [broken], function=None, model="reward") == [math.inf]
