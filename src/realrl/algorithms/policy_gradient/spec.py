"""Descriptions of the policy gradients without a critic. No torch."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from pydantic import create_model

from realrl.algorithms.policy.graph import make_eval_graph
from realrl.algorithms.policy.report import CURVES, HEADLINES, OPTIONAL_CALLS, OPTIONAL_METRICS, SUMMARY
from realrl.algorithms.policy_gradient.config import PolicyGradientConfig, PolicyGradientExperiment
from realrl.algorithms.policy_gradient.graph import make_train_graph
from realrl.algorithms.policy_gradient.presets import PRESETS
from realrl.config.base import Settings
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _derive(base: type[Settings], name: str, doc: str, defaults: Mapping[str, Any]) -> Any:
    """Derive settings from `base` that have other defaults, and the same documentation of fields."""
    fields: dict[str, Any] = {}
    for field, default in defaults.items():
        info = copy(base.model_fields[field])
        info.default = default
        if isinstance(default, Settings):
            info.annotation = type(default)
        fields[field] = (info.annotation, info)
    return create_model(name, __base__=base, __doc__=doc, __module__=__name__, **fields)


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


def make_spec(name: str) -> AlgorithmSpec:
    """Make the description of a preset."""
    preset = PRESETS[name]
    title = name.title().replace("_", "")
    doc = f"{preset.title} ({preset.source})"
    config = _derive(PolicyGradientConfig, f"{title}Config", doc, preset.defaults)
    recipe = _derive(PolicyGradientExperiment, f"{title}Experiment", doc, {"policy": config()})
    spec = AlgorithmSpec(
        name=name,
        recipe=recipe,
        roles={
            "actor": RoleSpec("lm"),
            "ref": RoleSpec("lm", weights_from="actor", optional=True),
            "reward": RoleSpec("scalar", optional=True),
        },
        form="prompt",
        train_graph=make_train_graph,
        eval_graph=lambda experiment: make_eval_graph(
            reward=experiment.reward, reference=experiment.models.ref is not None
        ),
        generation=lambda experiment: experiment.generation,
        samples_per_prompt=lambda experiment: experiment.policy.samples,
        epochs=lambda experiment: experiment.policy.epochs,
        methods=lambda experiment, graph, eval_graph: _make_methods(spec, experiment, graph, eval_graph),
        optional_calls=OPTIONAL_CALLS,
        optional_metrics=OPTIONAL_METRICS,
        headlines=HEADLINES,
        sample_keys=("score",),
        curves=CURVES,
        summary=SUMMARY,
    )
    return spec


GRPO = make_spec("grpo")
DR_GRPO = make_spec("dr_grpo")
DAPO = make_spec("dapo")
GSPO = make_spec("gspo")
RLOO = make_spec("rloo")
REINFORCE_PP = make_spec("reinforce_pp")
REINFORCE_PP_BASELINE = make_spec("reinforce_pp_baseline")
REMAX = make_spec("remax")
