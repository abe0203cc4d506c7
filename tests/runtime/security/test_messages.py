"""Messages between ranks bring plain values and records, and never run what they name."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from realrl.config.errors import RunError, UserCodeError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.runtime.measure.step_timer import StepTimes, TimedSpan
from realrl.runtime.processes.messages import pack, unpack


class Harmful:
    """Makes a file when it is read from a pickle."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, 2.5, None, True), "b": [{3, 4}, b"x", "y"]},
        Plan(Cluster(1, 2), {"actor.train": Placement(Mesh(0, 2), Strategy(dp=2))}, ("ref",), ()),
        [StepTimes(0.0, 1.0, (TimedSpan("actor.train", 0.0, 1.0, 5),))],
    ],
)
def test_plain_values_and_records_arrive_as_they_were(value: object) -> None:
    assert unpack(pack(value)) == value


def test_errors_arrive_with_all_they_say() -> None:
    error = unpack(pack(UserCodeError("reward raised", "Traceback", alone=True)))
    assert (str(error), error.trace, error.alone) == ("reward raised", "Traceback", True)
    assert str(unpack(pack(RunError("disk full")))) == "disk full"


def test_a_message_that_would_run_code_is_refused(tmp_path: Path) -> None:
    harmful = pack(Harmful(tmp_path / "made"))
    with pytest.raises(pickle.UnpicklingError, match=r"mkdir may not be in a message between ranks"):
        unpack(harmful)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("realrl.config.user_code", "UserCode"),
        ("realrl.runtime.processes.messages", "pickle.loads"),
        ("realrl.runtime.processes.environment", "leave"),
        ("realrl.cli.app", "run_app"),
    ],
)
def test_functions_and_other_classes_are_refused(module: str, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="may not be in a message between ranks"):
        unpack(f"c{module}\n{name}\n.".encode())
