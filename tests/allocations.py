"""Bytes that operators allocate on a CPU, those of temporary tensors inside operators included."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def count_allocated(run: Callable[[], Any]) -> int:
    """Run something and add up the bytes of all tensors that it allocates, freed ones included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")
