"""Descriptions of the policy gradients without a critic. No torch."""

from realrl.algorithms.policy.graph import make_eval_graph
from realrl.algorithms.policy.report import CURVES, HEADLINES, OPTIONAL_CALLS, OPTIONAL_METRICS, SUMMARY
from realrl.algorithms.policy_gradient.config import PolicyGradientConfig, PolicyGradientExperiment
from realrl.algorithms.policy_gradient.graph import make_policy_gradient_graph
from realrl.algorithms.policy_gradient.presets import PRESETS
from realrl.algorithms.rewards.answers import find_answer_reader
from realrl.config.base import derive_settings
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _make_methods(
    spec: AlgorithmSpec,
    experiment: PolicyGradientExperiment,
    graph: DataflowGraph,
    eval_graph: DataflowGraph | None,
) -> object:
    from realrl.algorithms.policy_gradient.method import PolicyGradientAlgorithm

    return PolicyGradientAlgorithm(
        experiment, graph=graph, eval_graph=eval_graph, eval_generation=spec.eval_generation(experiment)
    )


def make_policy_gradient_spec(name: str) -> AlgorithmSpec:
    """Make the description of a preset."""
    preset = PRESETS[name]
    title = name.title().replace("_", "")
    doc = f"{preset.title} ({preset.source})"
    config = derive_settings(PolicyGradientConfig, f"{title}Config", doc, preset.defaults)
    recipe = derive_settings(PolicyGradientExperiment, f"{title}Experiment", doc, {"policy": config()})
    spec = AlgorithmSpec(
        name=name,
        recipe=recipe,
        roles={
            "actor": RoleSpec("lm"),
            "ref": RoleSpec("lm", weights_from="actor", optional=True),
            "reward": RoleSpec("scalar", optional=True),
        },
        form="prompt",
        train_graph=make_policy_gradient_graph,
        eval_graph=lambda experiment: make_eval_graph(
            reward=experiment.reward, reference=experiment.models.ref is not None
        ),
        generation=lambda experiment: experiment.generation,
        samples_per_prompt=lambda experiment: experiment.policy.samples,
        sampling_rounds=lambda experiment: experiment.policy.sampling_rounds,
        epochs=lambda experiment: experiment.policy.epochs,
        methods=lambda experiment, graph, eval_graph: _make_methods(spec, experiment, graph, eval_graph),
        answers=lambda experiment: find_answer_reader(experiment.reward),
        optional_calls=OPTIONAL_CALLS,
        optional_metrics=OPTIONAL_METRICS,
        headlines=(*HEADLINES, "judge"),
        sample_keys=("score",),
        curves=CURVES,
        summary=SUMMARY,
    )
    return spec


GRPO = make_policy_gradient_spec("grpo")
DR_GRPO = make_policy_gradient_spec("dr_grpo")
DAPO = make_policy_gradient_spec("dapo")
GSPO = make_policy_gradient_spec("gspo")
RLOO = make_policy_gradient_spec("rloo")
REINFORCE_PP = make_policy_gradient_spec("reinforce_pp")
REINFORCE_PP_BASELINE = make_policy_gradient_spec("reinforce_pp_baseline")
REMAX = make_policy_gradient_spec("remax")
