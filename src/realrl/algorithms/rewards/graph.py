"""Calls that score sequences: one for each term of the reward, and one for their sum. No torch."""

from realrl.algorithms.rewards.config import SINGLE, Rewards, RewardTerm, is_mixture, name_key
from realrl.dataflow.call import Call, Key, Kind

SUM = "reward.sum"
"""Call that adds up the terms of a mixture."""


def list_score_keys(reward: Rewards | None, prefix: str = "") -> list[Key]:
    """List the keys that `score_sequences` produces: the score, and those of a mixture's terms."""
    terms = reward if reward is not None and is_mixture(reward) else {}
    names = [f"{prefix}score", *(name_key(name, prefix) for name in terms)]
    # Advantages are differences of scores. Float32 would lose a difference of 1e-5 between rewards near 1,000.
    return [Key(name, "float64", "one") for name in names]


def name_call(name: str, term: RewardTerm | None, prefix: str = "") -> str:
    """Name the call of a term; None stands for a reward model alone."""
    kind = Kind.INFERENCE if term is None or term.model is not None else Kind.FUNCTION
    return f"{name}.{kind}_{prefix}".rstrip("_")


def score_sequences(reward: Rewards | None, extra: tuple[str, ...] = (), *, prefix: str = "") -> list[Call]:
    """Make the calls that score sequences; None stands for a reward model alone.

    `extra` are more inputs, for metrics. `prefix` is that of the keys of sequences; it also ends the names of
    calls.
    """
    extra = tuple(f"{prefix}{key}" for key in extra)
    terms: dict[str, RewardTerm | None] = {SINGLE: None} if reward is None else {**reward}
    if reward is None or not is_mixture(reward):
        return [_score(name, term, f"{prefix}score", extra, prefix) for name, term in terms.items()]
    keys = {name: name_key(name, prefix) for name in reward}
    sequences = f"{prefix}sequences"
    total = Call(
        f"{SUM}_{prefix}".rstrip("_"),
        None,
        Kind.FUNCTION,
        (sequences, *extra, *keys.values()),
        (f"{prefix}score",),
        work=(sequences,),
        function="realrl.algorithms.rewards.methods:RewardSum",
    )
    return [*(_score(name, term, keys[name], extra, prefix) for name, term in terms.items()), total]


def _score(name: str, term: RewardTerm | None, key: str, extra: tuple[str, ...], prefix: str) -> Call:
    on_host = term is not None and term.model is None
    sequences = f"{prefix}sequences"
    # Functions see texts, which start where the prompt ends.
    texts = (f"{prefix}prompt_length",) if on_host else ()
    return Call(
        name_call(name, term, prefix),
        None if on_host else "reward",
        Kind.FUNCTION if on_host else Kind.INFERENCE,
        tuple(dict.fromkeys((sequences, *texts, *extra))),
        (key,),
        work=(sequences,),
        function=_refer(name, term) if term is not None and on_host else None,
        record_fields=on_host,
    )


def _refer(name: str, term: RewardTerm) -> str:
    """Write the reference under which profiles keep the measured seconds of a term."""
    built_in = {
        "verifier": "realrl.algorithms.rewards.scorers",
        "http": "realrl.algorithms.rewards.http",
    }
    return term.function or f"{built_in[term.source]}:{name}"
