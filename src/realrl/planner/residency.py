"""How full devices get under plans: thousands of plans at once."""

import numpy as np

from realrl.dataflow.call import Kind
from realrl.planner.tables import Bools, Columns, Tables
from realrl.planner.transfers import Floats


def fill(tables: Tables, columns: Columns) -> Floats:
    """Largest part of its memory that the first device of each call's mesh ever uses, [calls, plans].

    The fullest device of all is one of these, or as full, since what a device holds changes only where a mesh
    begins or ends. A device always holds what the roles that live on it keep, and besides, at a time: the
    copies in use, what a running call needs, and what is loaded from host memory to be reallocated. Training
    of a role outside its home is infinitely full: it cannot be done.
    """
    point = columns.first
    inside = (columns.first[:, None] <= point) & (point < columns.end[:, None])  # [calls, points, plans]
    kept = np.zeros(point.shape)
    for home in dict.fromkeys(tables.home):
        kept += inside[home] * columns.resident[home]
    most = np.zeros(point.shape)
    for c, home in enumerate(tables.home):
        borrowed = columns.code[c] != columns.code[home]
        loaded = borrowed | columns.away[home]
        running = columns.working[c] + loaded * columns.weights[c]
        need = inside[c] * running
        for p, last in _held_over(tables, columns, c):
            need += inside[p] * last * columns.weights[p] * inside[c]
        np.maximum(most, need, out=most)
        if columns.away[home].any():
            moving = (borrowed & columns.away[home]) * (
                inside[c] * columns.weights[c] + inside[home] * columns.weights[home]
            )
            np.maximum(most, moving, out=most)
        if tables.calls[c].kind is Kind.TRAIN and home != c:
            most += np.where(borrowed, np.inf, 0.0)
    for follower in tables.followers:
        pair = (tables.home[follower.after], follower.home)
        mixing = [inside[home] * columns.away[home] * columns.weights[home] for home in pair]
        np.maximum(most, sum(mixing), out=most)
    return (kept + most) / columns.limit


def _held_over(tables: Tables, columns: Columns, c: int) -> list[tuple[int, Bools]]:
    """Calls before `c` whose copy may stay for one after it, and in which plans it does besides that of `c`."""
    found = []
    for p in range(c):
        later = [q for q in range(c + 1, len(tables.calls)) if p in tables.sharers[q]]
        if later:
            stays = np.logical_or.reduce([columns.code[p] == columns.code[q] for q in later])
            # A copy that several calls share is counted for the first of them, or for `c` if it is one.
            for other in [tables.home[p], *tables.sharers[p], *([c] if p in tables.sharers[c] else [])]:
                stays &= columns.code[p] != columns.code[other]
            found.append((p, stays))
    return found
