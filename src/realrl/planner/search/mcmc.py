"""Markov chains over plans, many at once."""

import numpy as np

from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.moves.transfers import Ints

_HOT, _COLD = 0.1, 0.001
"""Temperatures at the start and at the end, as a part of the best score."""
_EXCHANGE = 25
"""Rounds after which the worst chains give way to the best."""


def anneal(scorer: Scorer, starts: Ints, *, rounds: int, chains: int, seed: int, part: float = 1.0) -> Ints:
    """Metropolis search as in ReaL (arXiv 2406.14088): a round gives one call of each chain another option.

    starts: [calls, plans], where chains begin. Returns the chains' plans at the end, the best first, [calls,
    chains]. How far an option is from the old one in their list, in which similar ones are neighbours, is
    log-uniform. The temperature falls, as rounds go by or as `part` of the time does, whichever is further; every
    so often the worse quarter of the chains is replaced by copies of the better one. The same seed gives the
    same result unless the time is further.
    """
    rng = np.random.default_rng(seed)
    tables = scorer.timeline.tables
    sizes, each = tables.sizes, np.arange(chains)
    order = [_similar(scorer, c) for c in range(len(sizes))]
    place = np.full((len(sizes), sizes.max()), 0)
    candidates = np.zeros_like(place)
    for c, numbers in enumerate(order):
        candidates[c, : len(numbers)] = numbers
        place[c, numbers] = np.arange(len(numbers))
    plans = starts[:, rng.integers(0, starts.shape[1], chains)].copy()
    scores = scorer(plans)
    before = scorer.time_used(part)
    for i in range(rounds):
        if (used := scorer.time_used(part)) >= 1:
            break
        late = (used - before) / (1 - before)
        done = late if late > (i + 1) / rounds else i / rounds
        call = rng.integers(0, len(sizes), chains)
        far = np.exp(rng.random(chains) * np.log(sizes[call])).astype(np.int64)
        moved = (place[call, plans[call, each]] + far * rng.choice((-1, 1), chains)) % sizes[call]
        trial = plans.copy()
        trial[call, each] = candidates[call, moved]
        tried = scorer(trial)
        temperature = _HOT * (_COLD / _HOT) ** done * scores.min()
        accept = tried < scores - temperature * np.log(1 - rng.random(chains))
        plans[:, accept], scores[accept] = trial[:, accept], tried[accept]
        if i % _EXCHANGE == _EXCHANGE - 1:
            ranked = np.argsort(scores, kind="stable")
            better, worse = ranked[: chains // 4], ranked[chains - chains // 4 :]
            plans[:, worse], scores[worse] = plans[:, better], scores[better]
    return plans[:, np.argsort(scores, kind="stable")]


def _similar(scorer: Scorer, call: int) -> Ints:
    """Numbers of a call's options, similar ones side by side: by size, strategy and position."""
    tables = scorer.timeline.tables
    layouts, which = tables.layouts(call), tables.candidates(call).layout
    keys = (layouts.first, layouts.pp, layouts.tp, layouts.size)
    return np.lexsort(tuple(key[which] for key in keys))
