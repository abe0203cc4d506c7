"""Source of a call's predicted time, and the sizes of its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import hypot

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement
from realrl.planner.operators.tables import TABULATED, read_tables
from realrl.planner.profile.corrections import find_nearest
from realrl.planner.profile.profile import SweepSpread
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.spreads import FUNCTION, SPREADS, TABLES_OF_TERMS, Spread, TimeSource

_TRANSFERS = ("tensor", "data", "pipeline")
"""Terms of communication."""


@dataclass(frozen=True)
class CallErrors:
    """Source of a call's time, and the sizes of its errors."""

    source: TimeSource
    spread: Spread
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Error of terms in this call alone: that of the tables they come from."""


def find_call_errors(scenario: Scenario, call: Call, placement: Placement) -> CallErrors:
    """Find where the time of a call comes from, and how large its errors are."""
    device = scenario.spec.device(placement.mesh.first)
    profile = scenario.cost.profile
    profile = profile if profile is not None and profile.device == device.name else None
    model = scenario.model(call)
    if model is None:
        return CallErrors("run", FUNCTION)
    nearest = None
    if profile is not None:
        nearest = find_nearest(profile.corrections, call, model, placement.strategy)
        if nearest is not None and nearest.distance == 0:
            return CallErrors("run", SPREADS["run"])
    dtype = model.dtype_under(placement.strategy)
    if profile is not None and placement.strategy.tp in profile.degrees(model.shape, dtype):
        found = CallErrors("profile", widen(SPREADS["profile"], profile.sweeps))
    elif device.measured is not None and dtype == TABULATED:
        found = CallErrors("tables", SPREADS["tables"], read_residuals(device.measured))
    else:
        found = CallErrors("data sheet", SPREADS["data sheet"])
    if nearest is None:
        return found
    # What a run has shown of other strategies holds for the machine as a whole.
    return replace(found, spread=replace(found.spread, machine=SPREADS["run"].machine))


def widen(spread: Spread, sweeps: SweepSpread | None) -> Spread:
    """Add what sweeps of a profile differed by: so will runs."""
    if sweeps is None:
        return spread
    terms = {name: hypot(spread.term(name), sweeps.transfers) for name in _TRANSFERS}
    return replace(spread, machine=hypot(spread.machine, sweeps.layers), terms={**spread.terms, **terms})


@lru_cache
def read_residuals(tables: str) -> Mapping[str, float]:
    """Read the residuals of tables of operators on rows held out, by term."""
    spread = read_tables(tables)["spread"]
    return {term: float(spread[table]) for term, table in TABLES_OF_TERMS.items()}
