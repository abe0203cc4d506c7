"""Sampling without training, which `realrl generate` runs: settings, calls and description.

This module does not import torch.
"""

from typing import Self

from pydantic import model_validator

from realrl.algorithms.policy import GENERATE, KEYS
from realrl.algorithms.rewards.config import (
    RewardSetting,
    check_environment_terms,
    environment_reward,
    find_answer_reader,
    list_score_keys,
    score_sequences,
)
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, get_eval_generation
from realrl.recipe.environment import EnvironmentSetting, check_environment
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig


class SamplingModels(Models):
    """The models of sampling."""

    actor: ModelConfig
    """The language model that answers."""
    reward: ModelConfig | None = None
    """Reward model, a sequence classifier with one label; null for none."""


class SamplingExperiment(Experiment):
    """Answers of a language model, scored by a reward. Nothing is trained."""

    models: SamplingModels
    reward: RewardSetting
    """Reward of answers. null takes `models.reward`. If `models.reward` is null too, answers get no scores."""
    environment: EnvironmentSetting = None
    """Environment in which the actor acts, turn by turn; null for answers of a single turn."""
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _environment(self) -> Self:
        if self.environment is not None:
            alone = self.reward is None and self.models.reward is not None
            check_environment(self.environment, self.generation, skips=not alone)
            if self.reward is None and self.models.reward is None:
                object.__setattr__(self, "reward", environment_reward())
        check_environment_terms(self.reward, self.environment)
        return self

    @property
    def is_scored(self) -> bool:
        return self.reward is not None or self.models.reward is not None


def make_sampling_graph(experiment: SamplingExperiment) -> DataflowGraph:
    """Make the graph that samples and, if there is a reward, scores. Scoring gets all inputs that metrics need."""
    needed = ("prompt_length", "finished")
    scoring = score_sequences(experiment.reward, needed) if experiment.is_scored else []
    return DataflowGraph.using([GENERATE, *scoring], (*KEYS, *list_score_keys(experiment.reward)))


def _make_methods(
    experiment: SamplingExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.base.method import GenerateMethod, StatelessAlgorithm
    from realrl.algorithms.rewards.reward_methods import make_reward_methods

    generation = experiment.generation
    generate = GenerateMethod(generation, get_eval_generation(experiment))
    scoring = make_reward_methods(experiment.reward) if experiment.is_scored else {}
    methods = {"actor.generate": generate, **scoring}
    return StatelessAlgorithm(graph, eval_graph, methods, generation.temperature)


ALGORITHM = AlgorithmSpec(
    name="sampling",
    recipe=SamplingExperiment,
    roles={"actor": RoleSpec("lm"), "reward": RoleSpec("scalar", optional=True)},
    form="prompt",
    train_graph=make_sampling_graph,
    eval_graph=make_sampling_graph,
    trains=False,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.evaluation.samples,
    methods=_make_methods,
    answers=lambda experiment: find_answer_reader(experiment.reward),
    headlines=(),
    curves={},
    summary=(),
)
