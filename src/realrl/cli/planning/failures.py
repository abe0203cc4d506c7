"""Failures on the command line and in the output of `realrl plan`."""

import math
import re
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.page.text import format_count, format_seconds, format_share
from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.config.values import format_bytes
from realrl.planner.cluster.failures import Failures
from realrl.planner.report.report import describe_gap

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport
    from realrl.recipe.experiment import Experiment

FailuresPerDay = Annotated[
    str | None,
    typer.Option(
        metavar="N|N/1000",
        help="Failures a day that end the run: 3 on the whole cluster, or 0.47/1000 for each 1,000 devices, as the"
        " training of Llama 3 met them on 16,384 H100. Plans and clusters are then compared by the expected time of"
        " a step, with checkpoints, restarts and what is done again.",
    ),
]
RestartSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="From a failure until training goes on, where you know it; predicted if not given.",
    ),
]


def parse_failures(
    per_day: str | None, restart_seconds: float | None, devices: int, experiment: "Experiment"
) -> Failures | None:
    """Parse failures of a cluster of so many devices; None where none are given, UserError for anything else."""
    if per_day is None:
        if restart_seconds is not None:
            raise UserError("--restart-seconds counts where runs fail: give --failures-per-day, too")
        return None
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d*)?|\.\d+)\s*(/\s*1000)?\s*", per_day)
    if match is None or not float(match[1]):
        raise UserError(
            f"--failures-per-day: {brief(per_day)} is no number above 0; write 3 for the whole cluster, or"
            " 0.47/1000 for each 1,000 devices"
        )
    if restart_seconds is not None and not 0 <= restart_seconds < math.inf:
        raise UserError(f"--restart-seconds: {restart_seconds:g} must be at least 0")
    return Failures(
        per_device_day=float(match[1]) / (1000 if match[2] else devices),
        restart_seconds=restart_seconds,
        notice_seconds=experiment.launch.freeze_seconds,
        asynchronous=experiment.checkpoint.asynchronous,
    )


def describe_failures(report: "PlanReport") -> list[str]:
    """Describe in sentences what failures cost, and what to set; nothing where there are none."""
    found = report.goodput
    if found is None:
        return []
    days = 1 / found.failures_per_day
    each = f"{found.failures_per_day:,.3g} failures a day, one in "
    each += f"{24 * days:,.3g} hours" if days < 2 else f"{days:,.3g} days"
    if math.isinf(found.step_seconds):
        return [f"With {each}, no step ever ends: a restart takes {_format_long(found.of.restart)}."]
    parts = ", ".join(f"{name} {_format_long(seconds)}" for name, seconds in found.restart.items())
    start = found.start
    return [
        f"With {each}, a step takes {format_seconds(found.step_seconds)} as expected"
        f" ({describe_gap(report.expected_gap)}): {format_share(found.share)} of the time counts.",
        f"A checkpoint of {format_bytes(int(found.checkpoint_bytes))} is written in"
        f" {format_seconds(found.of.write)}; training waits {format_seconds(found.of.stop)} for it."
        f" checkpoint.every={found.every} is best, which is"
        f" {_format_long(found.every * found.undisturbed_seconds)}.",
        f"A restart takes {_format_long(found.of.restart)}: {parts}. Each rank has"
        f" {format_count(start.sockets)} sockets of gloo and {start.communicators} communicators of NCCL."
        " None of this was measured on many nodes.",
    ]


def _format_long(seconds: float) -> str:
    """Format seconds, or minutes where they are many."""
    return format_seconds(seconds) if seconds < 600 else f"{seconds / 60:,.3g} min"
