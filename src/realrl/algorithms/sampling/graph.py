"""Sampling without training: answers, and their scores. No torch."""

from realrl.algorithms.policy.graph import GENERATE, KEYS, make_graph
from realrl.algorithms.rewards.graph import list_score_keys, score_sequences
from realrl.algorithms.sampling.config import SamplingExperiment
from realrl.dataflow.graph import DataflowGraph


def make_sampling_graph(experiment: SamplingExperiment) -> DataflowGraph:
    """Sample, and score where there is a reward; its calls take what their metrics need."""
    needed = ("prompt_length", "finished")
    scoring = score_sequences(experiment.reward, needed) if experiment.is_scored else []
    return make_graph([GENERATE, *scoring], (*KEYS, *list_score_keys(experiment.reward)))
