"""Directories of runs, written on the spot."""

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realrl.checkpoint.manifest import MANIFEST
from realrl.program.trace_file import Event, PredictedMemory, PredictedStep, make_event, write_rank_trace
from realrl.recipe.registry import find_algorithm
from realrl.runtime.output.algorithm_record import AlgorithmRecord
from realrl.runtime.supervision.batches import BatchProgress, CallProgress
from realrl.runtime.supervision.heartbeat import RANKS, Heartbeat, name_status_file

GIB = 1 << 30
GONE = 2**22 - 1
"""A process id that no process has."""
CALLS = ("actor.generate [actor] on d2 t1 p1 @0-1 mb=8192", "actor.train [actor] on d2 t1 p1 @0-1 mb=8192")


def write_run(path: Path, steps: int = 40, **training: Any) -> Path:
    """Write a PPO run with an evaluation every 10 steps. The last 20 steps took 2 s each, the others 1 s."""
    path.mkdir(parents=True)
    settings = {"steps": 100, **training}
    config = {"algorithm": "ppo", "training": settings, "evaluation": {"every": 10}}
    (path / "config.yaml").write_text(json.dumps(config))
    AlgorithmRecord.of(find_algorithm("ppo")[0], ("actor", "critic")).save(path)
    add_steps(path, range(steps))
    return path


def add_steps(path: Path, steps: Sequence[int]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        for step in steps:
            if step % 10 == 0:
                file.write(
                    format_line(step, "eval", 4.0, {"reward.inference/score": step / 10, "judge": None})
                )
            seconds = 2.0 if step >= steps[-1] - 19 else 1.0
            metrics = {"actor.train/score": step / 100, "actor.train/kl": 0.5, "actor.train/loss": 1.5}
            metrics |= {
                "perf/tokens_per_s": 1500.0,
                "perf/mfu": 0.37,
                "perf/idle": 0.2,
                "perf/idle_max": 0.31,
            }
            metrics |= {"perf/idle/rank-0": 0.09, "perf/idle/rank-1": 0.31, "perf/actor.train/mfu": 0.5}
            file.write(format_line(step + 1, "train", seconds, metrics))


def format_line(step: int, kind: str, seconds: float, metrics: dict[str, float | None]) -> str:
    return json.dumps({"step": step, "kind": kind, "seconds": seconds, "metrics": metrics}) + "\n"


def make_batch(step: int, *, parts: int, rows: int = 128, going_on: int = 0) -> dict[str, Any]:
    """Make a rank's progress with a batch of 256 items, of which it has generated `rows` in 2 parts."""
    generate = CallProgress(order=0, parts=parts, span=2, rows=rows, going_on=going_on)
    calls = {"actor.generate": generate} if parts else {}
    return BatchProgress(step=step, weights=step - 3, size=256, calls=calls).to_json()


def write_rank(path: Path, rank: int, *, ago: float = 0.0, **changes: Any) -> None:
    now = time.time()
    known = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": now - ago,
        "started": now - ago - 100,
        "step": 40,
        "steps": 100,
        "doing": "train",
        "instruction": f"run        {CALLS[0]}",
        "call": "actor.generate",
        "since": now - ago - 1.5,
        "resident_bytes": GIB,
        "peak_resident_bytes": 2 * GIB,
        "device_bytes": GIB,
    }
    (path / RANKS).mkdir(exist_ok=True)
    name_status_file(path, rank).write_text(Heartbeat(**(known | changes)).to_text())


def write_step(path: Path, ranks: int = 2, extra: Sequence[Event] = (), step: int = 39) -> None:
    """Write traces of a step with calls of 1 s, and its prediction with calls of 0.5 s."""
    predicted = []
    for rank in range(ranks):
        slices = [
            make_event(rank, f"run        {call}", 5e15 + i * 1e6, 1e6, {"step": step})
            for i, call in enumerate(CALLS)
        ]
        write_rank_trace(path, rank, [*slices, *extra])
        predicted.append(
            [
                make_event(rank, f"run        {call}", i * 5e5, 5e5, {"step": 0, "waiting": 0.0})
                for i, call in enumerate(CALLS)
            ]
        )
    memory = tuple(
        PredictedMemory(
            rank=rank,
            capacity_bytes=4 * GIB,
            resting_bytes=GIB,
            peak_bytes=3 * GIB,
            during="actor.train",
        )
        for rank in range(ranks)
    )
    PredictedStep(seconds=1.25, ranks=predicted, memory=memory).save(path)


def write_samples(path: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    (path / "samples").mkdir(exist_ok=True)
    (path / "samples" / f"step-{step:06}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_checkpoint(path: Path, step: int) -> None:
    """Write a checkpoint that looks complete from outside."""
    folder = path / "checkpoints" / f"step-{step:06}"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
