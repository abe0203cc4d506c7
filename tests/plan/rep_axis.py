"""An axis that `plan.axes` does not have: ranks along it hold and compute the same."""

from realrl.plan import axes
from realrl.plan.axes import Axis

REP = Axis("rep", "r", "replication", None, nesting=15)


def add_axis() -> None:
    """Give this process the axis."""
    axes.AXES = (*axes.AXES, REP)
