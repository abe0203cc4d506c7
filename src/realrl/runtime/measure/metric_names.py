"""Names of performance metrics. No torch."""

PERFORMANCE = "perf/"
"""Beginning of the names of metrics that say how fast a step was, and nothing of what was learnt."""
IDLE_RANK = "idle/rank-"
"""What follows it in the names of the idle shares of ranks, whose number comes last."""
