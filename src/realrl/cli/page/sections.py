"""Sections of a plan's page besides the picture of the step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.cli.page.text import (
    format_count,
    format_dtype,
    format_parameters,
    format_seconds,
    format_share,
    format_span,
    name_model,
)
from realrl.cli.page.tips import find_role_class, make_tip
from realrl.config.values import format_bytes
from realrl.planner.report.shortage_text import describe_misfit
from realrl.planner.simulate.estimate import LEVEL

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

TERMS: Mapping[str, str] = {
    "compute": "arithmetic of the model",
    "decode": "generation token by token, bound by memory bandwidth",
    "optimizer": "update of the parameters",
    "tensor": "communication between tensor-parallel devices that nothing hides",
    "data": "communication between data-parallel devices that nothing hides",
    "pipeline": "messages between pipeline stages",
    "bubble": "pipeline stages that wait for others",
    "launch": "devices that wait for their host",
    "function": "functions on hosts, beside what devices do",
    "reallocation": "parameters on their way from layout to layout",
    "offload": "copies from and to host memory",
    "exchange": "what calls hand to each other",
    "idle": "devices that have nothing to do, or wait for others",
}
"""Term of the cost model -> meaning, in the order they are drawn."""


_LETTER = 0.0085
"""Width of a letter, as a fraction of a bar."""
_VISIBLE = 1e-3
"""Fraction of the step's device time; smaller parts, outside calls, have no bar of their own."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    percent: float
    look: str
    tip: str
    label: str = ""
    """Label; empty where there is no room."""


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    name: str
    segments: tuple[Segment, ...]
    value: str
    call: str = ""
    """Call that it is about; empty for none."""


@dataclass(frozen=True)
class Figure:
    """A number that sums up the plan."""

    name: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True)
class ModelEntry:
    """A model and the roles that have it."""

    roles: tuple[tuple[str, str], ...]
    """(name, CSS class) of each role."""
    name: str
    detail: str


def write_verdict(report: "PlanReport") -> str:
    """Sum up the plan in one sentence."""
    if not report.chosen.fits:
        return f"This plan does not fit: {describe_misfit(report.chosen)}."
    proof = "optimal" if report.gap <= 5e-4 else f"within {format_share(report.gap)} of the optimum"
    best = find_best_preset(report)
    if not report.presets:
        return f"One step takes {format_seconds(report.chosen.step_seconds)}, which is proven to be {proof}."
    if best is None:
        return f"No preset runs on these devices; this plan does, and is proven to be {proof}."
    name, seconds = best
    ratio = seconds / report.chosen.step_seconds
    if ratio < 1.005:
        return f"As fast as {name}, the best preset, and proven to be {proof}."
    faster = f"{ratio:.1f} × as fast as" if ratio >= 1.95 else f"{format_share(ratio - 1)} faster than"
    return f"{faster} {name}, the best preset that fits, and proven to be {proof}."


def find_best_preset(report: "PlanReport") -> tuple[str, float] | None:
    """Find the name and seconds of the fastest preset that fits."""
    fitting = {
        name: preset.estimate.step_seconds
        for name, preset in report.presets.items()
        if preset.estimate is not None and preset.estimate.fits
    }
    return min(fitting.items(), key=lambda item: item[1], default=None)


def list_figures(report: "PlanReport") -> list[Figure]:
    """List the figures below the headline."""
    estimate = report.chosen
    value, unit = format_seconds(estimate.step_seconds).split()
    again = f"{format_seconds(estimate.repeated_seconds)} in a row of steps"
    differs = estimate.repeated_seconds < 0.995 * estimate.step_seconds
    span = f"{format_share(LEVEL)}: {format_span(report.outlook.interval)}"
    fullest = estimate.peak_device
    bound = format_seconds(report.lower_bound_seconds)
    size, size_unit = format_bytes(estimate.peak_bytes).split()
    rate = format_count(estimate.tokens_per_second)
    tokens = f"{estimate.tokens:,.0f} tokens a step"
    return [
        Figure("Step", value, unit, f"{span}; {again}" if differs else span),
        Figure("Throughput", rate, "tokens/s", tokens),
        Figure("Proven gap", *_percent(report.gap), f"no plan takes less than {bound}"),
        Figure("Utilisation", *_percent(estimate.utilisation), "of device time at work"),
        Figure("MFU", *_percent(estimate.mfu), "of peak arithmetic"),
        Figure(
            "Fullest device", size, size_unit, f"of {format_bytes(fullest.capacity)}, {fullest.peak.during}"
        ),
    ]


def _percent(share: float) -> tuple[str, str]:
    value, unit = format_share(share).split()
    return value, unit


def list_models(report: "PlanReport") -> list[ModelEntry]:
    """List each model once, with the roles that have it."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for role, model in report.scenario.models.items():
        detail = f"{format_parameters(model)} · {format_dtype(model)}"
        found.setdefault((name_model(model), detail), []).append((role, find_role_class(report, role)))
    return [ModelEntry(tuple(roles), *key) for key, roles in found.items()]


def make_time_bars(report: "PlanReport") -> list[Bar]:
    """Make bars of device-seconds: the whole step, then its parts, all on one scale."""
    estimate = report.chosen
    whole = estimate.step_seconds * len(estimate.slices)
    parts: dict[str, dict[str, float]] = {}
    for name, call in estimate.calls.items():
        if call.call.is_function:  # takes no device's time
            continue
        parts[name] = {term: seconds * call.placement.mesh.size for term, seconds in call.terms.items()}
    for term in ("reallocation", "offload", "exchange", "idle"):
        if estimate.terms[term] > _VISIBLE * whole:
            parts[term] = {term: estimate.terms[term]}
    longest = max(sum(terms.values()) for terms in parts.values())
    bars = [Bar("whole step", _segments("all devices", estimate.terms, whole, whole, labelled=True), "100 %")]
    for name, terms in parts.items():
        segments = _segments(name, terms, longest, whole, labelled=False)
        share = format_share(sum(terms.values()) / whole)
        bars.append(Bar(name, segments, share, name if name in estimate.calls else ""))
    return bars


def _segments(
    name: str, terms: Mapping[str, float], longest: float, whole: float, *, labelled: bool
) -> tuple[Segment, ...]:
    """Divide a bar of `longest` device-seconds; only the bar of the whole step has room for labels."""
    found = []
    for term in sort_terms(terms):
        share = format_share(terms[term] / whole)
        label = f"{term} {share}"
        fits = labelled and terms[term] / whole > len(label) * _LETTER
        facts = [
            ("device time", f"{format_count(terms[term])} device-seconds"),
            ("of the step", share),
            ("is", TERMS.get(term, "")),
        ]
        percent = 100 * terms[term] / longest
        found.append(
            Segment(percent, f"term {term}", make_tip(f"{name}: {term}", facts), label if fits else "")
        )
    return tuple(found)


def sort_terms(terms: Mapping[str, float]) -> list[str]:
    """Sort the terms that take any time, in the order of `TERMS`."""
    used = [term for term, seconds in terms.items() if seconds > 0]
    return sorted(used, key=lambda term: list(TERMS).index(term) if term in TERMS else len(TERMS))


def list_terms(report: "PlanReport") -> list[tuple[str, str]]:
    """List the terms that take any time, with their meaning."""
    return [(term, TERMS.get(term, "")) for term in sort_terms(report.chosen.terms)]
