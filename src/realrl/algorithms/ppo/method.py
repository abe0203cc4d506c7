"""PPO as a whole: a method for every call, and the state that outlasts a step."""

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.method import GenerateMethod
from realrl.algorithms.ppo.actor import ActorTrain
from realrl.algorithms.ppo.critic import CriticTrain
from realrl.algorithms.ppo.inference import CriticInference, RefInference, RewardInference
from realrl.config.algorithms import GenerationConfig, PPOConfig
from realrl.dataflow.graph import DataflowGraph


class PPOAlgorithm(StatelessAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017) from a reward model (Ouyang et al. 2022)."""

    def __init__(
        self,
        *,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        config: PPOConfig,
        generation: GenerationConfig,
    ) -> None:
        actor, critic = ActorTrain(config), CriticTrain(config)
        super().__init__(
            graph=graph,
            eval_graph=eval_graph,
            methods={
                "actor.generate": GenerateMethod(generation),
                "reward.inference": RewardInference(),
                "ref.inference": RefInference(),
                "critic.inference": CriticInference(),
                "actor.train": actor,
                "critic.train": critic,
            },
            temperature=generation.temperature,
        )
        self._appraisers = (actor.appraiser, critic.appraiser)

    def state_dict(self) -> dict[str, float]:
        """The KL coefficient, the value statistics, and `steps`, how many steps they have seen.

        A rank knows them if it runs a train call; where ranks differ, the state with the most steps counts.
        """
        return max(self._appraisers, key=lambda a: a.steps).state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put them back, for every train call."""
        for appraiser in self._appraisers:
            appraiser.load_state_dict(state)
