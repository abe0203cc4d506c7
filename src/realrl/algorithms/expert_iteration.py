"""Expert iteration: settings, calls and description. This module does not import torch."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from realrl.algorithms.policy import (
    CURVES,
    GENERATE,
    HEADLINES,
    KEYS,
    PolicyModels,
    RewardedExperiment,
    describe,
    infer_on_sequences,
    train_on_sequences,
)
from realrl.algorithms.rewards.config import list_score_keys, score_sequences
from realrl.config.base import Settings
from realrl.config.lazy import import_later
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.model import ModelConfig


class ExpertIterationConfig(Settings):
    """Which sampled answers are learnt, and their loss."""

    samples: PositiveInt = 8
    """Answers sampled for each prompt. They form a group."""
    keep: PositiveInt | None = 1
    """Learn at most this many answers of each group: the answers with the highest scores. Among equal scores,
    earlier answers come first. null for no limit. With 1, the algorithm is RAFT (Dong et al. 2023)."""
    threshold: float | None = None
    """Learn only answers with at least this score; null for no limit. With threshold=1, keep=null and a verifier
    that scores right answers 1, the algorithm is ReST-EM (Singh et al. 2023)."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Loss of a mini-batch: the mean of -log p over all learnt tokens, or the mean over answers of the mean over
    their tokens. Probabilities are computed at generation.temperature."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a batch; must divide `data.batch`. A mini-batch with nothing to learn makes no
    step."""
    epochs: PositiveInt = 1
    """Passes over each batch."""

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.keep is not None and self.keep > self.samples:
            raise ValueError(
                f"keep={self.keep} of {self.samples} samples; keep at most as many, or sample more"
            )
        if self.threshold is None and self.keep in (None, self.samples):
            bound = "null" if self.keep is None else self.keep
            raise ValueError(
                f"keep={bound} and threshold=null learn all {self.samples} samples whatever their scores; set keep"
                " below samples, or a threshold"
            )
        return self


class ExpertIterationModels(PolicyModels):
    """The models of expert iteration."""

    ref: ModelConfig | None = None
    """Frozen reference policy, which only measures the divergence. Without a `path` it is the actor's starting
    point, and without a `dtype` it takes the actor's. null for none."""


class ExpertIterationExperiment(RewardedExperiment):
    """Expert iteration: fine-tuning on the best of the actor's own answers. Also known as rejection sampling,
    best-of-n, RAFT (Dong et al. 2023, arXiv 2304.06767) and ReST-EM (Singh et al. 2023, arXiv 2312.06585)."""

    models: ExpertIterationModels
    expert_iteration: ExpertIterationConfig = ExpertIterationConfig()


def make_expert_iteration_graph(experiment: ExpertIterationExperiment) -> DataflowGraph:
    """Make the graph that samples, scores, and learns the best answers, with a reference if there is one."""
    calls = [GENERATE, *score_sequences(experiment.reward)]
    inputs: tuple[str, ...] = ("score",)
    if experiment.models.ref is not None:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs"))
        inputs = ("score", "logprobs", "ref_logprobs")
    calls.append(train_on_sequences("actor", inputs, experiment.expert_iteration.minibatches))
    return DataflowGraph.using(calls, (*KEYS, *list_score_keys(experiment.reward)))


ALGORITHM = describe(
    name="expert_iteration",
    recipe=ExpertIterationExperiment,
    train_graph=make_expert_iteration_graph,
    samples_per_prompt=lambda experiment: experiment.expert_iteration.samples,
    epochs=lambda experiment: experiment.expert_iteration.epochs,
    needs_whole_batch=lambda _: None,
    methods=import_later("realrl.algorithms.expert_iteration_loss:ExpertIterationAlgorithm"),
    headlines=(*HEADLINES, "actor.train/loss", "actor.train/kept_score", "actor.train/kept", "judge"),
    curves={**CURVES, "kept_score": "score of what is learnt", "kept": "fraction of answers learnt"},
)
