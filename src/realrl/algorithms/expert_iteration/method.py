"""Expert iteration as a whole: methods of all calls, and what a run is told of steps that learn nothing."""

from collections.abc import Mapping

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.expert_iteration.config import ExpertIterationExperiment
from realrl.algorithms.expert_iteration.train import ExpertIterationTrain
from realrl.algorithms.method import GenerateMethod, Method
from realrl.algorithms.policy.inference import RefInference
from realrl.algorithms.rewards.config import may_skip
from realrl.algorithms.rewards.methods import make_reward_methods
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig


class ExpertIterationAlgorithm(StatelessAlgorithm):
    """Expert iteration."""

    def __init__(
        self,
        experiment: ExpertIterationExperiment,
        *,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        eval_generation: GenerationConfig | None,
    ) -> None:
        """`eval_generation` is how evaluation samples."""
        generation, reward = experiment.generation, experiment.reward
        evaluated = eval_generation or generation
        train = ExpertIterationTrain(
            experiment.expert_iteration,
            prompts=experiment.data.batch,
            restricted=generation.restricted,
            skips=may_skip(reward),
        )
        methods: dict[str, Method] = {
            "actor.generate": GenerateMethod(generation, evaluated),
            "ref.inference": RefInference(restricted=evaluated.skews(generation.temperature)),
            "actor.train": train,
            **make_reward_methods(reward),
        }
        super().__init__(
            graph=graph, eval_graph=eval_graph, methods=methods, temperature=generation.temperature
        )
        self._threshold = experiment.expert_iteration.threshold

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """List a note where no answer of the step is learnt."""
        if metrics.get("actor.train/kept") != 0:
            return []
        bound = (
            "" if self._threshold is None else f" of expert_iteration.threshold={self._threshold:g} or more"
        )
        return [
            f"no answer has a score{bound}, so that the step learnt nothing; actor.train/kept is the share that"
            " steps learn"
        ]
