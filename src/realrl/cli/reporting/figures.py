"""Summary metrics of runs, as kept in report.json."""

from collections.abc import Mapping
from typing import Any

from realrl.cli.reporting.runs import FinishedRun

_PPO = {"judge": "judge", "reward": "score"}
"""Prefix of a key of the report -> metric at the first and last evaluation of a PPO run."""


def report_figures(runs: Mapping[str, FinishedRun]) -> dict[str, Any]:
    """Sum up `runs` (algorithm -> run) as metrics.

    A metric that no run has is left out; one that is not finite is None.

    reward_pair_accuracy: share of evaluation pairs ranked right at the last evaluation of the reward run.
    judge_before, judge_after, reward_before, reward_after: means over completions at the first and the last
    evaluation of the PPO run. kl: KL to the reference at the last one, in nats per sequence. seconds: wall
    time of each run and in total.
    """
    figures: dict[str, Any] = {}
    if "reward" in runs and (accuracy := runs["reward"].first_and_last("accuracy")):
        figures["reward_pair_accuracy"] = accuracy[1]
    if "ppo" in runs:
        for name, figure in _PPO.items():
            if pair := runs["ppo"].first_and_last(figure):
                figures[f"{name}_before"], figures[f"{name}_after"] = pair
        if kl := runs["ppo"].first_and_last("kl"):
            figures["kl"] = kl[1]
    seconds = {algorithm: run.seconds for algorithm, run in runs.items()}
    figures["seconds"] = seconds | {"total": sum(seconds.values())}
    return figures
