"""Online DPO: sample two answers to each prompt, let a reward rank them, and learn from the pair by DPO.

This file is a whole algorithm. If a recipe has `algorithm: examples/online_dpo.py`, every command supports it:

    realrl config examples/online_dpo.py    prints the settings of the algorithm
    realrl show, plan, train RECIPE         work as for built-in algorithms
    realrl report RUN_DIR --out DIR         shows its curves and summary metrics
"""

from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from realrl.algorithms import (
    OPTIONAL_CALLS,
    AlgorithmSpec,
    Batch,
    Call,
    DataflowGraph,
    Experiment,
    GenerateMethod,
    GenerationConfig,
    Key,
    Kind,
    Method,
    Metrics,
    ModelConfig,
    ModelOutput,
    Models,
    PlainTrain,
    Ragged,
    Responses,
    RewardSetting,
    RoleSpec,
    Settings,
    StatelessAlgorithm,
    Sum,
    SummaryMetric,
    TrainedModelConfig,
    check_models,
    get_eval_generation,
    list_score_keys,
    make_reward_methods,
    score_sequences,
)

# The settings of a recipe. `realrl config` prints these fields and their docstrings.


class OnlineDPOConfig(Settings):
    """Online DPO."""

    beta: PositiveFloat = 0.1
    """Scale of implicit rewards. A higher value keeps the actor closer to the reference."""
    minibatches: PositiveInt = 1
    """Optimizer steps per training step; must divide `data.batch`."""


class OnlineDPOModels(Models):
    """The models of online DPO."""

    actor: TrainedModelConfig
    """The language model that samples and learns."""
    ref: ModelConfig = ModelConfig()
    """Frozen reference. Without a `path`, it is a copy of the actor before training."""
    reward: ModelConfig | None = None
    """Frozen reward model, a sequence classifier with one label. null if `reward` replaces it."""


class OnlineDPOExperiment(Experiment):
    """Online DPO: preference learning from pairs that the actor samples and a reward ranks."""

    models: OnlineDPOModels
    reward: RewardSetting = None
    """Reward that replaces `models.reward`, or a mixture that includes it; see docs/rewards.md."""
    online_dpo: OnlineDPOConfig = OnlineDPOConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        check_models(self.reward, self.models.reward, type(self.models).model_fields)
        return self


# The calls of a step, and the keys (named data) that flow between them. Both answers to a prompt are keys of the
# same item, so a rank has both answers or none. Keys of the second answer have the prefix OTHER.

OTHER = "other_"
SIDES = ("", OTHER)


def pairs_of(*names: str) -> tuple[str, ...]:
    """List the keys of both answers: each name without and with the prefix."""
    return tuple(f"{side}{name}" for side in SIDES for name in names)


KEYS = (
    Key("prompts", "int64"),
    *(Key(name, "int64") for name in pairs_of("sequences")),
    *(Key(name, "int64", "one") for name in pairs_of("prompt_length")),
    *(Key(name, "float32", "one") for name in pairs_of("finished", "ref_logps")),
)


def make_graph(experiment: OnlineDPOExperiment, calls: list[Call]) -> DataflowGraph:
    """Make a graph of calls, with the keys of both answers and of the reward."""
    scores = [key for side in SIDES for key in list_score_keys(experiment.reward, side)]
    return DataflowGraph(calls, [*KEYS, *scores])


def sample(side: str) -> Call:
    """Make the call that samples one answer to each prompt."""
    keys = ("sequences", "prompt_length", "finished")
    return Call(
        f"actor.generate_{side}".rstrip("_"),
        "actor",
        Kind.GENERATE,
        ("prompts",),
        tuple(f"{side}{key}" for key in keys),
        work=("prompts",),
        prefix=side,
    )


def train_graph(experiment: OnlineDPOExperiment) -> DataflowGraph:
    """Make the graph of a training step: sample and score twice, infer with the reference, train."""
    answers, both = pairs_of("sequences", "prompt_length"), pairs_of("sequences")
    calls = [
        call for side in SIDES for call in (sample(side), *score_sequences(experiment.reward, prefix=side))
    ]
    reference = Call("ref.inference", "ref", Kind.INFERENCE, answers, pairs_of("ref_logps"), work=both)
    train = Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        (*answers, *pairs_of("score", "ref_logps")),
        work=both,
        minibatches=experiment.online_dpo.minibatches,
    )
    return make_graph(experiment, [*calls, reference, train])


def eval_graph(experiment: OnlineDPOExperiment) -> DataflowGraph:
    """Make the graph of an evaluation: sample and score once. The two extra inputs are for metrics of answers."""
    scoring = score_sequences(experiment.reward, ("prompt_length", "finished"))
    return make_graph(experiment, [sample(""), *scoring])


# What the calls compute, from tensors to tensors. This code knows nothing about devices.


def interleave(batch: Batch, name: str) -> Ragged:
    """Order rows as first 0, other 0, first 1, ..., so that both answers of a pair are in the same micro-batch."""
    first, other = (batch[key] for key in pairs_of(name))
    pairs = zip(first.rows(), other.rows(), strict=True)
    return Ragged.of((row for pair in pairs for row in pair), dtype=first.values.dtype)


def sum_logprobs(batch: Batch, output: ModelOutput) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of each answer's tokens: [N] float64 for the first and for the other answers."""
    assert output.logprobs is not None, "the head is that of a language model"
    answers = Responses.of(interleave(batch, "sequences"), interleave(batch, "prompt_length"))
    sums = answers.row_sums(output.logprobs[answers.index])
    return sums[0::2], sums[1::2]


class Reference:
    """`ref.inference`: log-probabilities of both answers under the reference."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per item."""
        return interleave(batch, "sequences")

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Return the log-probability of each answer."""
        sums = sum_logprobs(batch, output)
        return {key: Ragged.scalars(of.float()) for key, of in zip(pairs_of("ref_logps"), sums, strict=True)}

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing."""
        return Metrics()


class LearnPairs(PlainTrain):
    """`actor.train`: the loss of DPO (Rafailov et al. 2023, equation 7) on pairs that the actor has sampled (Guo et
    al. 2024, arXiv 2402.04792)."""

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `sign`: 1 if the first answer is better, -1 if the other one is better, 0 if scores are equal."""
        first, other = (batch[key].values.double() for key in pairs_of("score"))
        # A missing score (on_error: skip) is NaN. Its pair then has sign 0, and does not count in mean scores.
        known = ~(first - other).isnan()
        sign = (first - other).nan_to_num().sign()
        metrics = Metrics()
        metrics.mean("score", ((first + other) / 2)[known].sum(), known.sum())
        metrics.mean("better_score", first.maximum(other)[known].sum(), known.sum())
        metrics.mean("ties", (sign == 0).sum(), len(batch))
        return batch.with_fields(sign=Ragged.scalars(sign.float())), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per item."""
        return interleave(batch, "sequences")

    def weight(self, batch: Batch) -> float:
        """Number of pairs."""
        return float(len(batch))

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute -log sigmoid of the better answer's implicit reward minus the other's, summed over pairs.

        A pair with equal scores adds log 2 and no gradient.
        """
        ref_first, ref_other = (batch[key].values.double() for key in pairs_of("ref_logps"))
        first, other = sum_logprobs(batch, output)
        sign = batch["sign"].values.double()
        margin = self._beta * sign * ((first - ref_first) - (other - ref_other))
        loss = -logsigmoid(margin).sum()
        metrics = Metrics()
        metrics.mean("loss", loss, len(batch))
        metrics.mean("margin", margin.sum(), len(batch))
        return loss, metrics


def methods(
    experiment: OnlineDPOExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """Make a method for every call of both graphs."""
    sampling, eval_sampling = experiment.generation, get_eval_generation(experiment)
    table: dict[str, Method] = {
        **{sample(side).name: GenerateMethod(sampling, eval_sampling) for side in SIDES},
        "ref.inference": Reference(),
        "actor.train": LearnPairs(experiment.online_dpo.beta),
    }
    for side in SIDES:
        table |= make_reward_methods(experiment.reward, prefix=side)
    return StatelessAlgorithm(
        graph=graph, eval_graph=eval_graph, methods=table, temperature=sampling.temperature
    )


# The description: the package knows nothing else about the algorithm.

ALGORITHM = AlgorithmSpec(
    name="online_dpo",
    recipe=OnlineDPOExperiment,
    roles={
        "actor": RoleSpec("lm"),
        "ref": RoleSpec("lm", weights_from="actor"),
        "reward": RoleSpec("scalar", optional=True),
    },
    form="prompt",
    train_graph=train_graph,
    eval_graph=eval_graph,
    generation=lambda experiment: experiment.generation,
    methods=methods,
    optional_calls=OPTIONAL_CALLS,
    headlines=(
        "actor.train/loss",
        "actor.train/score",
        "actor.train/better_score",
        "reward.inference/score",
        "reward.function/score",
    ),
    sample_keys=("score",),
    curves={"loss": "loss per pair (nats)", "score": "reward's score"},
    summary=(
        SummaryMetric("score_before", "score", "reward's score, before", at="first"),
        SummaryMetric("score_after", "score", "reward's score, after"),
    ),
)
