"""Description of an algorithm: everything that the rest of the package reads about it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from realrl.config.errors import DescriptionError, join
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import Head
from realrl.recipe.evaluation import JUDGE, AnswerReader
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.forms import FORMS
from realrl.recipe.generation import GenerationConfig

_HEADS = get_args(Head)


@dataclass(frozen=True)
class RoleSpec:
    """Head of a role's model, and the roles that fill in what the recipe leaves out."""

    head: Head
    weights_from: str | None = None
    """Role whose path or shape, and tokenizer, it takes; None where the recipe must say where weights come from."""
    dtype_from: str | None = None
    """Role whose dtype it takes; `weights_from` when not given."""
    weights_else: str | None = None
    """Role that takes the place of `weights_from` in recipes that leave that out."""
    optional: bool = False
    """Whether a recipe may leave the role out: `null`."""


@dataclass(frozen=True)
class SummaryMetric:
    """A metric of evaluations in report.json and in the table of `realrl report`."""

    key: str
    """Name in report.json."""
    metric: str
    """Name of the metric, with or without its call."""
    label: str
    """Label in the table."""
    at: Literal["first", "last"] = "last"
    """The evaluation it is taken from."""


def _one(experiment: Any) -> int:
    return 1


@dataclass(frozen=True, kw_only=True, eq=False)
class AlgorithmSpec:
    """One algorithm. Functions take a recipe of class `recipe`; building a spec that contradicts itself raises
    DescriptionError with the name of the algorithm and of the field.

    What depends on a recipe, such as its graphs, is checked when one is read (`recipe.graphs`, `recipe.checks`).
    """

    name: str
    """Value of `algorithm` in recipes."""
    recipe: type[Experiment]
    """Class of its recipes; the first sentence of its docstring sums up the algorithm."""
    roles: Mapping[str, RoleSpec]
    """The roles of `recipe.models`, all of which the training graph uses, but for optional ones that a recipe
    leaves out."""
    form: str
    """Form of its records, one of `recipe.forms.FORMS`: it yields what no call of the graphs produces."""
    train_graph: Callable[[Any], DataflowGraph]
    """The calls of a training step, mini-batches included."""
    eval_graph: Callable[[Any], DataflowGraph] | None
    """The calls of an evaluation step; None for an algorithm without evaluation."""
    generation: Callable[[Any], GenerationConfig] | None
    """Sampling of training, from the recipe's section `generation`; None where nothing is generated."""
    methods: Callable[[Any, DataflowGraph, DataflowGraph | None], Any]
    """Makes an `algorithms.method.Algorithm` of a recipe, its training graph and its evaluation graph; the only one
    of these functions that may import torch."""
    headlines: tuple[str, ...]
    """Metrics shown on the terminal, as `call/name`."""
    curves: Mapping[str, str]
    """Metric -> label of its curve in the picture of `realrl report`."""
    summary: tuple[SummaryMetric, ...]
    """Metrics that `realrl report` sums up."""
    sample_keys: tuple[str, ...] = ()
    """Keys of the evaluation graph, one number per item, that samples of evaluations show beside their texts."""
    samples_per_prompt: Callable[[Any], int] = _one
    """Samples that training takes of each prompt, n: items i * n to i * n + n - 1 of a step have the i-th prompt,
    which generation computes once for those that it decodes together. Evaluation takes `evaluation.samples`."""
    sampling_rounds: Callable[[Any], int] = _one
    """Most rounds in which a training step samples: prompts whose samples all have the same `score`, a key with a
    number per item that a call produces, are replaced by others in the next round (dynamic sampling, DAPO)."""
    epochs: Callable[[Any], int] = _one
    """Passes of train calls over the items of a step."""
    experience_calls: tuple[str, ...] = ()
    """Train calls whose `prepare` makes experience of generated samples as PPO does: rewards with a KL penalty, and
    advantages or returns by GAE. The planner adds the time of this, which the profiler measures; preparation in
    other train calls counts as free."""
    trains: bool = True
    """Whether steps train; False for one that only samples, whose training graph is what plans are made for."""
    answers: Callable[[Any], AnswerReader | None] | None = None
    """Reader of the final answers of completions, for majority votes; None where rewards read none."""
    optional_calls: tuple[str, ...] = ()
    """Calls that only the graphs of some recipes have; headlines may name them all the same."""
    optional_metrics: tuple[str, ...] = ()
    """Metrics, without their call, that only the runs of some recipes give; a run without them needs no note."""

    def __post_init__(self) -> None:
        for field, problem in self._problems():
            raise DescriptionError(f"algorithm {self.name}: {field}: {problem}")

    def _problems(self) -> list[tuple[str, str]]:
        """List (field, what is wrong with it), the one to fix first in front."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", self.name):
            return [("name", f"{self.name!r} is not letters, digits, - and _, beginning with a letter")]
        found = [*self._type_problems()]
        return found or [*self._recipe_problems(), *self._role_problems(), *self._report_problems()]

    def _type_problems(self) -> list[tuple[str, str]]:
        found = []
        if not (isinstance(self.recipe, type) and issubclass(self.recipe, Experiment)):
            found.append(("recipe", f"{self.recipe!r} is not a class derived from Experiment"))
        if not isinstance(self.roles, Mapping) or not self.roles:
            found.append(("roles", "a mapping from at least one role to its RoleSpec is needed"))
        elif wrong := [role for role, of in self.roles.items() if not isinstance(of, RoleSpec)]:
            found.append(("roles", f"{wrong[0]} has no RoleSpec"))
        for field, optional in _FUNCTIONS.items():
            value = getattr(self, field)
            if not callable(value) and not (optional and value is None):
                found.append((field, f"{value!r} is not a function{' or None' if optional else ''}"))
        return found

    def _recipe_problems(self) -> list[tuple[str, str]]:
        found = []
        if not self.recipe.__doc__ or self.recipe.__doc__ == Experiment.__doc__:
            found.append(("recipe", f"{self.recipe.__name__} has no docstring to sum the algorithm up"))
        if self.form not in FORMS:
            found.append(("form", f"{self.form!r} is not one of {', '.join(FORMS)}"))
        section = self.recipe.model_fields.get("generation")
        has_section = section is not None and section.annotation is GenerationConfig
        if self.generation is None and section is not None:
            found.append(("generation", f"None, but {self.recipe.__name__} has a section generation"))
        if self.generation is not None and not has_section:
            found.append(
                ("generation", f"{self.recipe.__name__} needs a section generation: GenerationConfig for it")
            )
        if self.generation is None and self.samples_per_prompt is not _one:
            found.append(("samples_per_prompt", "an algorithm that does not generate draws no samples"))
        if self.generation is None and self.sampling_rounds is not _one:
            found.append(("sampling_rounds", "an algorithm that does not generate samples nothing"))
        if self.generation is None and self.experience_calls:
            found.append(("experience_calls", "an algorithm that does not generate has no experience"))
        return found

    def _role_problems(self) -> list[tuple[str, str]]:
        models = self.recipe.model_fields["models"].annotation
        if not (isinstance(models, type) and issubclass(models, Models)) or models is Models:
            return [("recipe", f"{self.recipe.__name__}.models is not a class derived from Models")]
        fields = models.model_fields
        if set(fields) != set(self.roles):
            have, want = (", ".join(names) or "none" for names in (fields, self.roles))
            return [("roles", f"{want}, but {models.__name__} has {have}")]
        found = []
        for role, of in self.roles.items():
            if of.head not in _HEADS:
                found.append(("roles", f"{role}: head {of.head!r} is not {join(_HEADS, 'or')}"))
            for field in ("weights_from", "dtype_from", "weights_else"):
                source = getattr(of, field)
                if source is not None and (source == role or source not in self.roles):
                    found.append(("roles", f"{role}: {field}={source!r} is not another role"))
            source_spec = self.roles.get(of.weights_from or "")
            if source_spec is not None and source_spec.weights_from is not None:
                found.append(("roles", f"{role}: weights_from={of.weights_from!r} has no weights of its own"))
            if of.optional and (
                fields[role].is_required() or type(None) not in get_args(fields[role].annotation)
            ):
                found.append(
                    (
                        "roles",
                        f"{role}: is optional, so {models.__name__}.{role} needs a default, and may be None",
                    )
                )
            if not of.optional and fields[role].is_required() is not (of.weights_from is None):
                default = "a default" if of.weights_from else "no default"
                found.append(
                    ("roles", f"{role}: with this weights_from, {models.__name__}.{role} needs {default}")
                )
            left_out = self.roles.get(of.weights_from or "")
            if (left_out is not None and left_out.optional) is not (of.weights_else is not None):
                found.append(("roles", f"{role}: weights_else goes with a weights_from that is optional"))
        return found

    def _report_problems(self) -> list[tuple[str, str]]:
        found = []
        if not _all(self.headlines, tuple, str):
            found.append(("headlines", "a tuple of call/name is needed"))
        for field, names in (
            ("optional_calls", "calls"),
            ("experience_calls", "calls"),
            ("optional_metrics", "metrics"),
        ):
            if not _all(getattr(self, field), tuple, str):
                found.append((field, f"a tuple of names of {names} is needed"))
        if not _all(self.sample_keys, tuple, str):
            found.append(("sample_keys", "a tuple of keys is needed"))
        elif clash := [key for key in self.sample_keys if key in SAMPLE_FIELDS]:
            found.append(("sample_keys", f"{clash[0]} is what samples show anyway"))
        if not isinstance(self.curves, Mapping) or not _all(
            (*self.curves, *self.curves.values()), tuple, str
        ):
            found.append(("curves", "a mapping from metrics to labels is needed"))
        if not _all(self.summary, tuple, SummaryMetric):
            found.append(("summary", "a tuple of SummaryMetric is needed"))
        elif len({metric.key for metric in self.summary}) < len(self.summary):
            found.append(("summary", "two metrics have one key"))
        return found

    @property
    def given_functions(self) -> dict[str, Callable[..., Any]]:
        """Fields that are functions, without defaults -> the function."""
        fields = {field: getattr(self, field) for field in _FUNCTIONS}
        return {field: value for field, value in fields.items() if value is not None and value is not _one}

    @property
    def heads(self) -> dict[str, Head]:
        """Role -> what its model computes."""
        return {role: of.head for role, of in self.roles.items()}

    @property
    def about(self) -> str:
        """One line about the algorithm."""
        return " ".join((self.recipe.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")

    def roles_of(self, experiment: Experiment) -> dict[str, RoleSpec]:
        """List the roles that a recipe has."""
        return {role: of for role, of in self.roles.items() if getattr(experiment.models, role) is not None}

    def list_sources_first(self, experiment: Experiment) -> list[str]:
        """List the roles of a recipe, those that may take their path from another one last.

        An error about a path then names the role that has it.
        """
        roles = self.roles_of(experiment)
        return sorted(roles, key=lambda role: roles[role].weights_from is not None)

    def eval_generation(self, experiment: Experiment) -> GenerationConfig | None:
        """Find the sampling of evaluation: that of training but for what the section `evaluation` changes."""
        return None if self.generation is None else experiment.evaluation.change(self.generation(experiment))


def get_spec(experiment: Experiment) -> AlgorithmSpec:
    """Get the description of a recipe's algorithm."""
    spec = experiment._spec
    assert isinstance(spec, AlgorithmSpec), "recipes are read by parse_experiment"
    return spec


SCORE = "score"
"""Key of the numbers by which samples of a prompt are compared, see `AlgorithmSpec.sampling_rounds`."""

SAMPLE_FIELDS = (
    "prompt",
    "completion",
    "finished",
    "answer",
    JUDGE,
    "against",
    "against_score",
    "against_judge",
)
"""Fields of samples of evaluations, whatever the algorithm; those after `finished` only where the recipe's section
`evaluation` asks for them."""

_FUNCTIONS = {
    "train_graph": False,
    "eval_graph": True,
    "generation": True,
    "methods": False,
    "samples_per_prompt": False,
    "sampling_rounds": False,
    "epochs": False,
    "answers": True,
}
"""Fields that are functions -> whether they may be None."""


def _all(values: Any, container: type[Iterable[Any]], kind: type) -> bool:
    """Whether `values` is a container of nothing but values of a kind."""
    if not isinstance(values, container):
        return False
    return all(isinstance(value, kind) for value in values)
