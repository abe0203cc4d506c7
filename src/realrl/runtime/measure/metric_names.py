"""Names of performance metrics. Does not import torch."""

PERFORMANCE = "perf/"
"""Prefix of metrics about speed, as opposed to metrics about learning."""
IDLE_RANK = "idle/rank-"
"""Start of the name, after `PERFORMANCE`, of a metric with the idle share of a rank. The rank's number follows."""
