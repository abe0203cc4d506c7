"""Checks of an algorithm of one's own, for use in tests: `check_algorithm`."""

from realrl.testing.check import check_algorithm
from realrl.testing.failure import CheckFailure

__all__ = ["CheckFailure", "check_algorithm"]
