"""Check an algorithm: its description, its programs, and that it learns the same under every plan."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from realrl.algorithms.build import build_algorithm
from realrl.config.errors import UserError
from realrl.config.script_objects import load_objects
from realrl.config.yaml_file import dump_yaml
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.axes import Degrees
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS
from realrl.program.validate import ProgramError
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import load_experiment, parse_experiment
from realrl.runtime.prepare.inputs import load_shared_tokenizer
from realrl.runtime.prepare.job import make_job
from realrl.runtime.training_run import TrainingRun
from realrl.testing.compare import CheckFailure, compare_runs, read_metrics
from realrl.testing.findings import Finding
from realrl.testing.gradients import ProbedRun, judge_gradients
from realrl.testing.ranks import InterruptedRun, RanksFailure, RenewedRun, run_on_ranks, sampled
from realrl.testing.reward_probes import probe_rewards
from realrl.testing.shrink import list_mixtures, shrink_recipe

WHOLE, SMALL = 4096, 48
"""Sizes of micro-batches in tokens. `WHOLE` is enough for all sequences of a step, `SMALL` for two or three."""


def check_algorithm(
    recipe: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    records: Sequence[Mapping[str, Any]] | None = None,
    tolerance: float = 1e-4,
    processes: int = 4,
) -> None:
    """Check the algorithm of a recipe on tiny models, in processes on this machine.

    Raises CheckFailure at the first mistake. Models are replaced by tiny ones with random weights. Records are
    replaced by `records`, or by made-up records of the algorithm's form. Lengths, batch and optimizer become small.
    Settings of the algorithm, reward and sampling stay as in the recipe. `overrides` (`a.b=value`, as on the
    command line) come last, but overrides of models are ignored. Files are written into `directory`.

    1. The algorithm's description agrees with its graphs and methods, and every call has a method.
    2. Programs of all presets on clusters of 1 to 8 devices cannot deadlock, and every call finds its data.
    3. Two training steps and evaluations give the same metrics, within `tolerance`, in one process and in several.
       The plans with several processes are: symmetric, two CP ranks, two TP ranks, two pipeline stages, the same
       with two virtual stages each and a zero bubble, and each role on its own devices. If models of the recipe are
       mixtures of experts, two ranks also divide the experts. At most `processes` are started. If there are more
       roles than processes, only training gets its own devices. Small micro-batches give the same metrics too. If
       the recipe hands on samples in portions, a run with portions gives the same metrics, too.
    4. A run whose algorithm is rebuilt after each step also gives the same metrics. `load_state_dict` receives what
       `state_dict` returned on the first rank of the first train call. Weights and optimizer state are kept,
       because they do not belong to the algorithm.
    """
    place = Path(directory).resolve()
    place.mkdir(parents=True, exist_ok=True)
    try:
        experiment = load_experiment(os.fspath(recipe), overrides)
        settings = shrink_recipe(experiment, place, records=records, overrides=overrides)
        portions = _take_portions(settings)
        small = parse_experiment(settings)
        graph = small.graph
        build_algorithm(small)
    except UserError as error:
        raise CheckFailure(f"description: {error}") from None
    _check_programs(small, graph)
    runs = _list_runs(small, place, processes, portions)
    for run in runs:
        run.write(settings, graph)
    for size in sorted({run.size for run in runs}):
        of_size = [run for run in runs if run.size == size]
        _execute(of_size)
        for run in of_size:
            _compare(run, runs[0], tolerance)


def check_recipe(
    experiment: Experiment,
    records: Sequence[Mapping[str, Any]],
    directory: Path,
    *,
    processes: int = 4,
    tolerance: float = 1e-4,
    agents: bool = False,
) -> Iterator[Finding]:
    """Check the code and the records of a recipe on tiny models, in processes on this machine.

    Yields a finding per check. Every run of two training steps is compared with the same steps in one process: the
    samples, every metric and the saved state. One of these runs resumes from a checkpoint after the first step, in
    a new process. The gradient of each loss is compared with finite differences. Then the reward functions
    are probed. `records`: some records of the recipe's data set. Files are written into `directory`. `agents`:
    whether the recipe's environment is an agent.
    """
    tokenizer = load_shared_tokenizer(experiment)
    settings = shrink_recipe(experiment, directory, records=records, tokenizer=tokenizer, agents=agents)
    portions = _take_portions(settings)
    small = parse_experiment(settings)
    graph = small.graph
    alone, *others = _list_runs(small, directory, processes, portions)
    runs = [alone, *_list_further_runs(directory), *others]
    for run in runs:
        run.write(settings, graph)
    for size in sorted({run.size for run in runs}):
        of_size = [run for run in runs if run.size == size]
        failures = _execute_all(of_size)
        for run in of_size:
            failure = failures.get(run.name)
            if run.kind == "resumed" and failure is None:
                # In a new process, so that whatever the checkpoint lacks is lost.
                failure = _execute_all([replace(run, run_class=None)]).get(run.name)
            if run.kind == "gradient" and failure is None:
                yield from judge_gradients(run.directory)
                continue
            # A plan that gives other results also does so with a rebuilt algorithm, which is then not to blame.
            same_plan = next(other for other in runs if other.size == run.size and other.plan == run.plan)
            reference = same_plan if run.kind == "state" and same_plan.name not in failures else alone
            finding = _judge(run, failure, reference, tolerance)
            yield finding
            if run is alone and finding.problem is not None:
                return
    yield from _check_groups(alone)
    yield from probe_rewards(small, sampled(alone.recipe))


def _list_further_runs(place: Path) -> list["_Run"]:
    """List the runs in one process that only recipes need."""
    return [
        _Run(name="the same run again", recipe=place / "again.yaml", kind="again"),
        _Run(
            name="resumed from a checkpoint after the first step",
            recipe=place / "resumed.yaml",
            kind="resumed",
            run_class=InterruptedRun,
        ),
        _Run(
            name="gradient of the loss", recipe=place / "gradient.yaml", kind="gradient", run_class=ProbedRun
        ),
    ]


def _check_groups(alone: "_Run") -> Iterator[Finding]:
    """Check whether the samples of a prompt have different rewards, if the algorithm reports it."""
    name = "groups_of_equal_rewards"
    metrics = [line["metrics"] for line in read_metrics(alone.directory) if line["kind"] == "train"]
    found = [value for step in metrics for key, value in step.items() if key.endswith(f"/{name}")]
    if found:
        equal = (
            "all samples of each prompt have equal rewards. Models with random weights make this likely; watch"
            f" the metric {name} of a real run",
        )
        check = "samples of a prompt have different rewards"
        yield Finding(check, notes=equal if min(found) == 1 else ())


def _list_classes(runs: Sequence["_Run"]) -> dict[Path, type[TrainingRun]]:
    return {run.recipe: run.run_class for run in runs if run.run_class is not None}


def _execute_all(runs: Sequence["_Run"]) -> dict[str, str]:
    """Run recipes that need the same number of processes. Returns the messages of those that failed, by name."""
    failures: dict[str, str] = {}
    waiting = list(runs)
    while waiting:
        try:
            run_on_ranks(
                runs[0].size,
                [run.recipe for run in waiting],
                classes=_list_classes(waiting),
                prepare=load_objects,
            )
            return failures
        except RanksFailure as failure:
            failed = next(i for i, run in enumerate(waiting) if run.recipe.stem == failure.recipe)
            failures[waiting[failed].name] = failure.message
            for file in waiting[failed].recipe.parent.glob("error-*"):
                file.unlink()
            waiting = waiting[failed + 1 :]
        except CheckFailure as failure:
            return failures | dict.fromkeys((run.name for run in waiting), str(failure))
    return failures


def _judge(run: "_Run", failure: str | None, reference: "_Run", tolerance: float) -> Finding:
    """Compare a run with another run."""
    if failure is not None:
        return Finding(run.name, failure)
    if run is reference:
        return Finding(run.name)
    try:
        _compare(run, reference, tolerance)
    except CheckFailure as difference:
        return Finding(run.name, str(difference).removeprefix(f"{run.name}: "), _REASONS.get(run.kind))
    return Finding(run.name)


_REASONS = {
    "again": "something random is not seeded, or depends on time, on memory addresses or on the order of a set",
    "micro": "`loss` takes a mean or a maximum over its micro-batch; it must return sums, and `weight` returns the"
    " number that the sum of the whole batch is divided by",
    "state": "the algorithm keeps something from step to step that `state_dict` does not return",
    "resumed": "something outlasts a step, but is in no checkpoint: a global, or state of a reward function",
    "ranks": "something is computed from the items of one rank in place of the whole batch (use `dp_sum` or"
    " `gather_samples`), or a reward depends on the other completions of its list",
}
"""Likely reason of a difference, by the kind of run."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    name: str
    recipe: Path
    kind: str = "ranks"
    size: int = 1
    micro_batch_tokens: int = WHOLE
    plan: Plan | None = None
    run_class: type[TrainingRun] | None = None
    portions: int = 1

    @property
    def directory(self) -> Path:
        return self.recipe.with_suffix("")

    def write(self, settings: Mapping[str, Any], graph: DataflowGraph) -> None:
        """Write the recipe of this run, and the plan file if it has a plan."""
        given = {
            "run_dir": str(self.directory),
            "micro_batch_tokens": self.micro_batch_tokens,
            "overwrite": self.kind != "resumed",
        }
        if self.plan is not None:
            file = self.recipe.with_suffix(".plan.yaml")
            self.plan.save(file, graph)
            given |= {"plan": str(file), "cluster": str(self.plan.cluster)}
        if self.portions > 1:
            given["asynchrony"] = {**settings["asynchrony"], "portions": self.portions}
        self.recipe.write_text(dump_yaml({**settings, **given}))


def _check_programs(experiment: Experiment, graph: DataflowGraph) -> None:
    """Compile the recipe under many plans, which validates the programs.

    The batch is enlarged so that it suffices for all of these plans.
    """
    most = max(cluster.size for cluster in CLUSTERS)
    data = experiment.data.model_copy(update={"batch": experiment.data.batch * most})
    experiment = experiment.model_copy(update={"data": data})
    for case in list_compiled_cases(graph, WHOLE):
        try:
            make_job(experiment, case.plan.cluster, case.plan)
        except (UserError, ProgramError) as error:
            raise CheckFailure(
                f"programs of plan {case.name} on cluster {case.plan.cluster}: {error}"
            ) from None


def _take_portions(settings: dict[str, Any]) -> int:
    """Take the number of portions out of a recipe's settings, because few plans of a check allow portions."""
    portions = settings["asynchrony"].pop("portions")
    return min(int(portions), int(settings["data"]["batch"]))


def _list_runs(small: Experiment, place: Path, processes: int, portions: int) -> list[_Run]:
    """List the runs of a check. All other runs are compared with the first."""
    graph = small.graph
    runs = [
        _Run(name="one process", recipe=place / "alone.yaml"),
        _Run(
            name=f"micro_batch_tokens={SMALL} in one process",
            recipe=place / "micro-batches.yaml",
            micro_batch_tokens=SMALL,
            kind="micro",
        ),
        _Run(
            name="algorithm rebuilt from its state_dict after each step",
            recipe=place / "renewed.yaml",
            run_class=RenewedRun,
            kind="state",
        ),
    ]
    for number, case in enumerate(list_run_cases(graph, WHOLE, processes, list_mixtures(small))):
        size = case.plan.cluster.size
        name = f"plan {case.name} on {size} processes"
        runs.append(_Run(name=name, recipe=place / f"plan-{number}.yaml", size=size, plan=case.plan))
        if number == 0:
            runs.append(
                _Run(
                    name=f"{name}, algorithm rebuilt from its state_dict after each step",
                    recipe=place / "plan-renewed.yaml",
                    size=size,
                    plan=case.plan,
                    run_class=RenewedRun,
                    kind="state",
                )
            )
    if portions > 1:
        name = f"plan sampling apart on 2 processes, {portions} portions"
        plan = _make_plan_apart(graph)
        runs.append(_Run(name=name, recipe=place / "portions.yaml", size=2, plan=plan, portions=portions))
    return runs


def _make_plan_apart(graph: DataflowGraph) -> Plan:
    """Make the plan that samples on one device, and does everything else on another."""
    placements = {
        call.name: function_placement(Mesh(0, 1))
        if call.is_function
        else Placement(Mesh(int(call.kind is Kind.GENERATE), 1), Strategy(micro_batch_tokens=WHOLE))
        for call in graph.calls
    }
    return Plan(Cluster(1, 2), placements)


def _execute(runs: Sequence[_Run]) -> None:
    """Run recipes that need the same number of processes, in the same processes."""
    recipes = [run.recipe for run in runs]
    try:
        run_on_ranks(runs[0].size, recipes, classes=_list_classes(runs))
    except RanksFailure as failure:
        name = next(run.name for run in runs if run.recipe.stem == failure.recipe)
        raise CheckFailure(f"{name}: {failure.message}") from None


def _compare(run: _Run, alone: _Run, tolerance: float) -> None:
    """Compare metrics, state and samples of a run with the run in a single process."""
    small = run.micro_batch_tokens != alone.micro_batch_tokens
    than = f"with {alone.micro_batch_tokens}" if small else f"in {alone.name}"
    compare_runs(run.directory, alone.directory, name=run.name, than=than, tolerance=tolerance)
    expected, found = sampled(alone.recipe), sampled(run.recipe)
    for key in expected:
        if found.get(key) != expected[key]:
            raise CheckFailure(
                f"{run.name}: step/item {key} samples {found.get(key)}, but {than} {expected[key]}; if just one"
                " token differs, two tokens may be nearly equally likely: try another seed"
            )


CLUSTERS = (Cluster(1, 1), Cluster(1, 2), Cluster(1, 4), Cluster(2, 2), Cluster(2, 4))
"""Clusters for which programs are compiled."""


@dataclass(frozen=True)
class Case:
    """A plan, and its name in failure messages."""

    name: str
    plan: Plan


def make_uniform_plan(
    graph: DataflowGraph,
    cluster: Cluster,
    *,
    zero: int = 1,
    micro_batch_tokens: int,
    **degrees: int,
) -> Plan:
    """Make the plan that runs all calls on all devices with one strategy; functions run on all hosts. `degrees`
    are degrees of parallelism by axis, apart from `dp`.

    Calls that do not support the ZeRO stage `zero` use stage 1. For generation, see `Strategy.for_generation`.
    With `ep`, all models must be mixtures.
    """
    everywhere = Mesh(0, cluster.size)
    folded = {axis: degrees.pop(axis, 1) for axis in ("ep", "vpp")}
    dp = cluster.size // prod(degrees.values())
    plain = Strategy(degrees=Degrees.of({"dp": dp, **degrees}), micro_batch_tokens=micro_batch_tokens)
    plain = plain.with_degrees(**folded)
    strategies = {
        Kind.TRAIN: replace(plain, zero=zero),
        Kind.INFERENCE: replace(plain, zero=1 if zero == 2 else zero),
        Kind.GENERATE: plain.for_generation(),
    }
    placements = {
        call.name: function_placement(everywhere)
        if call.is_function
        else Placement(everywhere, strategies[call.kind])
        for call in graph.calls
    }
    return Plan(cluster, placements)


def list_run_cases(
    graph: DataflowGraph, micro_batch_tokens: int, most: int, mixtures: Collection[str] = ()
) -> Iterator[Case]:
    """List the plans to train under: symmetric, two CP ranks, two TP ranks, two pipeline stages, and each role
    on its own devices. If the last plan needs more than `most` devices, only training gets its own devices.

    One more plan has two pipeline stages with two virtual stages each, and a zero bubble. Generation has no virtual
    stages.

    If there are `mixtures`, roles whose models are mixtures of experts, all calls of these roles divide the experts
    among two data-parallel ranks in one more plan.
    """
    two = Cluster(1, 2)
    symmetric = PRESETS["symmetric"](graph, two, micro_batch_tokens, {})
    yield Case("symmetric", symmetric)
    for name in ("cp", "tp", "pp"):
        plan = make_uniform_plan(graph, two, **{name: 2}, micro_batch_tokens=micro_batch_tokens)
        yield Case(f"{name}=2", plan)
    interleaved = make_uniform_plan(graph, two, pp=2, vpp=2, micro_batch_tokens=micro_batch_tokens)
    trained = {
        call.name: replace(interleaved[call.name].strategy, zero_bubble=True)
        for call in graph.calls
        if call.kind is Kind.TRAIN
    }
    yield Case("pp=2, vpp=2 and zero bubble", _replace_strategies(interleaved, trained))
    if mixtures:
        divided = {
            call.name: symmetric[call.name].strategy.with_degrees(ep=2)
            for call in graph.calls
            if call.role in mixtures
        }
        yield Case("ep=2", _replace_strategies(symmetric, divided))
    apart, cluster = "disjoint", Cluster(1, max(2, len(graph.roles)))
    if cluster.size > most:
        apart, cluster = "separate", two
    yield Case(apart, PRESETS[apart](graph, cluster, micro_batch_tokens, {}))


def _replace_strategies(plan: Plan, strategies: Mapping[str, Strategy]) -> Plan:
    """Give some calls other strategies."""
    changed = {name: replace(plan[name], strategy=strategy) for name, strategy in strategies.items()}
    return replace(plan, placements={**plan.placements, **changed})


def list_compiled_cases(graph: DataflowGraph, micro_batch_tokens: int) -> Iterator[Case]:
    """List the plans to compile: every preset on clusters of 1 to 8 devices, and a plan that offloads
    everything."""
    parts = {call.role for call in graph.calls if call.kind is Kind.TRAIN}
    engines = any(call.kind is Kind.GENERATE for call in graph.calls)
    least = {"disjoint": len(graph.roles), "separate": 2, "openrlhf": len(parts) + engines}
    for cluster in CLUSTERS:
        for name, preset in PRESETS.items():
            if cluster.size >= least.get(name, 1):
                yield Case(name, preset(graph, cluster, micro_batch_tokens, {}))
    plan = make_uniform_plan(graph, Cluster(2, 2), tp=2, micro_batch_tokens=micro_batch_tokens)
    trained = tuple(role for role in graph.roles if graph.trained(role))
    yield Case("tp=2, all offloaded", replace(plan, offload=graph.roles, offload_optimizer=trained))
