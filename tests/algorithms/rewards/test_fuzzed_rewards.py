"""Two hundred random reward functions: each gives scores, or one message that names it; none hangs."""

import random
from pathlib import Path

import pytest
from reward_functions import load_method, make_input, write_function

from realrl.config.errors import UserError

VALUES = [
    "1.0", "0", "True", "-3", "0.5", "len(completions[0])", "7", "-0.0", "1e-9", "1e300", "10**400", "None",
    "float('nan')", "float('inf')", "'1.0'", "b'1'", "[1]", "{}", "1j", "object()", "Odd()",
    "len(completions)", "np.float32(2)", "np.nan", "np.array([1.0])", "torch.tensor(1.0)",
    "torch.tensor([1.0, 2.0])", "torch.tensor(1.0, requires_grad=True)", "Decimal('NaN')", "Fraction(1, 3)",
    "...",
]  # fmt: skip
RESULTS = [
    "[V for _ in completions]", "[V] * (len(completions) + K)", "(V for _ in completions)", "{V}",
    "{'a': V}", "{0: V, 1: V}", "V", "iter([V, W])", "tuple(V if K else W for _ in completions)",
    "itertools.repeat(V)", "np.full(len(completions), 0.5)", "torch.zeros(len(completions), 2)",
    "torch.ones(len(completions))", "Odd()", "map(lambda _: V, completions)", "range(len(completions))",
    "''", "'ab'", "zip(completions, completions)",
]  # fmt: skip
ACTIONS = [
    "pass", "raise ValueError('no')", "raise SystemExit(3)", "raise KeyboardInterrupt", "raise Odd.Error",
    "raise StopIteration", "raise MemoryError", "completions.clear()", "completions.append('more')",
    "1 / 0", "sys.exit()", "raise BaseException('odd')", "score(completions)", "time.sleep(2)",
    "[time.sleep(0.001) for _ in range(2000)]", "del completions[0]",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')", "raise GeneratorExit",
    "raise asyncio.CancelledError", "raise ExceptionGroup('several', [ValueError(1)])", "print('noise')",
    "kwargs['nothing']", "torch.set_grad_enabled(True)",
]  # fmt: skip
HEADER = """
import asyncio, itertools, sys, time
from decimal import Decimal
from fractions import Fraction
import numpy as np
import torch

class Odd:
    class Error(Exception):
        def __str__(self): raise ValueError
    def __float__(self): raise OSError("odd")
    def __repr__(self): raise OSError("odd")
    def __iter__(self): raise OSError("odd")
    def __len__(self): return -1

"""


def random_function(seed: int) -> str:
    pick = random.Random(seed)
    value, other, count = pick.choice(VALUES), pick.choice(VALUES), pick.choice([-1, 0, 0, 1])
    result = pick.choice(RESULTS).replace("V", value).replace("W", other).replace("K", str(count))
    action = pick.choice(["pass"] * len(ACTIONS) + ACTIONS)
    condition = pick.choice(["True", "'x' in completions", "len(completions) > 1"])
    kind = pick.choice(["def", "def", "async def"])
    last = pick.choice(["return", "return", "return", "yield"])
    parameters = pick.choice(["completions, **kwargs", "*, completions, prompts=None, **kwargs"])
    return (
        f"{HEADER}{kind} score({parameters}):\n    if {condition}:\n        {action}\n    {last} {result}\n"
    )


@pytest.mark.parametrize("part", range(4))
def test_fuzzed_functions_give_scores_or_a_message_that_names_them(tmp_path: Path, part: int) -> None:
    inputs = make_input(["a", "x", "c"])
    scored = 0
    for seed in range(50 * part, 50 * (part + 1)):
        code = random_function(seed)
        term = {"function": write_function(tmp_path, code), "timeout": 0.3}
        for on_error in ("fail", "skip"):
            try:
                outputs, metrics = load_method({**term, "on_error": on_error}).call(inputs)
            except UserError as error:
                assert on_error == "fail" or "async generator" in str(error), code
                assert str(error).startswith(f"reward={term['function']} "), code
                assert "\n" not in str(error)
            else:
                score = outputs["score"].values
                assert len(score) == 3 and not score.isinf().any(), code
                assert on_error == "skip" or metrics.result()["skipped"] == 0
                scored += on_error == "fail"
    assert scored
