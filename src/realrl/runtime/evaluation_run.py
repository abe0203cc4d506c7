"""Evaluation of a recipe alone, without training."""

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeVar

from realrl.algorithms.build import build_algorithm
from realrl.algorithms.rewards.judge import load_judge
from realrl.config.errors import UserCodeError, UserError
from realrl.data.sources.records import RecordReader, read_records
from realrl.dataflow.call import Kind
from realrl.engine.optional_kernels import use_kernels
from realrl.families.shape import ModelShape
from realrl.model.group import Group
from realrl.plan.communicators import list_rank_sets, reallocates
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH
from realrl.program.lower import WRITER
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph
from realrl.recipe.model import ModelConfig, freeze
from realrl.runtime.evaluate import Evaluation
from realrl.runtime.evaluation.answers import EvaluationReport, EvaluationResult
from realrl.runtime.output.notes import list_data_notes, list_kernel_notes
from realrl.runtime.prepare.compile import (
    CompiledEvaluation,
    compile_evaluation,
    make_written_plan,
    models,
)
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.processes.process import Process, connect, resolve_cluster
from realrl.runtime.processes.startup import agree_on_plan, find_least_device
from realrl.runtime.setup import (
    RecordLoader,
    find_longest,
    load_functions,
    load_shared_tokenizer,
    load_stop_token_ids,
)
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.trace_recorder import Trace
from realrl.runtime.worker.worker import Worker

Result = TypeVar("Result")


class EvaluationRun:
    """Evaluation of a recipe on one rank, with the weights of `models.*.path`."""

    def __init__(
        self,
        experiment: Experiment,
        compiled: CompiledEvaluation,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        read: RecordReader = read_records,
    ) -> None:
        """Prepare all but weights; `groups` are those of the placements, `read` reads the records of a source.

        UserError for mistakes that show without weights.
        """
        phase = compiled.evaluation
        algorithm = build_algorithm(experiment)
        tokenizer = load_shared_tokenizer(experiment)
        stop_token_ids = load_stop_token_ids(experiment, tokenizer)
        self._roles = Roles(
            {
                role: freeze(config)
                for role, config in models(experiment).items()
                if role in phase.graph.roles
            },
            get_spec(experiment).heads,
            compiled.homes,
            process,
            groups,
            phase.plan,
            temperature=algorithm.temperature,
            seed=experiment.seed,
            verify=experiment.debug.verify_reallocation,
            exact=experiment.exact,
            longest=find_longest(experiment)[0],
        )
        functions = load_functions(algorithm, [phase], process.rank)
        # Code of the user's runs once: on the rank that asks the judge.
        judge = load_judge(experiment.evaluation.judge) if process.rank == WRITER else None
        loader = RecordLoader(experiment, tokenizer, stop_token_ids, functions, read)
        self.records = loader.load_eval(phase, judge)
        worker = Worker(process, self._roles, algorithm, stop_token_ids, Trace(process.rank), tokenizer)
        self.evaluation = Evaluation(
            experiment, process, worker, phase, self.records, tokenizer=tokenizer, judge=judge
        )

    @property
    def origins(self) -> list[str]:
        """Origins of the records, FILE:LINE."""
        return self.records.list_origins(range(len(self.records)))

    @property
    def shapes(self) -> Mapping[str, ModelShape]:
        """Shapes of the models, by role."""
        return self._roles.shapes

    def load(self) -> None:
        """Load the weights; UserError when they cannot be used."""
        self._roles.load_weights()
        self._roles.offload_homes()


class Opponent:
    """Model of `evaluation.against`, which answers the same prompts before anything else is loaded."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        origins: list[str],
    ) -> None:
        """Prepare all but weights, on the plan of the recipe. `origins`: where the evaluation's records come from.

        UserError where the model cannot take the place of the recipe's.
        """
        self._process, self._setting = process, f"evaluation.against={experiment.evaluation.against}"
        self._run = self._named(lambda: self._prepare(experiment, plan, groups))
        if self._run.origins != origins:
            raise UserError(
                f"{self._setting}: its tokenizer makes other prompts too long, so that both models would answer"
                " different ones; raise data.max_prompt_tokens"
            )

    def _prepare(
        self, experiment: Experiment, plan: Plan, groups: Mapping[tuple[int, ...], Group]
    ) -> EvaluationRun:
        replaced = replace_model(experiment)
        return EvaluationRun(replaced, compile_evaluation(replaced, plan), self._process, groups)

    def _named(self, action: Callable[[], Result]) -> Result:
        """Let error messages name the setting."""
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
        del self._run
        # Before the recipe's own models are loaded, whatever still refers to this one.
        gc.collect()
        return result


def replace_model(experiment: Experiment) -> Experiment:
    """Copy a recipe with the model of `evaluation.against` in place of the one that generates."""
    graph = build_eval_graph(experiment)
    assert graph is not None, "evaluation.against needs data.eval"
    role = next(call.model_role for call in graph.calls if call.kind is Kind.GENERATE)
    mine = getattr(experiment.models, role)
    other = ModelConfig(path=experiment.evaluation.against, dtype=mine.dtype)
    other = other.model_copy(update={"computes_in": mine.computes_in})
    changed = mine.model_copy(update={name: getattr(other, name) for name in ModelConfig.model_fields})
    quiet = experiment.evaluation.model_copy(update={"against": None})
    # Its answers to the prompts are compared, and their rewards: what else is asked of evaluations is not its own.
    return experiment.model_copy(
        update={"models": experiment.models.model_copy(update={role: changed}), "evaluation": quiet}
    )


def evaluate_recipe(
    experiment: Experiment, say: Callable[[str], None], read: RecordReader = read_records
) -> EvaluationReport | None:
    """Evaluate a recipe alone as one rank of its cluster; None except on the rank that writes.

    `say` is called with notes, on that rank; `read` reads the records of `data.eval`. UserError for a mistake that
    the user can correct, RunError for a failure that is no bug.
    """
    cluster = resolve_cluster(experiment.cluster, experiment.device)
    # Before the ranks meet: mistakes in a plan need no meeting.
    plan = None if experiment.plan == SEARCH else make_written_plan(experiment, cluster)
    if plan is not None:
        compile_evaluation(experiment, plan)
    with ExitStack() as until_the_end, connect(experiment.device, experiment.launch) as process:
        here = find_least_device(process)
        check_kind(experiment, cluster, here)
        with process.together():
            until_the_end.enter_context(use_kernels(experiment.kernels, process.device))
        if plan is None:
            plan = agree_on_plan(experiment, cluster, process, here, say)
        # What is known of models may differ between nodes, and with it what a preset makes of them.
        plan = process.gather(plan)[WRITER]
        with process.together():
            compiled = compile_evaluation(experiment, plan)
        placements = compiled.evaluation.plan.placements.values()
        groups = process.groups(list_rank_sets(placements), moves=reallocates(placements))
        with process.together():
            run = EvaluationRun(experiment, compiled, process, groups, read)
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
    """Make the opponent of a recipe, if it names one. Arguments as of `Opponent`."""
    if experiment.evaluation.against is None:
        return None
    return Opponent(experiment, plan, process, groups, origins)
