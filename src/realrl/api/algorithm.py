"""One class per algorithm: a recipe in Python, with the methods that train, evaluate and plan it."""

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from realrl.api.arguments import read_arguments
from realrl.api.errors import plain_errors
from realrl.api.notebook import show_progress
from realrl.api.run_results import Run
from realrl.config.errors import UserError
from realrl.config.script_objects import CALLBACKS, OBJECTS_VARIABLE, find_objects, pack_objects
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.load import apply_overrides, dump_experiment, parse_experiment
from realrl.recipe.registry import BUILT_IN, find_algorithm, list_algorithms
from realrl.runtime.callbacks import CallbackObserver, check_callbacks
from realrl.runtime.supervision.failures import make_error

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport
    from realrl.runtime.observer import RunObserver

_WORDS = {"dr": "Dr", "pp": "PP", "remax": "ReMax", "simpo": "SimPO"}
_ACRONYMS = {"sft", "ppo", "grpo", "dapo", "gspo", "rloo", "dpo", "orpo", "kto"}


def name_class(algorithm: str) -> str:
    """Name the class of an algorithm: `dr_grpo` is `DrGRPO`."""
    words = algorithm.replace("-", "_").split("_")
    return "".join(
        _WORDS.get(word) or (word.upper() if word in _ACRONYMS else word.title()) for word in words
    )


class Algorithm:
    """A recipe in Python. Its classes, such as `realrl.GRPO`, take settings of recipes as keyword arguments."""

    reference: ClassVar[str]
    """Name of the algorithm in recipes, or its FILE.py."""
    spec: ClassVar[AlgorithmSpec]

    @plain_errors
    def __init__(self, model: Any = None, *, callbacks: Any = (), **settings: Any) -> None:
        """Read and check the recipe; see docs/python.md for the arguments.

        `callbacks`: functions of a `realrl.Step`, called after each training step, and objects with `on_step` or
        `on_evaluation`.

        `run_dir` is `runs/ALGORITHM-HASH` by default, with a hash of the recipe: the same script resumes its run.
        Raises UserError for a mistake in the arguments.
        """
        self._callbacks = check_callbacks(callbacks)
        arguments = settings if model is None else {"model": model, **settings}
        found = read_arguments(self.spec, self.reference, arguments)
        if "run_dir" not in found:
            found["run_dir"] = f"runs/{self.spec.name}-{_hash(found)}"
        self._settings = found
        self.experiment = parse_experiment(found)
        """The validated recipe."""

    @plain_errors
    def train(self) -> Run:
        """Train until the end, or resume the run in `run_dir`. Returns the run.

        Uses the processes of torchrun or srun; otherwise starts one local process per device, and trains a recipe
        for a single device in this process. A script needs no `__main__` guard. Raises UserError or RunError.
        """
        from realrl.runtime.processes.environment import set_library_defaults
        from realrl.runtime.processes.slurm import join_slurm_step
        from realrl.runtime.start import start_training

        set_library_defaults()
        join_slurm_step()
        objects = find_objects(self.experiment.model_dump(mode="json"))
        if self._callbacks:
            objects[CALLBACKS] = self._callbacks
        with show_progress():
            outcome = start_training(
                self.experiment,
                self._observe,
                _say,
                here=True,
                objects=(lambda: pack_objects(objects)) if objects else None,
            )
        # Cycles hold process groups. If their threads live when the interpreter ends, they abort it.
        gc.collect()
        if outcome.cause is not None:
            raise make_error(outcome.cause)
        return Run(self.experiment.run_dir)

    @contextmanager
    def _observe(self) -> "Iterator[RunObserver]":
        from realrl.cli.progress import Progress, find_notebook

        with Progress(find_notebook()) as progress:
            yield CallbackObserver(progress, self._callbacks)

    def resume(self) -> Run:
        """Resume the run in `run_dir` from its last checkpoint. Raises UserError if there is no run to resume."""
        Run(self.experiment.run_dir)
        return self.train()

    @plain_errors
    def evaluate(self) -> dict[str, float]:
        """Evaluate the models of `models.*.path` on `eval_data`, without training. Returns the metrics.

        It runs in this process. Raises UserError if the recipe has no evaluation, or needs several processes.
        """
        from realrl.runtime.evaluation.run import evaluate_recipe
        from realrl.runtime.processes.environment import set_library_defaults, under_launcher
        from realrl.runtime.processes.slurm import join_slurm_step
        from realrl.runtime.start import find_cluster

        set_library_defaults()
        join_slurm_step()
        size = find_cluster(self.experiment).size
        if size > 1 and not under_launcher():
            raise UserError(f"evaluate() runs in one process, not on {size} devices; use `realrl eval`")
        report = evaluate_recipe(self.experiment, lambda text: _say(f"note: {text}"))
        return {} if report is None else dict(report.result.metrics)

    @plain_errors
    def plan(self, cluster: str | None = None, *, effort: float | None = None) -> "Planned":
        """Find the fastest plan on a cluster such as `h100:4x8`, and predict its time and memory. Needs no GPU.

        Without `cluster`, it plans for the recipe's cluster, or for this machine's CPUs. Raises UserError if no
        plan fits.
        """
        from realrl.cli.planning import input as plan_input
        from realrl.planner.report.make import make_report
        from realrl.planner.search.shortage import DoesNotFit
        from realrl.runtime.prepare.fit.search import explain_no_plan
        from realrl.runtime.prepare.scenarios import read_constraints

        # Devices decide what `dtype: auto` means, so the settings are read again for them.
        overrides = plan_input.list_device_overrides(cluster)
        experiment = parse_experiment(apply_overrides(self._settings, overrides))
        draft, scenario, source = plan_input.read_scenario(experiment, cluster, None, None)
        constraints = read_constraints(experiment, scenario.spec)
        try:
            report = make_report(scenario, effort=effort, constraints=constraints)
        except DoesNotFit as error:
            raise explain_no_plan(draft, scenario.on(draft.spec), error.shortage, constraints) from None
        return Planned(report, source)

    @plain_errors
    def check(self) -> bool:
        """Check records, loss, rewards and state on tiny models, and print the findings (docs/check.md).

        Returns whether all is well. Raises UserError for a mistake in the recipe.
        """
        import subprocess
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(prefix="realrl-check-") as directory:
            recipe, functions = Path(directory, "recipe.yaml"), Path(directory, "objects")
            recipe.write_text(dump_experiment(self.experiment, secrets=True), encoding="utf-8")
            functions.write_bytes(pack_objects(find_objects(self.experiment.model_dump(mode="json"))))
            # A process of its own, since the processes of a check would run a script without a guard again.
            checking = subprocess.Popen(
                [sys.executable, "-m", "realrl", "check", str(recipe)],
                env={**os.environ, OBJECTS_VARIABLE: str(functions)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            assert checking.stdout is not None, "it is a pipe"
            line = ""
            for line in checking.stdout:
                print(line, end="")
            if checking.wait() not in (0, 1):
                raise UserError(line.strip().removeprefix("error: "))
        return checking.returncode == 0

    @plain_errors
    def show(self) -> None:
        """Print the recipe with every default, its dataflow graphs and its plan."""
        from realrl.cli.show import show_experiment

        show_experiment(self.experiment, programs=False)

    def recipe(self) -> str:
        """Write the recipe as YAML, with every field and without secrets.

        `realrl train` runs it alike, if its functions are in files: those of a script are named
        `realrl_objects:NAME`.
        """
        return dump_experiment(self.experiment)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_dir={self.experiment.run_dir!r})"


class Planned:
    """The best plan for a recipe on a cluster, with its prediction."""

    def __init__(self, report: "PlanReport", source: str) -> None:
        """`source` says where the predicted times come from."""
        self.report, self._source = report, source

    @property
    def seconds(self) -> float:
        """Predicted steady-state seconds per training step."""
        return self.report.chosen.repeated_seconds

    def save(self, file: str | Path) -> None:
        """Write the plan file, for `plan=FILE`."""
        self.report.chosen.plan.save(Path(file), self.report.scenario.graph)

    def __str__(self) -> str:
        from rich.console import Console

        from realrl.cli.planning.tables import print_report

        console = Console(record=True, file=open(os.devnull, "w"), width=120)  # noqa: SIM115
        print_report(self.report, self._source, console)
        return console.export_text()


@cache
def find_class(name: str) -> type[Algorithm] | None:
    """Find the class of an installed algorithm by its name; None if there is none."""
    for algorithm in (*BUILT_IN, *(other for other in list_algorithms() if other not in BUILT_IN)):
        if name_class(algorithm) == name:
            return make_class(algorithm)
    return None


@cache
def make_class(reference: str) -> type[Algorithm]:
    """Make the class of an algorithm: an installed name, or a FILE.py or package.module of your own.

    Raises UserError if there is none.
    """
    spec, resolved = find_algorithm(reference)
    members = {"reference": resolved, "spec": spec, "__doc__": spec.about, "__module__": "realrl"}
    return type(name_class(spec.name), (Algorithm,), members)


def _hash(settings: Mapping[str, Any]) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
