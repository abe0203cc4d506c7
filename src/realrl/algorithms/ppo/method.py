"""PPO as a whole: methods of all calls, and the state that outlasts a step."""

from collections.abc import Mapping

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.method import GenerateMethod, Method
from realrl.algorithms.policy.inference import RefInference
from realrl.algorithms.ppo.actor import ActorTrain
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.critic import CriticTrain
from realrl.algorithms.ppo.inference import CriticInference
from realrl.algorithms.rewards.config import Rewards, may_skip
from realrl.algorithms.rewards.methods import make_reward_methods
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig

FEW_FINISHED = 0.5
"""Share of finished answers below which a note says that most are cut off."""


class PPOAlgorithm(StatelessAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017) from a reward model (Ouyang et al. 2022) or function."""

    def __init__(
        self,
        *,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        config: PPOConfig,
        generation: GenerationConfig,
        eval_generation: GenerationConfig | None = None,
        reward: Rewards | None = None,
    ) -> None:
        """`eval_generation` is how evaluation samples, if otherwise than training; `reward` are its
        terms, None for a reward model alone."""
        self._config, self._generation = config, generation
        restricted = generation.restricted
        skips = may_skip(reward)
        actor = ActorTrain(config, restricted=restricted, skips=skips)
        critic = CriticTrain(config, restricted=restricted, skips=skips)
        evaluated = (eval_generation or generation).skews(generation.temperature)
        methods: dict[str, Method] = {
            "actor.generate": GenerateMethod(generation, eval_generation or generation),
            # Its metrics are those of evaluation; in training `actor.train` reports the divergence.
            "ref.inference": RefInference(restricted=evaluated),
            "critic.inference": CriticInference(config),
            "actor.train": actor,
            "critic.train": critic,
            **make_reward_methods(reward, finished_only=config.truncated == "bootstrap"),
        }
        temperature = generation.temperature
        super().__init__(graph=graph, eval_graph=eval_graph, methods=methods, temperature=temperature)
        self._experience_makers = (actor.experience_maker, critic.experience_maker)

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """Note that `truncated: bootstrap` leaves most scores unused, where it does."""
        if (
            self._config.truncated != "bootstrap"
            or not metrics.get("actor.train/finished", 1.0) < FEW_FINISHED
        ):
            return []
        return [
            f"most answers are cut off at generation.max_new_tokens={self._generation.max_new_tokens}, and under"
            " ppo.truncated=bootstrap their scores are not trained on; raise max_new_tokens, or set"
            " ppo.truncated=score"
        ]

    def state_dict(self) -> dict[str, float]:
        """Save the KL coefficient, the value statistics, and `steps`, the number of steps they have seen.

        A rank knows them if it runs a train call, and all such ranks have the same ones after a step.
        """
        return max(self._experience_makers, key=lambda a: a.steps).state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` saved, for every train call."""
        for experience_maker in self._experience_makers:
            experience_maker.load_state_dict(state)
