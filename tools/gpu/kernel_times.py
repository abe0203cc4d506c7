"""Print the kernels of a training step and of decode steps by time, and write traces for chrome://tracing."""

import gzip
import math
import shutil
import sys
from collections.abc import Callable

from results import CPU, OUT, attempt, record, sync
from speed import TrainingStep, clean, make, run_generate
from torch.profiler import ProfilerActivity, profile

ACTIVITIES = [ProfilerActivity.CPU] if CPU else [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def show(name: str, run: Callable[[], object]) -> dict[str, float]:
    """Profile a call, print its kernels by time, and write its trace. Returns the share of busy time."""
    run()
    sync()
    with profile(activities=ACTIVITIES) as profiler:
        run()
        sync()
    kernels: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    busy, wall = measure_union(spans)
    print(f"     {name}: device busy {busy / 1e3:.1f} of {wall / 1e3:.1f} ms, {len(spans)} kernels")
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    for kernel, times in ordered[:28]:
        mean = sum(times) / len(times)
        print(f"     {sum(times) / 1e3:9.2f} ms, {len(times):5} of {mean:8.1f} us  {kernel[:110]}")
    found = [(kernel[:160], len(times), sum(times)) for kernel, times in ordered[:60]]
    record("profile", name, busy_ms=busy / 1e3, wall_ms=wall / 1e3, kernels=found)
    write_trace(profiler, name)
    return {"busy_share": busy / wall if wall else 0.0}


def measure_union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Compute the time in which at least one span is active, and the time from the first start to the last end."""
    busy, last = 0.0, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy, last - min(start for start, _ in spans) if spans else 0.0


def write_trace(profiler: profile, name: str) -> None:
    """Write the trace of a profiler, compressed."""
    path = OUT / f"trace-{name.replace(' ', '-')}.json"
    profiler.export_chrome_trace(str(path))
    with path.open("rb") as source, gzip.open(f"{path}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    path.unlink()


def profile_training() -> dict[str, float]:
    """Profile a training step."""
    return show("training 0.5B", TrainingStep("0.5B", 16384).run)


def profile_decoding() -> dict[str, float]:
    """Profile a short generate call."""
    _, model = make("0.5B")
    rows, context = (2, 8) if CPU else (64, 512)
    return show("decoding 0.5B 64 rows", lambda: run_generate(model, rows, context, 33))


def main() -> int:
    good = attempt("profile", "training 0.5B", profile_training)
    clean()
    good &= attempt("profile", "decoding 0.5B", profile_decoding)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
