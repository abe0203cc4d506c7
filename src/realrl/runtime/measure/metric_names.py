"""Names of performance metrics. Does not import torch."""

PERFORMANCE = "perf/"
"""Prefix of metrics about speed, as opposed to learning."""
IDLE_RANK = "idle/rank-"
"""Second prefix of the idle share of a rank; the rank's number follows."""
