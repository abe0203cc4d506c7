"""Metrics in reports on learning from preferences. No torch."""

from realrl.recipe.algorithm import SummaryMetric

HEADLINES = (
    "actor.train/loss",
    "actor.train/accuracy",
    "actor.train/margin",
    "actor.inference/accuracy",
    "actor.inference/margin",
)

CURVES = {
    "loss": "loss",
    "accuracy": "pairs ranked right",
    "margin": "reward of chosen minus rejected answers",
}

SUMMARY = (
    SummaryMetric("preference_accuracy", "accuracy", "held-out pairs ranked right"),
    SummaryMetric("preference_margin", "margin", "reward margin of held-out pairs"),
)
