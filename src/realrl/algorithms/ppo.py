"""PPO: settings, calls and description. This module does not import torch."""

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from realrl.algorithms.policy import (
    GENERATE,
    HEADLINES,
    KEYS,
    ROLES,
    ClippedPolicyConfig,
    KLConfig,
    PolicyModels,
    RewardedExperiment,
    check_correction,
    complete_reference,
    describe,
    infer_on_sequences,
    list_averages,
    train_on_sequences,
)
from realrl.algorithms.rewards.config import Rewards, list_score_keys, score_sequences
from realrl.config.lazy import import_later
from realrl.dataflow.call import Key, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import RoleSpec
from realrl.recipe.model import TrainedModelConfig


class PPOConfig(ClippedPolicyConfig):
    """Proximal policy optimisation (Schulman et al. 2017) for language models."""

    kl: KLConfig = KLConfig()
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (Schulman et al. 2016)."""
    clip: PositiveFloat = 0.2
    """Clip the probability ratio to [1 - clip, 1 + clip]."""
    value_clip: PositiveFloat | None = 0.2
    """How far values may move from the old values before the loss is clipped. Values have the unit of rewards. With
    `value_norm`, the unit is the standard deviation of returns. null for no clipping."""
    minibatches: PositiveInt = 4
    """Optimizer steps per pass over a batch; must divide `data.batch`."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    advantage_norm: bool = True
    """Normalise advantages to mean 0 and deviation 1 over the whole batch."""
    value_norm: Literal["none", "running", "exponential"] = "none"
    """Divide the critic's errors by the standard deviation of the returns. `running` computes it over all returns
    so far, `exponential` as an exponential average. The critic itself always predicts unscaled rewards."""
    value_norm_beta: float = Field(default=0.99, gt=0, lt=1)
    """Decay of the exponential average."""
    reward_scale: PositiveFloat = 1.0
    """Factor of rewards. A reward is `clip((score - reward_bias) * reward_scale)`, and a value is
    `(output - reward_bias) * reward_scale`. So the critic's output always has the scale of the scores."""
    reward_bias: float = 0.0
    """Number that is subtracted from each score."""
    reward_clip: PositiveFloat | None = 10.0
    """Limit of the absolute reward; null for no limit. The critic's values are not limited."""
    early_stop_ratio: PositiveFloat | None = 5.0
    """Skip the remaining mini-batches of a step when the mean probability ratio of a mini-batch exceeds this
    number. null never skips."""
    truncated: Literal["score", "bootstrap"] = "score"
    """Treatment of answers without end of sequence. `score` uses their score, as for finished answers. `bootstrap`
    ignores their score, and uses the critic's value of the last state as the return of the missing tokens."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Number that is subtracted from the reward of an answer without end of sequence."""


class PPOModels(PolicyModels):
    """The models of PPO."""

    critic: TrainedModelConfig = TrainedModelConfig()
    """Value model. Without a `path` it starts from the reward model or, if there is none, from the actor with a new
    scalar head. Without a `dtype` it takes the actor's."""


class PPOExperiment(RewardedExperiment):
    """RLHF with PPO: actor, critic, reference, and a reward model or another reward."""

    models: PPOModels
    ppo: PPOConfig = PPOConfig()

    @model_validator(mode="after")
    def _reference(self) -> Self:
        return complete_reference(self, "ppo", self.ppo.kl.coef, self.ppo)

    @model_validator(mode="after")
    def _correction(self) -> Self:
        return check_correction(self, "ppo", self.ppo)


VALUES = Key("values", "float32", "sequences")
"""`values[t]` is the critic's value of the state after token t."""


def train_graph(
    *,
    minibatches: int,
    averages: Iterable[MovingAverage] = (),
    reward: Rewards | None = None,
    reference: bool = True,
    recompute_logprobs: bool = False,
) -> DataflowGraph:
    """Make the graph that samples, scores, and trains actor and critic.

    minibatches: optimizer steps per pass. averages: moving averages that make the reference follow the actor.
    reward: see `score_sequences`. reference: whether there is a reference model. recompute_logprobs: see
    `ClippedPolicyConfig`.
    """
    inference = [infer_on_sequences("critic.inference", "values")]
    if reference:
        inference.insert(0, infer_on_sequences("ref.inference", "ref_logprobs"))
    made = ("logprobs", "score", *(key for call in inference for key in call.outputs))
    old: tuple[str, ...] = ()
    if recompute_logprobs:
        inference.append(infer_on_sequences("actor.inference", "old_logprobs"))
        old = ("old_logprobs",)
    train = [
        train_on_sequences("actor", (*made, *old), minibatches),
        train_on_sequences("critic", made, minibatches),
    ]
    calls = [GENERATE, *score_sequences(reward), *inference, *train]
    return DataflowGraph.using(calls, (*KEYS, VALUES, *list_score_keys(reward)), averages)


def _make_train_graph(experiment: PPOExperiment) -> DataflowGraph:
    models = experiment.models
    return train_graph(
        minibatches=experiment.ppo.minibatches,
        averages=list_averages(experiment.ppo, models.actor, models.ref),
        reward=experiment.reward,
        reference=models.ref is not None,
        recompute_logprobs=experiment.ppo.recompute_logprobs,
    )


_CRITIC = RoleSpec("scalar", weights_from="reward", weights_else="actor", dtype_from="actor")

ALGORITHM = describe(
    name="ppo",
    recipe=PPOExperiment,
    roles={"actor": ROLES["actor"], "critic": _CRITIC, **ROLES},
    train_graph=_make_train_graph,
    epochs=lambda experiment: experiment.ppo.epochs,
    experience_calls=("actor.train", "critic.train"),
    needs_whole_batch=lambda _: "advantages are normalised over the whole batch",
    methods=import_later("realrl.algorithms.ppo_loss:PPOAlgorithm"),
    headlines=(*HEADLINES, "critic.train/value_loss", "judge"),
)
