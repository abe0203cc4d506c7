"""Notes of a run: messages for the user about data, models, resuming, and unusual steps."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.algorithms.base.method import Algorithm
from realrl.checkpoint.saved import Restored
from realrl.config.errors import join
from realrl.config.explain import nearest
from realrl.data.dataset import Dataset, SourceCount
from realrl.data.order import Order, count_drawn
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.registry import find_layer_options
from realrl.families.shape import ModelShape
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.evaluation import JUDGE
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import trained_models
from realrl.recipe.training import TrainingConfig
from realrl.runtime.output.earlier import LENGTH, EarlierRun
from realrl.runtime.output.untaught import UntaughtSteps


def list_data_notes(sets: Mapping[str, Dataset | None]) -> Iterator[str]:
    """Yield notes about the records of each data set. `sets` has the data sets by name."""
    known = {name: records for name, records in sets.items() if records is not None}
    for name, records in known.items():
        if records.skipped:
            long = f", {records.too_long} of them too long" if records.too_long else ""
            yield f"data.{name}: skipped {records.skipped} records{long}, first {records.reasons[0]}"
    if "train" in known and any(source.weight != 1 for source in known["train"].sources):
        yield f"data.train: an epoch takes {describe_mixture(known['train'].sources)}"
    paths = {name: {source.path for source in records.sources} for name, records in known.items()}
    for path in sorted(paths.get("train", set()) & paths.get("eval", set())):
        yield f"data.eval: {path} is also in data.train, so evaluations do not show how a model does on new records"
    yield from dict.fromkeys(note for records in known.values() for note in records.notes)


def list_epoch_notes(training: TrainingConfig, order: Order, steps: int) -> Iterator[str]:
    """Yield a note if the steps do not match the requested epochs."""
    if training.steps is not None and training.epochs != TrainingConfig.model_fields["epochs"].default:
        yield f"training.epochs={training.epochs:g} has no effect beside training.steps={training.steps}"
    # Round like `Order.steps`.
    asked, taken = math.ceil(training.epochs * order.size - 1e-9), steps * order.batch
    if training.steps is None and taken > asked:
        yield (
            f"data.batch={order.batch} does not divide the {asked} records of training.epochs={training.epochs:g}:"
            f" the last of the {steps} steps takes {taken - asked} records of the next epoch"
        )


_USUAL_LR = 0.01
"""A note warns of learning rates above this one."""


def list_model_notes(experiment: Experiment, steps: int, fresh: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield notes about models and optimizers. `fresh`: for each role, the tensors that had to be initialised."""
    for role, tensors in fresh.items():
        if tensors:
            yield f"models.{role} starts with a new scoring head ({', '.join(tensors)}), since its path has none"
    for role, config in trained_models(experiment.model_configs).items():
        if config.optimizer.lr > _USUAL_LR:
            yield (
                f"models.{role}.optimizer.lr={config.optimizer.lr:g} is far above usual rates, 1e-7 to 1e-3: AdamW"
                " moves every weight by about this in each step, and most weights are below 0.1"
            )
        if config.optimizer.warmup_steps >= steps > 1:
            yield (
                f"models.{role}.optimizer.warmup_steps={config.optimizer.warmup_steps} is not below the {steps}"
                " steps of this run, so the learning rate only rises"
            )


def list_kernel_notes(experiment: Experiment, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Yield notes about models whose attention cannot use the requested kernels."""
    if "fa4" not in experiment.kernels:
        return
    for role, shape in shapes.items():
        config, reason = getattr(experiment.models, role), None
        if find_layer_options(shape).scores_in_memory:
            reason = "caps or sinks of attention scores"
        elif config.compute_dtype != "bfloat16":
            reason = f"computation in {config.compute_dtype}"
        if reason is not None:
            yield f"kernels=[fa4]: attention of models.{role} keeps built-in kernels: fa4 does not support {reason}"


def list_resume_notes(
    experiment: Experiment, earlier: EarlierRun | None, restored: Restored | None
) -> Iterator[str]:
    """Yield notes about the earlier run and the checkpoint of a resumed run."""
    if earlier is None:
        return
    if restored is None:
        yield "the run in this directory has no checkpoint yet and starts again from its beginning"
        return
    for problem in restored.problems:
        yield f"a checkpoint cannot be used and was put aside: {problem}"
    yield f"continues after step {restored.state.step} from {restored.path}"
    for change in earlier.changed:
        yield f"changed since: {change}"
    # If a number of steps is set, the number of epochs has no effect.
    decisive = LENGTH if experiment.training.steps is None else "training.steps"
    if restored.state.step and any(change.startswith(decisive) for change in earlier.changed):
        for role, config in trained_models(experiment.model_configs).items():
            if (schedule := config.optimizer.schedule) != "constant":
                yield (
                    f"models.{role}: the learning rate now follows the {schedule} schedule of the new length,"
                    " so this run differs from a run that had this length from its start"
                )


def list_state_notes(found: tuple[Path, Mapping[str, Any]] | None) -> Iterator[str]:
    """Yield a note about the saved state from which the algorithm starts.

    `found`: the file of the state, and its values; None without a saved state.
    """
    if found is not None:
        file, state = found
        values = ", ".join(
            f"{name}={value:g}" for name, value in state.items() if isinstance(value, int | float)
        )
        yield f"the algorithm continues from {file} ({values})"


def describe_mixture(sources: Sequence[SourceCount]) -> str:
    """Describe the number of records that an epoch takes from each source."""
    parts = []
    for source in sources:
        drawn = count_drawn((source.items, source.weight))
        parts.append(f"{drawn} of {source.path} ({source.items} records, weight {source.weight:g})")
    return join(parts)


_KEPT = 1000
"""Maximum number of an algorithm's notes that are remembered and not repeated. Notes with numbers may differ in
every step."""


class StepNotes:
    """Writes notes about training steps, and counts skipped optimizer steps and training steps without effect."""

    def __init__(self, algorithm: Algorithm, spec: AlgorithmSpec) -> None:
        self._algorithm, self._spec = algorithm, spec
        self._evaluated: Mapping[str, float] | None = None
        self._said: set[str] = set()
        self._skipped = Counter[str]()
        self.untaught = UntaughtSteps()

    def take_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Remember the metrics of the first evaluation, by `call/name`. This evaluation precedes the first step."""
        if self._evaluated is None:
            self._evaluated = metrics

    def describe_step(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield notes about a step. `step` counts from 1, and `metrics` has values by `call/name`."""
        for call in self._algorithm.graph.calls:
            skipped = int(metrics.get(f"{call.name}/skipped_steps", 0))
            before, self._skipped[call.name] = self._skipped[call.name], self._skipped[call.name] + skipped
            # Report the first skipped step, then every doubling of their number.
            if skipped and before.bit_length() < self._skipped[call.name].bit_length():
                start = f"{call.name}/skipped_for/"
                causes = ", ".join(name.removeprefix(start) for name in metrics if name.startswith(start))
                count = self._skipped[call.name]
                steps = "1 optimizer step" if count == 1 else f"{count} optimizer steps so far"
                yield f"step {step}: {call.name} has skipped {steps}; not finite: {causes}"
        for text in self.untaught.take(metrics):
            yield f"step {step} {text}"
        for text in self._algorithm.notes(metrics):
            if text not in self._said and len(self._said) < _KEPT:
                self._said.add(text)
                yield f"step {step}: {text}"
        if step == 1:
            yield from list_metric_notes(self._spec, self._algorithm.graph, metrics, self._evaluated)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines later notes."""
        return {
            "said": sorted(self._said),
            "skipped": dict(self._skipped),
            "untaught": self.untaught.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._said, self._skipped = set(state["said"]), Counter(state["skipped"])
        self.untaught.load_state_dict(state.get("untaught", {}))  # older versions did not save this

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped optimizer steps of each call that has skipped any."""
        return dict(+self._skipped)


def list_metric_notes(
    spec: AlgorithmSpec,
    graph: DataflowGraph,
    trained: Mapping[str, float],
    evaluated: Mapping[str, float] | None,
) -> Iterator[str]:
    """Yield a note about each metric that `spec` names but the first step and the first evaluation lack.

    `graph`: the calls of a training step. `trained`, `evaluated`: metrics by `call/name`. `evaluated` is None in a
    run without evaluation. Metrics of evaluations may then be missing.
    """
    given = {*trained, *(evaluated or ())}
    for field, name in _named_metrics(spec):
        call, _, last = name.rpartition("/")
        if last in (JUDGE, *spec.optional_metrics) or not _is_expected(
            spec, graph, call, evaluated is not None
        ):
            continue
        # Summaries show only metrics of evaluations.
        found = given if field != "summary" else {*(evaluated or ())}
        if any(metric == name or metric.endswith(f"/{name}") for metric in found):
            continue
        hint = nearest(name, found) or nearest(last, {metric.rpartition("/")[2] for metric in found})
        source = "no evaluation has" if field == "summary" else "no call has given"
        yield (
            f"algorithm {spec.name}: {field}: {source} a metric {name}"
            + (f"; did you mean {hint}?" if hint is not None and hint != name else "")
        )


def _named_metrics(spec: AlgorithmSpec) -> list[tuple[str, str]]:
    """List the metrics that an algorithm's spec names, as pairs (field of the spec, metric)."""
    named = [
        *(("headlines", name) for name in spec.headlines),
        *(("curves", name) for name in spec.curves),
        *(("summary", summary.metric) for summary in spec.summary),
    ]
    return list(dict.fromkeys(named))


def _is_expected(spec: AlgorithmSpec, graph: DataflowGraph, call: str, evaluates: bool) -> bool:
    """Return whether a metric of a call must exist after the first step. An empty `call` stands for any call."""
    if call in spec.optional_calls:  # the recipe may not have these calls
        return False
    if evaluates or spec.eval_graph is None:
        return True
    return any(c.name == call and c.kind is Kind.TRAIN for c in graph.calls)
