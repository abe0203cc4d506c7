"""Results, timers and the device, which the scripts of all stages share."""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEVICE = os.environ.get("DEVICE", "cuda")
"""Device of all stages: cuda, or cpu for a dry run with tiny sizes."""
CPU = DEVICE == "cpu"
OUT = Path(os.environ.get("OUT", "runs/gpu"))
OUT.mkdir(parents=True, exist_ok=True)
PLACE = torch.device("cuda", 0) if not CPU else torch.device("cpu")
BEGUN = time.monotonic()
LIMIT = float(os.environ.get("STAGE_SECONDS", "inf"))
"""Seconds after which a script starts no further measurement."""


def record(kind: str, name: str, **values: Any) -> None:
    """Append a result to results.jsonl at once, so that the results of a killed stage are kept."""
    with (OUT / "results.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "name": name, **values}, default=str) + "\n")


def sync() -> None:
    """Wait for the device."""
    if not CPU:
        torch.cuda.synchronize()


def over() -> bool:
    """Return whether the time of the stage is used up."""
    return time.monotonic() - BEGUN > LIMIT


def attempt(
    kind: str, name: str, run: Callable[..., dict[str, Any] | None], /, *arguments: Any, **options: Any
) -> bool:
    """Run a check or a measurement, and record what it returns or raises.

    The process ends with status 3 if the CUDA context is broken, because every later call would fail.
    """
    if over():
        print(f"-- {name}: no time left", flush=True)
        record(kind, name, status="no time left")
        # A missing figure is not a failure, but a check that never ran is.
        return kind != "parity"
    start = time.perf_counter()
    try:
        found = run(*arguments, **options) or {}
        sync()
        seconds = time.perf_counter() - start
        status = "FAIL" if found.pop("bad", False) else "ok"
        text = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in found.items()
        )
        print(f"{status:4} {name}: {text} [{seconds:.1f} s]", flush=True)
        record(kind, name, status=status, took=seconds, **found)
        return status == "ok"
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        print(
            f"FAIL {name}: {type(error).__name__}: {str(error)[:500]}", *lines[-8:], sep="\n     ", flush=True
        )
        record(
            kind,
            name,
            status="error",
            error=f"{type(error).__name__}: {error}"[:2000],
            trace="\n".join(lines[-14:]),
        )
        if not CPU and "CUDA error" in str(error):
            print("the CUDA context is broken; this stage ends", flush=True)
            sys.exit(3)
        if not CPU:
            torch.cuda.empty_cache()
        return False


def seconds_of(run: Callable[[], object], repeats: int = 7, warm: int = 2, calls: int = 1) -> float:
    """Measure the median seconds of a call. On a GPU, events are recorded before and after `calls` calls."""
    times = []
    for number in range(warm + repeats):
        if CPU:
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            spent = time.perf_counter() - begin
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            spent = begin.elapsed_time(end) / 1000
        if number >= warm:
            times.append(spent / calls)
    return statistics.median(times)


def replayed(run: Callable[[], object], calls: int = 20, repeats: int = 5) -> float:
    """Measure the median seconds of a call in a CUDA graph of `calls` calls, without launches on the host."""
    if CPU:
        return seconds_of(run, 1, 0)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return seconds_of(graph.replay, repeats, 2) / calls


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Compute the relative distance of two tensors; infinite if a value of `got` is not finite."""
    got, wanted = got.detach().double(), wanted.detach().double().to(got.device)
    if not got.isfinite().all():
        return float("inf")
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted).clamp(min=1e-30))
