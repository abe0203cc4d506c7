"""Simulated annealing: vectorised Metropolis chains over plans."""

import numpy as np

from realrl.planner.search.scorer import Scorer
from realrl.program.arrays import Ints

_HOT, _COLD = 0.1, 0.001
"""Initial and final temperature, as a fraction of the best score."""
_EXCHANGE = 25
"""Number of rounds after which copies of the best chains replace the worst chains."""


def anneal(scorer: Scorer, starts: Ints, *, rounds: int, chains: int, seed: int, share: float = 1.0) -> Ints:
    """Run Metropolis search as in ReaL (arXiv 2406.14088): a round changes one call of each chain.

    Chains start from random plans of `starts`, [calls, plans]. Returns the chains' final plans, [calls, chains],
    the best first. Candidates are sorted so that similar ones are neighbours, and the distance of a change in that
    order is log-uniform. The temperature falls with the fraction of `rounds` done, or with the fraction spent of a
    `share` of the effort, whichever is larger. Every `_EXCHANGE` rounds, copies of the best quarter of the chains
    replace the worst quarter. Results are reproducible by seed.
    """
    rng = np.random.default_rng(seed)
    tables = scorer.timeline.tables
    sizes = tables.sizes
    each = np.arange(chains)
    order = [_similar(scorer, c) for c in range(len(sizes))]
    place = np.full((len(sizes), sizes.max()), 0)
    candidates = np.zeros_like(place)
    for c, numbers in enumerate(order):
        candidates[c, : len(numbers)] = numbers
        place[c, numbers] = np.arange(len(numbers))
    plans = starts[:, rng.integers(0, starts.shape[1], chains)].copy()
    scores = scorer(plans)
    used_before = scorer.used(share)
    for i in range(rounds):
        if (used := scorer.used(share)) >= 1:
            break
        elapsed = (used - used_before) / (1 - used_before)
        done = elapsed if elapsed > (i + 1) / rounds else i / rounds
        call = rng.integers(0, len(sizes), chains)
        far = np.exp(rng.random(chains) * np.log(sizes[call])).astype(np.int64)
        moved = (place[call, plans[call, each]] + far * rng.choice((-1, 1), chains)) % sizes[call]
        trial = plans.copy()
        trial[call, each] = candidates[call, moved]
        tried = scorer(trial)
        temperature = _HOT * (_COLD / _HOT) ** done * scores.min()
        accept = tried < scores - temperature * np.log(1 - rng.random(chains))
        plans[:, accept] = trial[:, accept]
        scores[accept] = tried[accept]
        if i % _EXCHANGE == _EXCHANGE - 1:
            ranked = np.argsort(scores, kind="stable")
            better = ranked[: chains // 4]
            worse = ranked[chains - chains // 4 :]
            plans[:, worse] = plans[:, better]
            scores[worse] = scores[better]
    return plans[:, np.argsort(scores, kind="stable")]


def _similar(scorer: Scorer, call: int) -> Ints:
    """Sort the candidates of a call by mesh size, degrees and position. Returns their indices."""
    tables = scorer.timeline.tables
    layouts = tables.layouts(call)
    which = tables.candidates(call).layout
    keys = (layouts.first, layouts.vpp, layouts.ep, *layouts.degrees[:0:-1], layouts.size)
    return np.lexsort(tuple(key[which] for key in keys))
