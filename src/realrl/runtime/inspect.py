"""`realrl data`: the records of a recipe as a run would read them, with counts, lengths, fields and samples."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from realrl.algorithms.base.method import FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.data.dataset import Dataset
from realrl.data.tokenization import Row
from realrl.dataflow.environment import ENVIRONMENT_REWARD
from realrl.dataflow.graph import DataflowGraph
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
    _source: int = -1
    _taken: int = 0

    def watch(self, source: int, origin: str, rows: Sequence[Row]) -> None:
        """Count a used item, and keep it if it is one of the first items of its source."""
        self._taken = self._taken + 1 if source == self._source else 1
        self._source = source
        if self._taken <= self.samples:
            self.first.append((origin, rows))
        for row in rows:
            for name, tokens in _measure(row).items():
                self.lengths.setdefault(name, array("l")).append(tokens)

    def see(self, name: str) -> bool:
        """Count a column. Returns False, so that its values are not kept."""
        self.fields[name] += 1
        return False


def _measure(row: Row) -> dict[str, int]:
    if not row.answers:
        return {"prompt": len(row.ids)}
    answers = sum(stop - first for first, stop in row.answers)
    return {"prompt": row.prompt_length, "answers": answers, "whole": len(row.ids)}


def inspect_data(experiment: Experiment, samples: int) -> tuple[Any, list[Inspection]]:
    """Read the records of a recipe. Returns its tokenizer, and inspections of training and evaluation records.

    Unusable records are counted even if they would end a run. Raises UserError if a source cannot be read or has no
    usable record, or if records lack a column that a function needs.
    """
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    data = experiment.data
    too_long = "skip" if (data.on_too_long or data.on_error) == "fail" else data.on_too_long
    data = data.model_copy(update={"on_error": "skip", "on_too_long": too_long})
    algorithm = build_algorithm(experiment)
    environments = None
    if experiment.environment_config is not None:
        environments = Environments(experiment, tokenizer, stop_token_ids)
        environments.close()
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
            inspection.see,
            inspection.watch,
            turns=None if environments is None else environments.template,
        )
        if environments is not None:
            environments.check_fields(name_sources(source), inspection.fields)
            label = environments.label.partition("=")[0]
            inspection.functions[label] = [name for name in inspection.fields if environments.wants(name)]
        known = [*inspection.fields, *([] if environments is None else [ENVIRONMENT_REWARD])]
        for call, function in _load_functions(algorithm, graph).items():
            function.check_fields(name_sources(source), known)
            inspection.functions[call] = [name for name in inspection.fields if function.wants(name)]
        found.append(inspection)
    return tokenizer, found


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
