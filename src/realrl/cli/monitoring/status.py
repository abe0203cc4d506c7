"""Status of a run, read from its directory and formatted as text. Does not import torch."""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from realrl.checkpoint.saved import BEST, CONFIG, METRICS, SUMMARY, list_checkpoints
from realrl.cli.monitoring.metrics import MetricLine, describe_speed, find_metric, read_last, read_speed
from realrl.cli.page.text import align_columns, format_measured, format_share
from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.config.values import format_bytes
from realrl.config.yaml_file import read_yaml
from realrl.program.text import format_ranks
from realrl.program.trace_file import PredictedStep
from realrl.runtime.measure.metric_names import IDLE_RANK
from realrl.runtime.output.algorithm_record import RECORD, AlgorithmRecord
from realrl.runtime.output.rundir import HISTORY, read_history
from realrl.runtime.output.untaught import UntaughtSteps
from realrl.runtime.supervision.batches import BatchProgress, merge_progress
from realrl.runtime.supervision.heartbeat import Heartbeat, read_statuses
from realrl.runtime.supervision.run_end import RESTARTING, RunEnd

Liveness = Literal["running", "finished", "failed", "interrupted", "stale"]

FRESH = 15.0
"""Seconds without a heartbeat after which a rank counts as silent. Heartbeats should come every second."""
_LOADING = 900.0
"""A restarted run should send its first heartbeat within this time, in seconds."""
_RECENT = 20
"""Maximum number of steps from which a rate is computed."""
_ENOUGH = 3
"""With this many steps since the last start, the rate leaves out earlier steps."""
_TAIL = 1 << 22
"""Bytes at the end of metrics.jsonl that are read."""
_MOST_RANKS = 64
"""Maximum ranks in the text."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of the last training steps."""

    last: float
    recent: float
    """Median of the last steps, at most 20."""
    before: float | None
    """Median of the 20 steps before the steps of `recent`; None if there are fewer than 20."""
    steps: tuple[float, ...]
    """Seconds of the last steps, in order."""


@dataclass(frozen=True, kw_only=True)
class LatestMetric:
    """Latest value of a curve of the algorithm. The value is None if it was not finite."""

    metric: str
    label: str
    kind: str
    step: int
    value: float | None


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """Last complete checkpoint, or the saved models if they are newer."""

    path: str
    """Path relative to the run's directory."""
    time: float
    """Time at which the checkpoint was written, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of a run at some time. Times are in seconds since 1970."""

    run_dir: str
    algorithm: str | None
    state: Liveness
    reason: str
    """Why the run is in this state; may be empty."""
    time: float
    started: float | None
    step: int
    """Number of finished training steps."""
    steps: int | None
    """Number of training steps of the whole run; None if it is not known yet."""
    rates: Rates | None
    predicted_step_seconds: float | None
    end: float | None
    """Expected end at the rate of the last steps, or the end of a run that has ended."""
    predicted_end: float | None
    """Expected end at the rate that the plan predicts."""
    metrics: tuple[LatestMetric, ...]
    speed: Mapping[str, float]
    """Performance metrics of the last step and of its ranks, see `read_speed`."""
    untaught: str
    """How many of the last steps taught nothing, and why; empty if all taught something."""
    checkpoint: LastCheckpoint | None
    restarts: int
    """Number of restarts, automatic or by a person."""
    ranks: tuple[Heartbeat, ...]
    silent: tuple[int, ...]
    """Ranks of a running run that send no heartbeats."""
    batches: tuple[BatchProgress, ...]
    """Batches under way, if sampling runs ahead."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


class DescribedBatch(NamedTuple):
    """Texts about a batch under way."""

    batch: str
    """Step that trains on the batch."""
    done: str
    """Calls that have worked on it."""
    going_on: str
    """How many answers the next step continues; empty if a single step samples the batch."""
    age: str
    """Number of finished training steps since the weights that sampled its first tokens."""


def check_run(directory: str) -> Path:
    """Return the directory of a run as a path. Raises UserError if there is no run."""
    path = local_path(directory)
    if not path.is_dir():
        raise UserError(f"{directory}: no such directory")
    if not (path / CONFIG).is_file():
        raise UserError(f"{directory} holds no run: config.yaml is missing")
    return path


def read_status(path: Path, now: float | None = None) -> RunStatus:
    """Read the status of a run in a directory that `check_run` accepts. Damaged and missing files are left out."""
    now = time.time() if now is None else now
    config = _read_config(path)
    ranks = _read_ranks(path)
    lines = read_last(path / METRICS, _TAIL)
    trained = [line for line in lines if line.kind == "train"]
    algorithm = read_algorithm(path)
    ended = RunEnd.load(path)
    state, reason, silent = _find_state(path, ranks, ended, now)
    step = max([*(line.step for line in lines[-1:]), *(rank.step for rank in ranks)], default=0)
    steps = next((rank.steps for rank in ranks if rank.steps), None) or _number(config, "training", "steps")
    starts = read_history(path / HISTORY)
    rates = _find_rates(_since_start(trained, starts))
    predicted = PredictedStep.load(path)
    seconds = None if predicted is None or not isfinite(predicted.seconds) else predicted.seconds
    end = predicted_end = None
    started = min((rank.started for rank in ranks), default=_modified(path / CONFIG))
    if state == "running" and steps is not None:
        # A resumed run may have written its last metrics long ago.
        since = max(_modified(path / METRICS) or now, started or 0.0)
        further = _evaluation_seconds(config, lines, step, steps)
        if rates is not None:
            end = max(now, since + (steps - step) * rates.recent + further)
        if seconds is not None:
            predicted_end = max(now, since + (steps - step) * seconds + further)
    elif state != "running":
        end = ended.time if ended is not None else _modified(path / SUMMARY)
    return RunStatus(
        run_dir=str(path),
        algorithm=None if algorithm is None else algorithm.name,
        state=state,
        reason=reason,
        time=now,
        started=started,
        step=step,
        steps=steps,
        rates=rates,
        predicted_step_seconds=seconds,
        end=end,
        predicted_end=predicted_end,
        metrics=() if algorithm is None else tuple(_list_latest(algorithm, lines)),
        speed=read_speed(trained[-1].metrics) if trained else {},
        untaught=_describe_untaught(trained[-_RECENT:]),
        checkpoint=_find_checkpoint(path, ranks),
        restarts=max([len(starts) - 1, 0, *(rank.restart for rank in ranks)]),
        ranks=ranks,
        silent=silent,
        batches=_list_batches(ranks, step),
    )


def _read_ranks(path: Path) -> tuple[Heartbeat, ...]:
    """Read the heartbeats of the last start. Files of an earlier start with more ranks may still exist."""
    found = read_statuses(path).values()
    begun = max((rank.started for rank in found), default=0.0)
    return tuple(rank for rank in found if rank.time > begun - FRESH)


def _list_batches(ranks: Sequence[Heartbeat], step: int) -> tuple[BatchProgress, ...]:
    """List the batches that are not trained on after `step` steps. Damaged entries are left out."""

    def read(rank: Heartbeat) -> Iterator[BatchProgress]:
        for found in rank.batches:
            with suppress(ValueError):
                batch = BatchProgress.parse(found)
                # The heartbeat of another rank may be older.
                if batch.step > step:
                    yield batch

    return merge_progress(map(read, ranks))


def _find_state(
    path: Path, ranks: Sequence[Heartbeat], ended: RunEnd | None, now: float
) -> tuple[Liveness, str, tuple[int, ...]]:
    """Find the state of a run, the reason for it, and the ranks that are silent."""
    silent = tuple(rank.rank for rank in ranks if now - rank.time > FRESH or _is_gone(rank, now))
    newest = max((rank.time for rank in ranks), default=None)
    # A last heartbeat may come after the command has written how the run ended.
    over = ended is not None and (newest is None or newest < ended.time + 3)
    if ranks and len(silent) < len(ranks) and not over:
        words = _describe_silence([rank for rank in ranks if rank.rank in silent], now)
        return "running", words, silent
    if over and ended is not None:
        if ended.status == 0:
            return "finished", "", ()
        if ended.status == RESTARTING:
            gone = now - ended.time > _LOADING
            return "stale" if gone else "running", ended.message, ()
        return "interrupted" if ended.status in (130, 143) else "failed", ended.message, ()
    if (path / SUMMARY).is_file():
        return "finished", "", ()
    if ranks:
        return "stale", _describe_silence(ranks, now), ()
    changed = _modified(path / METRICS) or _modified(path / CONFIG) or 0.0
    if now - changed < 4 * FRESH:
        return "running", "no rank has reported yet", ()
    return "stale", f"nothing has been written for {format_duration(now - changed)}", ()


def _is_gone(rank: Heartbeat, now: float) -> bool:
    """Check whether a rank's heartbeats have stopped and its process on this machine does not exist."""
    if now - rank.time < 3 or rank.host != socket.gethostname() or rank.pid <= 0:
        return False
    try:
        os.kill(rank.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _describe_silence(silent: Sequence[Heartbeat], now: float) -> str:
    if not silent:
        return ""
    last = max(rank.time for rank in silent)
    text = f"{_name_ranks(silent)} silent for {format_duration(now - last)}"
    gone = [rank for rank in silent if _is_gone(rank, now)]
    if gone:
        process = "process" if len(gone) == 1 else "processes"
        text += f"; gone: the {process} of {_name_ranks(gone)}"
    return text


def _name_ranks(ranks: Sequence[Heartbeat]) -> str:
    numbers = format_ranks(sorted(rank.rank for rank in ranks)).replace(",", ", ")
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"


def _since_start(trained: Sequence[MetricLine], starts: Sequence[Mapping[str, Any]]) -> Sequence[MetricLine]:
    """Leave out steps before the last start, which may have run on other devices, if enough steps came after it."""
    begun = starts[-1].get("step") if starts else None
    after = [line for line in trained if isinstance(begun, int) and line.step > begun]
    return after if len(after) >= _ENOUGH else trained


def _find_rates(trained: Sequence[MetricLine]) -> Rates | None:
    seconds = [line.seconds for line in trained if line.seconds is not None and line.seconds >= 0]
    if not seconds:
        return None
    recent, before = seconds[-_RECENT:], seconds[-2 * _RECENT : -_RECENT]
    return Rates(
        last=seconds[-1],
        recent=median(recent),
        before=median(before) if len(before) == _RECENT else None,
        steps=tuple(recent),
    )


def _evaluation_seconds(config: Any, lines: Sequence[MetricLine], step: int, steps: int) -> float:
    taken = [line.seconds for line in lines if line.kind == "eval" and line.seconds is not None]
    if not taken or step >= steps:
        return 0.0
    every = _number(config, "evaluation", "every")
    due = 1 if every is None else (steps - 1) // every - step // every + 1
    return due * median(taken[-_RECENT:])


def _list_latest(algorithm: AlgorithmRecord, lines: Sequence[MetricLine]) -> list[LatestMetric]:
    """List the latest values of the algorithm's curves, in training and in evaluations."""
    found = []
    for metric, label in algorithm.curves.items():
        for kind in ("train", "eval"):
            for line in reversed(lines):
                name = find_metric(line.metrics, metric) if line.kind == kind else None
                if name is not None:
                    value = line.metrics[name]
                    latest = LatestMetric(metric=name, label=label, kind=kind, step=line.step, value=value)
                    found.append(latest)
                    break
    return found


def _describe_untaught(trained: Sequence[MetricLine]) -> str:
    steps = UntaughtSteps()
    for line in trained:
        for _ in steps.take(line.metrics):
            pass
    return "; ".join(steps.describe(f"the last {len(trained)}"))


def _find_checkpoint(path: Path, ranks: Sequence[Heartbeat]) -> LastCheckpoint | None:
    named = [path / rank.checkpoint for rank in ranks if rank.checkpoint]
    named += list(list_checkpoints(path).values())[:1]
    named += [path / name for name in (BEST, "final")]
    written = [(changed, file) for file in named if (changed := _modified(file)) is not None]
    if not written:
        return None
    changed, file = max(written)
    return LastCheckpoint(path=os.path.relpath(file, path), time=changed)


def read_algorithm(path: Path) -> AlgorithmRecord | None:
    """Read the description of a run's algorithm; None if it is missing or damaged."""
    try:
        return AlgorithmRecord.load(path) if (path / RECORD).is_file() else None
    except (UserError, OSError):
        return None


def _read_config(path: Path) -> Any:
    try:
        return read_yaml(str(path / CONFIG))
    except UserError:
        return {}


def _number(config: Any, section: str, name: str) -> int | None:
    """Find a positive whole number in the content of a recipe file."""
    found = config.get(section) if isinstance(config, Mapping) else None
    value = found.get(name) if isinstance(found, Mapping) else None
    return value if isinstance(value, int) and value > 0 else None


def _modified(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def format_duration(seconds: float) -> str:
    """Format seconds with one or two units: `0.52 s`, `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.2g} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = round(minutes / 60)
    if hours < 24:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


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
    if found.batches:
        lines += ["", *_list_batch_rows(found)]
    if found.ranks:
        lines += ["", *_list_ranks(found)]
    if len(found.ranks) > _MOST_RANKS:
        lines.append(f"... and {len(found.ranks) - _MOST_RANKS} more ranks")
    return "\n".join(map(_make_printable, lines))


def _make_printable(text: str) -> str:
    """Replace characters that control a terminal, because files of a run may hold anything."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _describe_state(found: RunStatus) -> str:
    # Messages about Ctrl-C begin with the state.
    if not found.reason or found.reason.startswith(f"{found.state} "):
        return found.reason or found.state
    return f"{found.state}: {found.reason}"


def _describe_step(found: RunStatus) -> str:
    # Round down, because 499 of 500 steps are not 100 %.
    of = f" of {found.steps} ({100 * found.step // found.steps} %)" if found.steps else ""
    begun = f", started {format_duration(found.time - found.started)} ago" if found.started else ""
    return f"{found.step}{of}{begun}"


def _describe_rates(found: RunStatus) -> str:
    parts, rates = [], found.rates
    if rates is not None:
        parts.append(f"{format_measured(rates.last)} s last")
        if len(rates.steps) > 1:
            parts.append(f"{format_measured(rates.recent)} s median of {len(rates.steps)}")
        if rates.before:
            change = f"{rates.recent / rates.before - 1:+.0%}".replace("%", " %")
            parts.append(f"{format_measured(rates.before)} s of {len(rates.steps)} before ({change})")
    if found.predicted_step_seconds is not None:
        parts.append(f"{format_measured(found.predicted_step_seconds)} s predicted")
    return ", ".join(parts) + (f"  {_draw_blocks(rates.steps)}" if rates is not None else "")


def _draw_blocks(values: Sequence[float]) -> str:
    """Draw numbers as blocks of different heights; the largest number has the full height."""
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
    """Format a time of day, with the date unless it is today."""
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


def describe_batches(found: RunStatus) -> list[DescribedBatch]:
    """Describe the batches under way."""
    described = []
    for batch in found.batches:
        done, answers = [], []
        for name, call in batch.calls.items():
            parts = f" {call.parts} of {call.span} parts" if call.span > 1 else ""
            # Some ranks may not have finished the call yet.
            done.append(
                name + parts + (f" ({call.rows} of {batch.size} rows)" if call.rows < batch.size else "")
            )
            if call.span > 1:
                answers.append(f"{call.going_on} of {call.rows}")
        age = found.step - batch.weights
        described.append(
            DescribedBatch(
                str(batch.step),
                ", ".join(done) or "nothing yet",
                ", ".join(answers),
                f"{age} step{'s' * (age != 1)}",
            )
        )
    return described


def _list_batch_rows(found: RunStatus) -> list[str]:
    """Format a table of the batches under way. Answers go on only if a batch is sampled in parts."""
    rows = [DescribedBatch("batch", "done", "answers go on", "age"), *describe_batches(found)]
    used = [i for i in range(4) if any(row[i] for row in rows[1:])]
    return align_columns([[row[i] for i in used] for row in rows])


def _list_ranks(found: RunStatus) -> list[str]:
    """Format a table of the ranks. Empty columns are left out."""
    rows: list[tuple[str, ...]] = [("rank", "host", "memory", "peak", "device", "idle", "for", "does")]
    for rank in found.ranks[:_MOST_RANKS]:
        device = ""
        if rank.device_limit_bytes is not None:
            device = f"{format_bytes(rank.device_bytes)} of {format_bytes(rank.device_limit_bytes)}"
        memory = format_bytes(rank.resident_bytes)
        peak = format_bytes(max(rank.resident_bytes, rank.peak_resident_bytes))
        share = found.speed.get(f"{IDLE_RANK}{rank.rank}")
        idle = "" if share is None else format_share(share)
        does = describe_activity(rank)
        # Both times come from the rank's own clock. Work has no duration if the run has ended.
        lasts = format_duration(rank.time - rank.since) if found.state == "running" and rank.since else ""
        if rank.rank in found.silent:
            does = f"silent for {format_duration(found.time - rank.time)}, last: {does}"
        rows.append((str(rank.rank), rank.host, memory, peak, device, idle, lasts, does))
    used = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return align_columns([[row[i] for i in used] for row in rows])


def describe_activity(rank: Heartbeat) -> str:
    """Describe the current work of a rank, with the text of its instruction."""
    parts = [rank.doing if rank.phase is None else f"{rank.doing} ({rank.phase})"]
    if rank.instruction:
        parts.append(" ".join(rank.instruction.split()))
    if rank.works_on:
        parts.append(f"batch{'es' * (len(rank.works_on) > 1)} {' and '.join(map(str, rank.works_on))}")
    if rank.function:
        parts.append(f"in {rank.function}")
    return ", ".join(parts)
