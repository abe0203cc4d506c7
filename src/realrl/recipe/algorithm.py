"""Description of an algorithm: everything that other parts of the package need to know about it."""

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
    """The head of a role's model, and the roles from which it takes settings that the recipe leaves out."""

    head: Head
    weights_from: str | None = None
    """Role that supplies path or shape, and tokenizer. None if the recipe must name the source of weights
    itself."""
    dtype_from: str | None = None
    """Role that supplies the dtype. None stands for `weights_from`."""
    weights_else: str | None = None
    """Role that replaces `weights_from` in recipes without that role."""
    optional: bool = False
    """Whether a recipe may leave the role out with `null`."""


@dataclass(frozen=True)
class SummaryMetric:
    """A metric of evaluations that report.json and the table of `realrl report` show."""

    key: str
    """Name in report.json."""
    metric: str
    """Name of the metric, with or without its call."""
    label: str
    """Label in the table."""
    at: Literal["first", "last"] = "last"
    """The evaluation that supplies the value."""


def _one(experiment: Any) -> int:
    return 1


def _say_unknown(experiment: Any) -> str | None:
    return "the algorithm does not say that it can train on portions of a batch (AlgorithmSpec.needs_whole_batch)"


@dataclass(frozen=True, kw_only=True, eq=False)
class AlgorithmSpec:
    """One algorithm. Its functions take a recipe of class `recipe`.

    An inconsistent spec raises DescriptionError with the names of algorithm and field. Everything that depends on a
    recipe, such as its graphs, is checked when a recipe is read (`recipe.graphs`, `recipe.checks`).
    """

    name: str
    """Value of `algorithm` in recipes."""
    recipe: type[Experiment]
    """Class of its recipes; the first sentence of its docstring describes the algorithm."""
    roles: Mapping[str, RoleSpec]
    """The roles of `recipe.models`. The training graph uses all of them, except optional roles that a recipe
    leaves out."""
    form: str
    """Form of the algorithm's records, one of `recipe.forms.FORMS`. Records of this form yield the keys that no
    call produces."""
    train_graph: Callable[[Any], DataflowGraph]
    """Builds the calls of a training step, including mini-batches."""
    eval_graph: Callable[[Any], DataflowGraph] | None
    """Builds the calls of an evaluation step; None for an algorithm without evaluation."""
    generation: Callable[[Any], GenerationConfig] | None
    """Returns the sampling settings of training, from the recipe's section `generation`; None without
    generation."""
    methods: Callable[[Any, DataflowGraph, DataflowGraph | None], Any]
    """Creates a `realrl.algorithms.Algorithm` from a recipe, its training graph and its evaluation graph. Only
    this function may import torch."""
    headlines: tuple[str, ...]
    """Metrics shown on the terminal, as `call/name`."""
    curves: Mapping[str, str]
    """Label of each curve in the picture of `realrl report`, by metric."""
    summary: tuple[SummaryMetric, ...]
    """Metrics that `realrl report` summarises."""
    sample_keys: tuple[str, ...] = ()
    """Keys of the evaluation graph with one number per item. Samples of evaluations show these numbers next to the
    texts."""
    samples_per_prompt: Callable[[Any], int] = _one
    """Number n of samples per prompt in training: items i * n to i * n + n - 1 of a step share the i-th prompt.
    Generation computes the prompt only once for samples that it decodes together. Evaluation uses
    `evaluation.samples` instead."""
    sampling_rounds: Callable[[Any], int] = _one
    """Maximum sampling rounds of a training step (dynamic sampling, DAPO). Each further round replaces the prompts
    whose samples all have the same `score`. The graph must have the key `score`, with one number per item."""
    epochs: Callable[[Any], int] = _one
    """Number of passes of train calls over the items of a step."""
    needs_whole_batch: Callable[[Any], str | None] = _say_unknown
    """Returns why training needs the whole batch, for example "advantages are normalised over the batch"; None if
    `prepare` and `loss` only compare the samples of a prompt, and `stop` does nothing. Only then can training begin
    on portions of a batch (`asynchrony.portions`), for each of which `prepare` is called."""
    experience_calls: tuple[str, ...] = ()
    """Train calls whose `prepare` computes experience like PPO: rewards with a KL penalty, and advantages or
    returns by GAE. The planner adds the measured time of this computation. For all other train calls, it assumes
    that `prepare` takes no time."""
    trains: bool = True
    """Whether steps train. False for an algorithm that only samples; planning then still uses its training
    graph."""
    answers: Callable[[Any], AnswerReader | None] | None = None
    """Returns the reader of final answers in completions, for majority votes. None if rewards do not read
    answers."""
    optional_calls: tuple[str, ...] = ()
    """Calls that only the graphs of some recipes have. Headlines may name them."""
    optional_metrics: tuple[str, ...] = ()
    """Metrics, without their call, that only the runs of some recipes produce. No note appears if they are
    absent."""

    def __post_init__(self) -> None:
        for field, problem in self._problems():
            raise DescriptionError(f"algorithm {self.name}: {field}: {problem}")

    def _problems(self) -> list[tuple[str, str]]:
        """List mistakes as pairs (field, problem), in the order in which they should be fixed."""
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
        """Functions in the description, by field, without default functions."""
        fields = {field: getattr(self, field) for field in _FUNCTIONS}
        return {field: value for field, value in fields.items() if value not in (None, _one, _say_unknown)}

    @property
    def heads(self) -> dict[str, Head]:
        """Head of each role's model, by role."""
        return {role: of.head for role, of in self.roles.items()}

    @property
    def about(self) -> str:
        """One line that describes the algorithm."""
        return " ".join((self.recipe.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")

    def roles_of(self, experiment: Experiment) -> dict[str, RoleSpec]:
        """List the roles that a recipe has."""
        return {role: of for role, of in self.roles.items() if getattr(experiment.models, role) is not None}

    def list_sources_first(self, experiment: Experiment) -> list[str]:
        """List the roles of a recipe. Roles that may take their path from another role come last.

        With this order, an error about a path names the role that sets the path.
        """
        roles = self.roles_of(experiment)
        return sorted(roles, key=lambda role: roles[role].weights_from is not None)

    def eval_generation(self, experiment: Experiment) -> GenerationConfig | None:
        """Return the sampling settings of evaluation: the settings of training with changes from `evaluation`."""
        return None if self.generation is None else experiment.evaluation.change(self.generation(experiment))


SCORE = "score"
"""Key of the scores by which samples of a prompt are compared, see `AlgorithmSpec.sampling_rounds`."""

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
"""Fields that the samples of evaluations may have with every algorithm. The fields after `finished` depend on the
recipe's section `evaluation`."""

_FUNCTIONS = {
    "train_graph": False,
    "eval_graph": True,
    "generation": True,
    "methods": False,
    "samples_per_prompt": False,
    "sampling_rounds": False,
    "epochs": False,
    "needs_whole_batch": False,
    "answers": True,
}
"""The fields that hold functions, and whether None is allowed."""


def _all(values: Any, container: type[Iterable[Any]], kind: type) -> bool:
    """Return whether `values` is a container of this type, and all its values are of type `kind`."""
    if not isinstance(values, container):
        return False
    return all(isinstance(value, kind) for value in values)


def get_eval_generation(experiment: Experiment) -> GenerationConfig:
    """Return the sampling settings of evaluation. Only for recipes that generate."""
    sampling = experiment.spec.eval_generation(experiment)
    assert sampling is not None, "only algorithms that generate ask for it"
    return sampling
