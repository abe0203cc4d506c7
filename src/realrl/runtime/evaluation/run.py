"""`realrl eval`: evaluate a recipe without training, compare it with another model, and write result files."""

import gc
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from realrl.algorithms.build import build_algorithm
from realrl.algorithms.rewards.scorers import load_judge
from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.config.files import reason_of, write_whole
from realrl.config.json_file import replace_infinite, write_rows
from realrl.data.records import RecordReader, read_records
from realrl.dataflow.call import Kind
from realrl.engine.optional_kernels import use_kernels
from realrl.families.shape import ModelShape
from realrl.model.group import Group
from realrl.plan.communicators import list_rank_sets, reallocates
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.evaluation.answers import EvaluationReport, EvaluationResult
from realrl.runtime.evaluation.evaluate import Evaluation
from realrl.runtime.output.notes import list_data_notes, list_kernel_notes
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.environments import open_environments
from realrl.runtime.prepare.inputs import (
    RecordLoader,
    load_functions,
    load_shared_tokenizer,
    load_stop_token_ids,
)
from realrl.runtime.prepare.job import Job, make_evaluation_job
from realrl.runtime.processes.process import Process, connect, resolve_cluster
from realrl.runtime.processes.startup import agree_on_plan, find_least_device
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.trace import Trace
from realrl.runtime.worker.worker import Worker

Result = TypeVar("Result")


class EvaluationRun:
    """Evaluation of a recipe on one rank, with the weights in `models.*.path`."""

    def __init__(
        self,
        job: Job,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        read: RecordReader = read_records,
    ) -> None:
        """Prepare everything except weights.

        `groups`: the communication groups of all placements, by their ranks. `read` reads the records of a source.

        Raises UserError for mistakes that can be found without weights.
        """
        experiment, phase = job.experiment, job.phases["eval"]
        algorithm = build_algorithm(experiment)
        tokenizer = load_shared_tokenizer(experiment)
        stop_token_ids = load_stop_token_ids(experiment, tokenizer)
        self._roles = Roles(job, process, groups, temperature=algorithm.temperature)
        functions = load_functions(algorithm, [phase], process.rank)
        # Only one rank calls the user's judge, so only this rank loads it.
        judge = load_judge(experiment.evaluation.judge) if process.rank == WRITER else None
        self._environments = open_environments(job, process.rank, tokenizer, stop_token_ids)
        loader = RecordLoader(
            experiment, tokenizer, stop_token_ids, functions, read, environments=self._environments
        )
        self.records = loader.load_eval(phase, judge)
        worker = Worker(
            process,
            self._roles,
            algorithm,
            stop_token_ids,
            Trace(process.rank),
            tokenizer,
            environments=self._environments,
        )
        self.evaluation = Evaluation(
            experiment, process, worker, phase, self.records, tokenizer=tokenizer, judge=judge
        )

    @property
    def origins(self) -> list[str]:
        """Origin of each record, as FILE:LINE."""
        return self.records.list_origins(range(len(self.records)))

    @property
    def shapes(self) -> Mapping[str, ModelShape]:
        """Shape of each role's model."""
        return self._roles.shapes

    def load(self) -> None:
        """Load the weights. Raises UserError if they cannot be used."""
        self._roles.load_weights()
        self._roles.offload_homes()

    def close(self) -> None:
        """End the processes of the environment, if there is one."""
        if self._environments is not None:
            self._environments.close()


class Opponent:
    """The model of `evaluation.against`. It answers the prompts before any other model is loaded."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        origins: list[str],
    ) -> None:
        """Prepare everything except weights. `plan` is the recipe's plan.

        `origins` has the origin of each record of the evaluation, as FILE:LINE.

        Raises UserError if the model cannot replace the recipe's model.
        """
        self._process, self._setting = process, f"evaluation.against={experiment.evaluation.against}"
        self._run = self._named(lambda: self._prepare(experiment, plan, groups))
        if self._run.origins != origins:
            raise UserError(
                f"{self._setting}: other prompts are too long with its tokenizer, so the two models would answer"
                " different prompts; raise data.max_prompt_tokens"
            )

    def _prepare(
        self, experiment: Experiment, plan: Plan, groups: Mapping[tuple[int, ...], Group]
    ) -> EvaluationRun:
        job = make_evaluation_job(replace_model(experiment), plan.cluster, plan, download=True)
        return EvaluationRun(job, self._process, groups)

    def _named(self, action: Callable[[], Result]) -> Result:
        """Run an action, and begin its error messages with the name of the setting."""
        try:
            return action()
        except UserCodeError:
            raise
        except UserError as error:
            raise UserError(f"{self._setting}: {error}") from None

    def answer(self) -> EvaluationResult:
        """Answer all prompts, and free the model."""
        with self._process.together():
            self._named(self._run.load)
        result = self._run.evaluation.run()
        self._run.close()
        del self._run
        # Reference cycles may still keep this model in memory, which the recipe's own models need next.
        gc.collect()
        return result


def replace_model(experiment: Experiment) -> Experiment:
    """Copy a recipe with the model of `evaluation.against` in place of the generating model."""
    graph = experiment.eval_graph
    assert graph is not None, "evaluation.against needs data.eval"
    role = next(call.model_role for call in graph.calls if call.kind is Kind.GENERATE)
    mine = getattr(experiment.models, role)
    other = ModelConfig(path=experiment.evaluation.against, dtype=mine.dtype)
    other = other.model_copy(update={"computes_in": mine.computes_in})
    changed = mine.model_copy(update={name: getattr(other, name) for name in ModelConfig.model_fields})
    quiet = experiment.evaluation.model_copy(update={"against": None})
    # `against` is unset, because the other model is not compared with itself.
    return experiment.model_copy(
        update={"models": experiment.models.model_copy(update={role: changed}), "evaluation": quiet}
    )


def evaluate_recipe(
    experiment: Experiment, say: Callable[[str], None], read: RecordReader = read_records
) -> EvaluationReport | None:
    """Evaluate a recipe as one rank of its cluster. Returns None on ranks that do not write.

    On the rank that writes, `say` is called with notes. `read` reads the records of `data.eval`. Raises UserError
    for a mistake of the user, and RunError for a failure that is not a bug.
    """
    cluster = resolve_cluster(experiment.cluster, experiment.device)
    # Find mistakes in a plan before the ranks wait for each other.
    if experiment.plan != SEARCH:
        make_evaluation_job(experiment, cluster)
    with ExitStack() as until_the_end, connect(experiment.device, experiment.launch) as process:
        here = find_least_device(process)
        check_kind(experiment, cluster, here)
        with process.together():
            until_the_end.enter_context(use_kernels(experiment.kernels, process.device))
        plan = agree_on_plan(experiment, cluster, process, here, say, evaluates=True)
        with process.together():
            job = make_evaluation_job(experiment, cluster, plan, download=True)
        groups = process.groups(list_rank_sets(job.placements), moves=reallocates(job.placements))
        with process.together():
            run = EvaluationRun(job, process, groups, read)
            until_the_end.callback(run.close)
            opponent = make_opponent(experiment, plan, process, groups, run.origins)
        if opponent is not None:
            run.evaluation.face(opponent.answer())
        if process.rank == WRITER:
            for note in (*list_data_notes({"eval": run.records}), *list_kernel_notes(experiment, run.shapes)):
                say(note)
        with process.together():
            run.load()
        start = time.monotonic()
        with process.activity.part("eval"):
            result = run.evaluation.run()
        if process.rank != WRITER:
            return None
        return EvaluationReport(result, run.origins, time.monotonic() - start)


def make_opponent(
    experiment: Experiment,
    plan: Plan,
    process: Process,
    groups: Mapping[tuple[int, ...], Group],
    origins: list[str],
) -> Opponent | None:
    """Create the opponent of a recipe; None without `evaluation.against`. See `Opponent` for the arguments."""
    if experiment.evaluation.against is None:
        return None
    return Opponent(experiment, plan, process, groups, origins)


METRICS_FILE, SAMPLES_FILE = "metrics.json", "samples.jsonl"


def write_evaluation(directory: Path, experiment: Experiment, report: EvaluationReport) -> list[Path]:
    """Write the metrics of an evaluation, and its answers if there are any. Older files are replaced.

    Returns the paths of the written files. Raises RunError if a file cannot be written.
    """
    roles = experiment.spec.roles_of(experiment)
    content = {
        "algorithm": experiment.spec.name,
        "models": {role: getattr(experiment.models, role).path for role in roles},
        "data": experiment.data.eval,
        "records": len(report.origins),
        "evaluation": experiment.evaluation.model_dump(mode="json"),
        "seconds": round(report.seconds, 3),
        "metrics": replace_infinite(report.result.metrics),
    }
    metrics, samples = directory / METRICS_FILE, directory / SAMPLES_FILE
    try:
        # Metrics are written last, because their file shows that the evaluation is complete.
        if report.result.rows:
            write_rows(samples, report.result.rows)
        else:
            samples.unlink(missing_ok=True)
        write_whole(metrics, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {reason_of(error)}") from error
    return [metrics, samples] if report.result.rows else [metrics]
