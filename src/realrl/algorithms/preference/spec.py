"""Descriptions of the algorithms that learn from preference pairs. No torch."""

from realrl.algorithms.preference.config import PreferenceConfig, PreferenceExperiment
from realrl.algorithms.preference.graph import make_preference_eval_graph, make_preference_graph
from realrl.algorithms.preference.presets import PRESETS
from realrl.algorithms.preference.report import CURVES, HEADLINES, SUMMARY
from realrl.config.base import derive_settings
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _make_methods(
    experiment: PreferenceExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.preference.method import preference_algorithm

    return preference_algorithm(experiment.preference, graph, eval_graph)


def make_preference_spec(name: str) -> AlgorithmSpec:
    """Make the description of a preset."""
    preset = PRESETS[name]
    doc = f"{preset.title} ({preset.source})"
    config = derive_settings(PreferenceConfig, f"{name.title()}Config", doc, preset.defaults)
    recipe = derive_settings(PreferenceExperiment, f"{name.title()}Experiment", doc, {"preference": config()})
    return AlgorithmSpec(
        name=name,
        recipe=recipe,
        roles={
            "actor": RoleSpec("lm"),
            "ref": RoleSpec("lm", weights_from="actor", optional=True),
        },
        form="pair",
        train_graph=make_preference_graph,
        eval_graph=make_preference_eval_graph,
        generation=None,
        methods=_make_methods,
        optional_calls=("ref.inference",),
        headlines=HEADLINES,
        curves=CURVES,
        summary=SUMMARY,
    )


DPO = make_preference_spec("dpo")
ORPO = make_preference_spec("orpo")
SIMPO = make_preference_spec("simpo")
