"""Metrics added up over data-parallel ranks."""

from zlib import crc32

import torch

from realrl.algorithms.method import Metrics
from realrl.model.parallel.group import Group


class DifferentMetricsError(Exception):
    """Ranks of a call have metrics of different names, so that they cannot be added up."""

    def __init__(self, metrics: Metrics) -> None:
        names = ", ".join((*metrics.means, *metrics.maxima)) or "none"
        super().__init__(
            "data-parallel ranks have different metrics; each must add the same ones in the same order, with weight"
            f" 0 where it has nothing to add (here: {names})"
        )


def reduce_metrics(metrics: Metrics, group: Group, device: torch.device) -> None:
    """All-reduce metrics over a group, in place.

    DifferentMetricsError, on every rank, unless all have the same names in the same order.
    """
    if group.size == 1:
        return
    _check_names(metrics, group, device)
    sums = [part for pair in metrics.means.values() for part in pair]
    if sums:
        total = group.sum(torch.stack([s.to(device) for s in sums]))
        metrics.means = {name: (total[2 * i], total[2 * i + 1]) for i, name in enumerate(metrics.means)}
    if metrics.maxima:
        highest = group.max(torch.stack([m.to(device) for m in metrics.maxima.values()]))
        metrics.maxima = dict(zip(metrics.maxima, highest.unbind(), strict=True))


def _check_names(metrics: Metrics, group: Group, device: torch.device) -> None:
    """Check that names agree; else an all-reduce would hang, or add up what does not belong together."""
    digest = crc32("\n".join((*metrics.means, "", *metrics.maxima)).encode())
    most, least = group.max(torch.tensor([digest, -digest], device=device)).tolist()
    if most != -least:
        raise DifferentMetricsError(metrics)
