"""Calls that score sequences: one for each term of the reward, and their sum. No torch."""

from collections.abc import Mapping

from realrl.algorithms.rewards.config import SINGLE, Rewards, RewardTerm, is_mixture
from realrl.dataflow.call import Call, Key, Kind

SUM = "reward.sum"
"""Call that adds up the terms of a mixture."""


def name_key(name: str, prefix: str = "") -> str:
    """Name the key of a term's scores, in a mixture."""
    return f"{prefix}score_{name}"


def list_score_keys(reward: Rewards | None, prefix: str = "") -> list[Key]:
    """List the keys of `score_sequences`: the score, and those of a mixture's terms."""
    terms = reward if reward is not None and is_mixture(reward) else {}
    names = [f"{prefix}score", *(name_key(name, prefix) for name in terms)]
    # Advantages are differences of scores, which float32 would round away: 1e-5 of rewards near 1,000.
    return [Key(name, "float64", "one") for name in names]


def name_call(name: str, term: RewardTerm | None, prefix: str = "") -> str:
    """Name the call of a term; None stands for a reward model alone."""
    kind = Kind.INFERENCE if term is None or term.model is not None else Kind.FUNCTION
    return f"{name}.{kind}_{prefix}".rstrip("_")


def score_sequences(reward: Rewards | None, extra: tuple[str, ...] = (), *, prefix: str = "") -> list[Call]:
    """Make the calls that score sequences; None for a reward model alone.

    `extra` are inputs for metrics. `prefix` is that of the keys of the sequences, and ends the names of the calls.
    """
    if reward is None:
        return [_score(SINGLE, None, f"{prefix}score", extra, prefix)]
    if not is_mixture(reward):
        return [_score(name, term, f"{prefix}score", extra, prefix) for name, term in reward.items()]
    keys = {name: name_key(name, prefix) for name in reward}
    calls = [_score(name, term, keys[name], extra, prefix) for name, term in reward.items()]
    total = Call(
        f"{SUM}_{prefix}".rstrip("_"),
        None,
        Kind.FUNCTION,
        (f"{prefix}sequences", *(f"{prefix}{key}" for key in extra), *keys.values()),
        (f"{prefix}score",),
        work=(f"{prefix}sequences",),
        function="realrl.algorithms.rewards.mixture:RewardSum",
    )
    return [*calls, total]


def _score(name: str, term: RewardTerm | None, key: str, extra: tuple[str, ...], prefix: str) -> Call:
    on_host = term is not None and term.model is None
    sequences = f"{prefix}sequences"
    # On the host it is texts that are scored, which are cut where the prompt ends.
    texts = (f"{prefix}prompt_length",) if on_host else ()
    return Call(
        name_call(name, term, prefix),
        None if on_host else "reward",
        Kind.FUNCTION if on_host else Kind.INFERENCE,
        tuple(dict.fromkeys((sequences, *texts, *(f"{prefix}{key}" for key in extra)))),
        (key,),
        work=(sequences,),
        function=_refer(name, term) if term is not None and on_host else None,
        record_fields=on_host,
    )


_SHIPPED: Mapping[str, str] = {
    "verifier": "realrl.algorithms.rewards.scorers",
    "http": "realrl.algorithms.rewards.http",
}


def _refer(name: str, term: RewardTerm) -> str:
    """Write the reference by which the measured seconds of a term are known."""
    return term.function or f"{_SHIPPED[term.source]}:{name}"
