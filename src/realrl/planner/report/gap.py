"""Optimality gap in words."""

import math

_BEST = "proven to be the best by these times"


def format_gap(gap: float) -> str:
    """Format a percentage, rounded up, so that it claims no more than is proven."""
    return f"{math.ceil(1000 * gap) / 10:.1f} %"


def describe_gap(gap: float) -> str:
    """Say how near to the best a plan is proven to be: `proven within 0.4 % of the best by these times`.

    That is a proof inside the planner's model of time, which measured times may contradict.
    """
    return f"proven within {format_gap(gap)} of the best by these times" if gap > 1e-9 else _BEST
