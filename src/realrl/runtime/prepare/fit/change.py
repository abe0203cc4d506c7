"""Changes of a user's recipe, plan file or devices. No torch."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace

from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.scenario import Scenario
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import apply_overrides, parse_experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.prepare.scenarios import Measured, make_scenario


@dataclass(frozen=True)
class Draft:
    """Run settings that may be changed: recipe, plan file, devices."""

    experiment: Experiment
    spec: ClusterSpec
    """Devices of the run."""
    plan: Plan | None = None
    """Content of the plan file; None where the recipe names a preset or a search."""
    measured: Measured = field(default_factory=Measured)

    def scenario(self) -> Scenario:
        """Describe the training step; UserError if the shape of a model cannot be found."""
        return make_scenario(self.experiment, self.spec, self.measured)


@dataclass(frozen=True)
class Change:
    """A change that a user can write, as a function of drafts.

    `apply` raises UserError where the change is not possible.
    """

    text: str
    """Text to write, for example `data.batch=32`, or the devices to use."""
    apply: Callable[[Draft], Draft]
    preposition: str = "with"


Attempts = Generator[Change, bool, None]
"""Generator of changes of one kind, the mildest first.

Each is answered by whether everything fits with it; a source may then look for something milder, and what it
last found counts.
"""


def in_order(changes: Iterable[Change]) -> Attempts:
    """Changes of which the first that helps is constraints."""
    for change in changes:
        if (yield change):
            return


def set_fields(*overrides: str) -> Change:
    """Change fields of the recipe, each as `key=value`."""

    def apply(draft: Draft) -> Draft:
        document = apply_overrides(draft.experiment.model_dump(mode="json"), overrides)
        return replace(draft, experiment=parse_experiment(document))

    return Change(" ".join(overrides), apply)


def is_wide(config: ModelConfig) -> bool:
    """Tell whether a model takes less memory in bfloat16."""
    return config.dtype != "bfloat16" and config.quantised is None


def list_halves(number: int, least: int) -> list[int]:
    """Half of a number, a quarter, and so on down to `least`."""
    found = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found
