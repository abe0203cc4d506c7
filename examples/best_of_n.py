"""Best-of-n distillation: sample n answers to each prompt, score them with a reward model, learn the best one.

One file is a whole algorithm. Name it in a recipe (`algorithm: examples/best_of_n.py`), and every command knows it:

    realrl config examples/best_of_n.py     the fields of its recipes
    realrl show, plan, train RECIPE         as for algorithms that come with the package
    realrl report RUN_DIR --out DIR         its curves and the metrics it sums up
"""

from pydantic import Field, PositiveInt
from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import GenerateMethod, Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses, last_of_rows
from realrl.algorithms.samples import gather_samples
from realrl.config.base import Settings
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig
from realrl.recipe.settings import GenerationConfig

# What a user writes. Docstrings and fields are what `realrl config` prints.


class BestOfNConfig(Settings):
    """Best-of-n distillation."""

    samples: int = Field(default=4, ge=2)
    """Answers that are sampled for each prompt, n; the one with the highest score is learnt."""
    minibatches: PositiveInt = 1
    """Optimizer steps per training step; must divide `data.batch`."""


class BestOfNModels(Models):
    """The two models of best-of-n distillation."""

    actor: TrainedModelConfig
    """The language model that samples and learns."""
    reward: ModelConfig
    """Frozen reward model, a sequence classifier with one label."""


class BestOfNExperiment(Experiment):
    """Best-of-n distillation: fine-tuning on the best of n sampled answers."""

    models: BestOfNModels
    best_of_n: BestOfNConfig = BestOfNConfig()
    generation: GenerationConfig = GenerationConfig()


# The calls of a step, and what flows between them.

KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("finished", "float32", "one"),
    Key("score", "float32", "one"),
)


def sampling_calls() -> list[Call]:
    """Sample and score, in training as in evaluation."""
    sampled = ("sequences", "prompt_length", "finished")
    return [
        Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), sampled, work=("prompts",)),
        Call("reward.inference", "reward", Kind.INFERENCE, ("sequences",), ("score",), work=("sequences",)),
    ]


def train_graph(experiment: BestOfNExperiment) -> DataflowGraph:
    """Sample, score, learn."""
    train = Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        ("sequences", "prompt_length", "score"),
        work=("sequences",),
        minibatches=experiment.best_of_n.minibatches,
    )
    return DataflowGraph([*sampling_calls(), train], KEYS)


def eval_graph(experiment: BestOfNExperiment) -> DataflowGraph:
    """Sample and score."""
    return DataflowGraph(sampling_calls(), KEYS)


# What the calls compute: tensors in, tensors out, nothing about devices.


class Score:
    """`reward.inference`: the reward model's value at the last token of a sequence."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompts and answers."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`score`: one number per sequence."""
        assert output.values is not None, "the head is scalar"
        return {"score": Ragged.scalars(last_of_rows(output.values, output.lengths).float())}

    def metrics(self, batch: Batch) -> Metrics:
        """Mean `score`."""
        metrics = Metrics()
        metrics.mean("score", batch["score"].values.double().sum(), len(batch))
        return metrics


class LearnBest(PlainTrain):
    """`actor.train`: cross-entropy on the best answer to each prompt, every token of which weighs the same."""

    def __init__(self, *, prompts: int, samples: int) -> None:
        self._prompts = prompts
        self._samples = samples

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Adds `best`: 1 for the best sample of each prompt, 0 for the others."""
        scores = gather_samples(
            batch["score"].values, batch.ids, prompts=self._prompts, samples=self._samples, dp_sum=dp_sum
        )
        best = scores.argmax(dim=1).tolist()
        is_best = batch["score"].values.new_tensor(
            [float(item % self._samples == best[item // self._samples]) for item in batch.ids]
        )
        metrics = Metrics()
        metrics.mean("score", batch["score"].values.double().sum(), len(batch))
        metrics.mean("best_score", (batch["score"].values * is_best).double().sum(), is_best.sum())
        return batch.with_fields(best=Ragged.scalars(is_best)), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Prompts and answers."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> float:
        """Number of tokens to learn."""
        answers = Responses.of(batch["sequences"], batch["prompt_length"])
        return float((answers.counts * batch["best"].values).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """-log p summed over the tokens to learn."""
        assert output.logprobs is not None, "the head is that of a language model"
        answers = Responses.of(batch["sequences"], batch["prompt_length"])
        learnt = batch["best"].values[answers.row]
        loss = -(output.logprobs[answers.index] * learnt).sum()
        metrics = Metrics()
        metrics.mean("loss", loss, learnt.sum())
        return loss, metrics


def methods(
    experiment: BestOfNExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """A method for every call of both graphs."""
    sampling, eval_sampling = experiment.generation, ALGORITHM.eval_generation(experiment)
    assert eval_sampling is not None, "the algorithm generates"
    return StatelessAlgorithm(
        graph=graph,
        eval_graph=eval_graph,
        methods={
            "actor.generate": GenerateMethod(sampling, eval_sampling),
            "reward.inference": Score(),
            "actor.train": LearnBest(prompts=experiment.data.batch, samples=experiment.best_of_n.samples),
        },
        temperature=sampling.temperature,
    )


# The description: all that the rest of the package knows of the algorithm.

ALGORITHM = AlgorithmSpec(
    name="best_of_n",
    recipe=BestOfNExperiment,
    roles={"actor": RoleSpec("lm"), "reward": RoleSpec("scalar")},
    form="prompt",
    train_graph=train_graph,
    eval_graph=eval_graph,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.best_of_n.samples,
    methods=methods,
    headlines=("actor.train/loss", "actor.train/score", "actor.train/best_score", "reward.inference/score"),
    sample_keys=("score",),
    curves={"loss": "loss per token (nats)", "score": "reward model's score"},
    summary=(
        SummaryMetric("score_before", "score", "reward model's score, before", at="first"),
        SummaryMetric("score_after", "score", "reward model's score, after"),
    ),
)
