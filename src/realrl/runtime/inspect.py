"""`realrl data`: the records of a recipe as a run would read them, with counts, lengths, fields and samples."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from realrl.algorithms.base.method import FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.data.dataset import Dataset
from realrl.data.tokenization import Row
from realrl.dataflow.environment import ENVIRONMENT_REWARD
from realrl.dataflow.graph import DataflowGraph
from realrl.environments.pool import Failure
from realrl.recipe.experiment import Experiment
from realrl.recipe.sources import name_sources
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.prepare.inputs import load_shared_tokenizer, load_stop_token_ids


@dataclass
class Inspection:
    """Collects information about the records of `data.train` or `data.eval`.

    Unusable records are counted, and reading continues.
    """

    name: str
    """`train` or `eval`."""
    samples: int
    """Number of items to keep as samples."""
    data: Dataset | None = None
    lengths: dict[str, array] = field(default_factory=dict)
    """Numbers of tokens of all used rows, separately for their `prompt`, their `answers` and the `whole` row."""
    first: list[tuple[str, Sequence[Row]]] = field(default_factory=list)
    """The first items of each source, with their origin FILE:LINE and their rows."""
    fields: Counter[str] = field(default_factory=Counter)
    """Number of records that have each extra column."""
    functions: dict[str, list[str]] = field(default_factory=dict)
    """Columns that each function receives."""
    openings: list[list[int] | str] = field(default_factory=list)
    """For each of the first items: the tokens that an environment adds to its prompt, or how `reset` failed."""
    _source: int = -1
    _taken: int = 0
    _count: int = 0
    _indices: list[int] = field(default_factory=list)
    """Positions of the first items in `data`."""

    def watch(self, source: int, origin: str, rows: Sequence[Row]) -> None:
        """Count a used item, and keep it if it is one of the first items of its source."""
        self._taken = self._taken + 1 if source == self._source else 1
        self._source = source
        if self._taken <= self.samples:
            self.first.append((origin, rows))
            self._indices.append(self._count)
        self._count += 1
        for row in rows:
            for name, tokens in _measure(row).items():
                self.lengths.setdefault(name, array("l")).append(tokens)

    def see(self, name: str, environments: Environments | None) -> bool:
        """Count a column. Returns whether its values are kept, because the environment takes them."""
        self.fields[name] += 1
        return environments is not None and environments.wants(name)

    def open_first(self, environments: Environments, seed: int) -> None:
        """Start a trajectory for each of the first items, unless agents write the prompts. `seed`: the run's
        seed."""
        if environments.runs:
            return
        assert self.data is not None, "it has been read"
        further = self.data.further_fields(self._indices)
        records = [
            environments.make_record({name: values[i] for name, values in further.items()}, (seed, 0, place))
            for i, place in enumerate(self._indices)
        ]
        for number, answer in environments.reset(records):
            if isinstance(answer, Failure):
                self.openings.append(f"{environments.label} {answer.reason}")
            else:
                self.openings.append(environments.template.open(answer["observation"]))
            environments.pool.drop(number, close=True)


def _measure(row: Row) -> dict[str, int]:
    if not row.answers:
        return {"prompt": len(row.ids)}
    answers = sum(stop - first for first, stop in row.answers)
    return {"prompt": row.prompt_length, "answers": answers, "whole": len(row.ids)}


def inspect_data(experiment: Experiment, samples: int) -> tuple[Any, list[Inspection], "Turns | None"]:
    """Read the records of a recipe.

    Returns its tokenizer, inspections of training and evaluation records, and the turns of its environment, if it
    has one. An environment starts a trajectory for each item to show.

    Unusable records are counted even if they would end a run. Raises UserError if a source cannot be read or has no
    usable record, or if records lack a column that a function or the environment needs.
    """
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    if experiment.environment_config is None:
        return tokenizer, _inspect(experiment, samples, tokenizer, stop_token_ids, None), None
    environments = Environments(experiment, tokenizer, stop_token_ids)
    try:
        found = _inspect(experiment, samples, tokenizer, stop_token_ids, environments)
        return tokenizer, found, _make_turns(environments, tokenizer, stop_token_ids)
    finally:
        environments.close()


@dataclass(frozen=True)
class Turns:
    """What a trajectory looks like after its first observation, or its first prompt by an agent."""

    label: str
    """The setting with the name of the environment."""
    runs: bool
    """Whether the environment is an agent."""
    tools: Sequence[Mapping[str, Any]] | None
    """Schemas of the tools; None if there are none."""
    row: Row
    """Two turns of the model with an observation between them. Their texts are placeholders."""


_TURN, _OBSERVATION, _LAST = "a turn of the model", "what the environment answers", "the next turn"


def _make_turns(environments: Environments, tokenizer: Any, stop_token_ids: Sequence[int]) -> Turns:
    """Write turns as in a run, with placeholders for the texts of the model and of the environment."""
    first, last = (
        [*tokenizer(text, add_special_tokens=False)["input_ids"], stop_token_ids[0]]
        for text in (_TURN, _LAST)
    )
    role = "user" if environments.tools is None else "tool"
    answer = [{"role": role, "name": "tool", "content": _OBSERVATION}]
    between = environments.template.observe(answer, first[-1])
    ids = [*first, *between, *last]
    row = Row(ids, ((0, len(first)), (len(ids) - len(last), len(ids))))
    return Turns(environments.label, environments.runs, environments.tools, row)


def _inspect(
    experiment: Experiment,
    samples: int,
    tokenizer: Any,
    stop_token_ids: tuple[int, ...],
    environments: Environments | None,
) -> list[Inspection]:
    data = experiment.data
    too_long = "skip" if (data.on_too_long or data.on_error) == "fail" else data.on_too_long
    data = data.model_copy(update={"on_error": "skip", "on_too_long": too_long})
    algorithm = build_algorithm(experiment)
    graphs = {
        "train": (data.train, experiment.graph),
        "eval": (data.eval, experiment.eval_graph),
    }
    found = []
    for name, (source, graph) in graphs.items():
        if source is None or graph is None:
            continue
        inspection = Inspection(name, samples)
        inspection.data = Dataset.load(
            source,
            experiment.spec.form,
            graph.sources,
            tokenizer,
            data,
            experiment.seed,
            stop_token_ids,
            partial(inspection.see, environments=environments),
            inspection.watch,
            turns=None if environments is None else environments.template,
        )
        if environments is not None:
            environments.check_fields(name_sources(source), inspection.fields)
            label = environments.label.partition("=")[0]
            inspection.functions[label] = [name for name in inspection.fields if environments.wants(name)]
            inspection.open_first(environments, experiment.seed)
        known = [*inspection.fields, *([] if environments is None else [ENVIRONMENT_REWARD])]
        for call, function in _load_functions(algorithm, graph).items():
            function.check_fields(name_sources(source), known)
            inspection.functions[call] = [name for name in inspection.fields if function.wants(name)]
        found.append(inspection)
    return found


def _load_functions(algorithm: Any, graph: DataflowGraph) -> dict[str, FunctionMethod]:
    """Load the functions that receive columns of records, by call."""
    functions = {
        call.name: cast(FunctionMethod, algorithm.method(call.name))
        for call in graph.functions
        if call.record_fields
    }
    for function in functions.values():
        function.load()
    return functions


def list_refused(experiment: Experiment, inspection: Inspection) -> list[str]:
    """List why a run would refuse the records, one message per setting."""
    data, source = experiment.data, inspection.data
    assert source is not None, "it has been read"
    malformed = source.skipped - source.too_long
    long = source.too_long
    settings = (
        ("on_error", data.on_error, malformed, "malformed"),
        ("on_too_long", data.on_too_long or data.on_error, long, "too long"),
    )
    return [
        f"data.{inspection.name} has {count} that {'is' if count == 1 else 'are'} {what}, where a run ends;"
        f" data.{setting}=skip leaves {'it' if count == 1 else 'them'} out"
        for setting, chosen, count, what in settings
        if count and chosen == "fail"
    ]
