"""The recipe behind a session: models with roles, and the calls that a loop of your own may make. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError, create_model

from realrl.config.errors import UserError, join
from realrl.config.explain import explain
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import Head
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec
from realrl.recipe.checks import complete
from realrl.recipe.data import DataConfig
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig

SEQUENCES = "sequences"
"""Key of prompts with their answers."""


class SessionExperiment(Experiment):
    """Calls of a loop that the user writes, in no fixed order."""

    data: DataConfig = DataConfig(train="none")
    """Not used: the loop brings its own data."""
    generation: GenerationConfig = GenerationConfig()

    @cached_property
    def graph(self) -> DataflowGraph:
        """Every call that the loop may make, once. The calls exchange no keys, because the loop passes the data."""
        trained = {
            role for role, config in self.model_configs.items() if isinstance(config, TrainedModelConfig)
        }
        calls = [
            call
            for role, head in self.spec.heads.items()
            for call in list_calls(role, head, trained=role in trained)
        ]
        keys = dict.fromkeys(key for call in calls for key in (*call.inputs, *call.outputs))
        return DataflowGraph(calls, [Key(key, "int64") for key in keys])

    @cached_property
    def eval_graph(self) -> DataflowGraph | None:
        """A session has no evaluation of its own."""
        return None


def list_calls(role: str, head: Head, *, trained: bool) -> list[Call]:
    """List the calls of a role: generate for a language model, inference, and train for a trained role."""
    calls = [Call(f"{role}.inference", role, Kind.INFERENCE, (SEQUENCES,), (), (SEQUENCES,))]
    if head == "lm":
        made = f"{role}_"
        generated = (f"{made}{SEQUENCES}",)
        calls.insert(
            0,
            Call(f"{role}.generate", role, Kind.GENERATE, ("prompts",), generated, ("prompts",), prefix=made),
        )
    if trained:
        calls.append(Call(f"{role}.train", role, Kind.TRAIN, (SEQUENCES,), (), (SEQUENCES,)))
    return calls


@dataclass(frozen=True)
class SessionModels:
    """What a session is made of, as its user gives it; ranks make the same recipe from it."""

    models: Mapping[str, Any]
    """Section of each role, as in recipes."""
    train: Sequence[str]
    """The trained roles."""
    scalar: Sequence[str]
    """The roles with a scalar head, such as critics and reward models; the other roles are language models."""
    placements: Mapping[str, str]
    """Placements of some calls in text form, which replace those of the recipe's plan."""
    settings: Mapping[str, Any]
    """Other settings at the top level of recipes."""

    def make_recipe(self) -> Experiment:
        """Make the recipe. Raises UserError for a mistake."""
        models = self.models
        if not models:
            raise UserError("models: give at least one model, as a mapping from role to model")
        for option, roles in (("train", self.train), ("scalar", self.scalar)):
            unknown = [role for role in roles if role not in models]
            if unknown:
                raise UserError(f"{option}: {unknown[0]} is not one of the models {join([*models])}")
        for role in models:
            if not role.isidentifier():
                raise UserError(f"models: {role!r} is not a name of letters, digits and _")
        fields: dict[str, Any] = {
            role: (TrainedModelConfig if role in self.train else ModelConfig, ...) for role in models
        }
        section = create_model("Models", __base__=Models, __doc__="The models of a session.", **fields)
        about = SessionExperiment.__doc__
        recipe = create_model("Session", __base__=SessionExperiment, __doc__=about, models=(section, ...))
        spec = AlgorithmSpec(
            name="session",
            recipe=recipe,
            roles={role: RoleSpec("scalar" if role in self.scalar else "lm") for role in models},
            form="prompt",
            train_graph=lambda experiment: experiment.graph,
            eval_graph=None,
            generation=lambda experiment: experiment.generation,
            methods=lambda *_: None,
            trains=bool(self.train),
            headlines=(),
            curves={},
            summary=(),
        )
        given = {"algorithm": "session", "run_dir": ".", **self.settings, "models": dict(models)}
        try:
            experiment = recipe.model_validate(given)
        except ValidationError as error:
            raise UserError(explain(error, recipe)) from None
        if experiment.asynchrony.active:
            raise UserError(
                "asynchrony: the program that opens a session decides when it samples; leave it out"
            )
        return complete(experiment, spec)
