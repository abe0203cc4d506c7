"""Text of `realrl status`."""

import time
from collections.abc import Sequence

from realrl.cli.reporting.speed import describe_idle, describe_speed
from realrl.cli.reporting.status import LatestMetric, Rates, RunStatus, format_duration
from realrl.config.values import format_bytes
from realrl.runtime.supervision.heartbeat import Heartbeat

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_RANKS = 64
"""Ranks that are listed."""


def format_status(found: RunStatus) -> str:
    """Format the status of a run for a terminal."""
    rows = [
        ("run", " · ".join(filter(None, (found.run_dir, found.algorithm)))),
        ("state", _describe_state(found)),
        ("step", _describe_step(found)),
        ("step time", _describe_rates(found)),
        ("speed", " · ".join(describe_speed(found.speed))),
        ("end", _describe_end(found)),
        *_describe_metrics(found.metrics),
        ("learning", found.untaught),
        ("checkpoint", _describe_checkpoint(found)),
        ("restarts", str(found.restarts) if found.restarts else ""),
    ]
    lines = [f"{name:<11} {text}" for name, text in rows if text]
    if found.ranks:
        lines += ["", *_align(_list_ranks(found))]
    if len(found.ranks) > _MOST_RANKS:
        lines.append(f"... and {len(found.ranks) - _MOST_RANKS} more ranks")
    return "\n".join(map(make_printable, lines))


def make_printable(text: str) -> str:
    """Replace what would control a terminal; files of a run may hold anything."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _describe_state(found: RunStatus) -> str:
    # Messages about Ctrl-C begin with the state.
    if not found.reason or found.reason.startswith(f"{found.state} "):
        return found.reason or found.state
    return f"{found.state}: {found.reason}"


def _describe_step(found: RunStatus) -> str:
    # 499 of 500 are not 100 %.
    of = f" of {found.steps} ({100 * found.step // found.steps} %)" if found.steps else ""
    begun = f", started {format_duration(found.time - found.started)} ago" if found.started else ""
    return f"{found.step}{of}{begun}"


def _describe_rates(found: RunStatus) -> str:
    rates = found.rates
    parts = [] if rates is None else _list_rates(rates)
    if found.predicted_step_seconds is not None:
        parts.append(f"{_seconds(found.predicted_step_seconds)} predicted")
    return ", ".join(parts) + (f"  {draw_blocks(rates.steps)}" if rates is not None else "")


def _list_rates(rates: Rates) -> list[str]:
    parts = [f"{_seconds(rates.last)} last"]
    if len(rates.steps) > 1:
        parts.append(f"{_seconds(rates.recent)} median of {len(rates.steps)}")
    if rates.before:
        change = rates.recent / rates.before - 1
        parts.append(
            f"{_seconds(rates.before)} of {len(rates.steps)} before ({change:+.0%})".replace("%", " %")
        )
    return parts


def draw_blocks(values: Sequence[float]) -> str:
    """Draw numbers as blocks whose heights are from 0 to the largest of them."""
    most = max(values, default=0.0)
    return "".join(_BLOCKS[min(7, int(8 * value / most))] for value in values) if most > 0 else ""


def _describe_end(found: RunStatus) -> str:
    if found.end is None:
        return ""
    if found.state != "running":
        return f"{_clock(found.end)}, {format_duration(found.time - found.end)} ago"
    text = f"about {_clock(found.end)}, in {format_duration(found.end - found.time)}"
    if found.predicted_end is not None:
        text += f" (at the predicted rate {_clock(found.predicted_end)})"
    return text


def _clock(moment: float) -> str:
    """Format a time of the day, with the day where that is not today."""
    local = time.localtime(moment)
    same = local[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M", local)


def _describe_metrics(metrics: Sequence[LatestMetric]) -> list[tuple[str, str]]:
    rows = []
    for kind, name in (("train", "training"), ("eval", "evaluation")):
        of_kind = [metric for metric in metrics if metric.kind == kind]
        texts = [
            f"{m.label or m.metric} {'not finite' if m.value is None else f'{m.value:.4g}'}" for m in of_kind
        ]
        if of_kind:
            rows.append((name, f"{' · '.join(dict.fromkeys(texts))}  (step {max(m.step for m in of_kind)})"))
    return rows


def _describe_checkpoint(found: RunStatus) -> str:
    if found.checkpoint is None:
        return "none yet"
    return f"{found.checkpoint.path}, {format_duration(found.time - found.checkpoint.time)} ago"


def _list_ranks(found: RunStatus) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rank", "host", "memory", "peak", "device", "idle", "for", "does")]
    for rank in found.ranks[:_MOST_RANKS]:
        device = "" if rank.device_limit_bytes is None else format_bytes(rank.device_bytes)
        device += "" if rank.device_limit_bytes is None else f" of {format_bytes(rank.device_limit_bytes)}"
        memory = format_bytes(rank.resident_bytes)
        peak = format_bytes(max(rank.resident_bytes, rank.peak_resident_bytes))
        idle = describe_idle(found.speed, rank.rank)
        does = describe_doing(rank)
        # When the rank said so, by its own clock: it may do something else by now. What has ended lasts no more.
        lasts = format_duration(rank.time - rank.since) if found.state == "running" and rank.since else ""
        if rank.rank in found.silent:
            does = f"silent for {format_duration(found.time - rank.time)}, last: {does}"
        rows.append((str(rank.rank), rank.host, memory, peak, device, idle, lasts, does))
    return rows


def describe_doing(rank: Heartbeat) -> str:
    """Describe what a rank does, in words and the text of its instruction."""
    parts = [rank.doing if rank.phase is None else f"{rank.doing} ({rank.phase})"]
    if rank.instruction:
        parts.append(" ".join(rank.instruction.split()))
    if rank.function:
        parts.append(f"in {rank.function}")
    return ", ".join(parts)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns; those without content are left out."""
    used = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    return ["  ".join(f"{row[i]:<{widths[i]}}" for i in used).rstrip() for row in rows]


def _seconds(value: float) -> str:
    return f"{value:.{3 if value < 10 else 1 if value < 1000 else 0}f} s"
