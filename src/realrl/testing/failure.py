"""Failure of a check."""


class CheckFailure(AssertionError):
    """A check that an algorithm fails; its text says which plan and which metric, with both values."""
