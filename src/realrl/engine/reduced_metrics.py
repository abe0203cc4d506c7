"""Metrics summed over ranks with different items, and sent to ranks that do not know them."""

import json
from zlib import crc32

import torch

from realrl.algorithms.base.method import Metrics
from realrl.engine.messages import broadcast_bytes
from realrl.model.group import Group

_MOST = 1 << 14
"""A call has fewer metrics than this."""


class DifferentMetricsError(Exception):
    """Ranks of a call have metrics with different names, which cannot be summed."""

    def __init__(self, metrics: Metrics) -> None:
        names = ", ".join((*metrics.means, *metrics.maxima)) or "none"
        super().__init__(
            "ranks with different items have different metrics; each must add the same ones in the same order, with"
            f" weight 0 where it has nothing to add (here: {names})"
        )


def reduce_metrics(metrics: Metrics, group: Group, device: torch.device, *, idle: bool = False) -> None:
    """All-reduce metrics over a group, in place.

    An `idle` rank has no metrics. It gets the metrics of other ranks, under numbers instead of their names. Raises
    DifferentMetricsError on every rank unless all ranks that are not idle have the same names in the same order.
    """
    if group.size == 1:
        return
    means, maxima = _agree_on_names(metrics, group, device, idle=idle)
    if idle:
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        metrics.means = {str(number): (nothing, nothing) for number in range(means)}
        metrics.maxima = {str(means + number): nothing - torch.inf for number in range(maxima)}
    sums = [part for pair in metrics.means.values() for part in pair]
    if sums:
        total = group.sum(torch.stack([s.to(device) for s in sums]))
        metrics.means = {name: (total[2 * i], total[2 * i + 1]) for i, name in enumerate(metrics.means)}
    if metrics.maxima:
        highest = group.max(torch.stack([m.to(device) for m in metrics.maxima.values()]))
        metrics.maxima = dict(zip(metrics.maxima, highest.unbind(), strict=True))


def broadcast_metrics(metrics: Metrics, group: Group, source: int, device: torch.device) -> Metrics:
    """Return the metrics of the rank with the index `source` in a group, with their names."""
    if group.size == 1:
        return metrics
    text = json.dumps(metrics.to_plain()) if group.index == source else ""
    return Metrics.from_plain(json.loads(broadcast_bytes(text.encode(), group, source, device)))


def _agree_on_names(metrics: Metrics, group: Group, device: torch.device, *, idle: bool) -> tuple[int, int]:
    """Check that names agree; otherwise an all-reduce would hang, or add different metrics.

    Returns the numbers of means and of maxima, which an `idle` rank learns here.
    """
    digest = crc32("\n".join((*metrics.means, "", *metrics.maxima)).encode())
    # The digest and both numbers are packed into one integer, so that one small all-reduce is enough.
    mine = (digest * _MOST + len(metrics.means)) * _MOST + len(metrics.maxima)
    # An idle rank sends numbers that are below all others, so that it changes neither maximum.
    sent = [-1, -(1 << 62)] if idle else [mine, -mine]
    most, least = group.max(torch.tensor(sent, device=device)).tolist()
    if most != -least:
        raise DifferentMetricsError(metrics)
    return int(most) // _MOST % _MOST, int(most) % _MOST
