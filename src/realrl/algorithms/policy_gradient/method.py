"""A policy gradient as a whole: methods of all calls, and the state that outlasts a step."""

from realrl.algorithms.base import StatelessAlgorithm
from realrl.algorithms.method import GenerateMethod, Method
from realrl.algorithms.policy.inference import LogprobsInference, RefInference
from realrl.algorithms.policy_gradient.config import PolicyGradientExperiment
from realrl.algorithms.policy_gradient.graph import GREEDY
from realrl.algorithms.policy_gradient.train import PolicyGradientTrain, StepSizes
from realrl.algorithms.rewards.config import may_skip
from realrl.algorithms.rewards.methods import make_reward_methods
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig


class PolicyGradientAlgorithm(StatelessAlgorithm):
    """Policy gradient without a critic, of any preset."""

    def __init__(
        self,
        experiment: PolicyGradientExperiment,
        *,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        eval_generation: GenerationConfig | None,
    ) -> None:
        """`eval_generation` is how evaluation samples."""
        generation = experiment.generation
        evaluated = eval_generation or generation
        greedy = generation.model_copy(update={"greedy": True})
        sizes = StepSizes(prompts=experiment.data.batch, max_new_tokens=generation.max_new_tokens)
        reward = experiment.reward
        self._train = PolicyGradientTrain(
            experiment.policy, sizes, restricted=generation.restricted, skips=may_skip(reward)
        )
        offered: dict[str, Method] = {
            "actor.generate": GenerateMethod(generation, evaluated),
            "actor.generate_greedy": GenerateMethod(greedy, greedy),
            "actor.inference": LogprobsInference("old_logprobs"),
            "ref.inference": RefInference(restricted=evaluated.skews(generation.temperature)),
            "actor.train": self._train,
            **make_reward_methods(reward),
            **make_reward_methods(reward, prefix=GREEDY),
        }
        used = {call.name for g in (graph, eval_graph) if g is not None for call in g.calls}
        super().__init__(
            graph=graph,
            eval_graph=eval_graph,
            methods={name: method for name, method in offered.items() if name in used},
            temperature=generation.temperature,
        )

    def state_dict(self) -> dict[str, float]:
        """Save the KL coefficient."""
        return self._train.kl.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` saved."""
        self._train.kl.load_state_dict(state)
