"""Metrics in reports on algorithms that train a policy on its samples. No torch."""

from realrl.recipe.algorithm import SummaryMetric

OPTIONAL_CALLS = ("reward.inference", "reward.function", "reward.sum", "ref.inference")
"""Calls that only some recipes have."""

OPTIONAL_METRICS = ("kl",)
"""Metrics that only runs with a reference give."""

HEADLINES = (
    "reward.inference/score",
    "reward.inference/finished",
    "reward.function/score",
    "reward.function/finished",
    "reward.sum/score",
    "reward.sum/finished",
    "actor.train/score",
    "actor.train/finished",
    "actor.train/kl",
    "actor.train/response_tokens",
    "ref.inference/kl",
)

CURVES = {
    "score": "reward's score",
    "judge": "independent judge",
    "kl": "KL to the reference (nats)",
    "response_tokens": "tokens per completion",
}

SUMMARY = (
    SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
    SummaryMetric("judge_after", "judge", "independent judge, after"),
    SummaryMetric("reward_before", "score", "reward's score, before", at="first"),
    SummaryMetric("reward_after", "score", "reward's score, after"),
    SummaryMetric("kl", "kl", "KL to the reference after (nats per sequence)"),
)
