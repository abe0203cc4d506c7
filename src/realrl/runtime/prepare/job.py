"""A job: a recipe with its opened models, its plan, and the validated programs of every rank.

`train`, `eval`, `generate`, `show`, `doctor` and the planner all create a job first. Does not import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.dataflow.call import MovingAverage
from realrl.dataflow.graph import DataflowGraph, share_steps
from realrl.dataflow.replay import add_router_replay, find_replaying_roles
from realrl.families.adapters import LowRank
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import estimate_attention_cost
from realrl.huggingface.directory import (
    adapts_single_experts,
    find_model_shape,
    known_adapters,
    known_shape,
)
from realrl.layout.sets import TrainablePart
from realrl.plan.cluster import Cluster
from realrl.plan.placement import DTYPES, Placement
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH, make_plan
from realrl.program.instructions import Program
from realrl.program.lower import home_placements, kept_copies, lower, lower_start, offloaded
from realrl.program.memory import Memory, StoredModel, check_offloading
from realrl.program.portions import lower_step, validate_portions
from realrl.program.validate import validate, validate_ahead, validate_start
from realrl.recipe.algorithm import SCORE
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig, freeze, trained_models


@dataclass(frozen=True)
class Phase:
    """One kind of step: its graph, its plan, and the program of every rank.

    `programs` update all moving averages of the graph, and work on all batches of a step. `partial` has the
    programs of steps in which only some averages are due, or that work on fewer batches (`select_batches`). Its
    keys are the periods of the due averages, in steps, and the batches.
    """

    graph: DataflowGraph
    plan: Plan
    programs: list[Program]
    partial: Mapping[tuple[frozenset[int], range], list[Program]]
    attention_costs: Mapping[str, float]
    """See `RoleModels.attention_costs`. Ranks balance their work by them."""

    def programs_of(self, step: int, batches: range = range(1)) -> list[Program]:
        """Return the programs of a training step, which is counted from 1, that work on `batches`."""
        name = _name_step(self.graph.due(step), batches)
        complete = name == (self.graph.periods, range(self.graph.ahead + 1))
        return self.programs if complete else self.partial[name]


@dataclass(frozen=True)
class SampledStep:
    """A training step that is divided into two parts, for sampling in rounds (`AlgorithmSpec.sampling_rounds`)."""

    rounds: int
    """Maximum number of rounds."""
    sampling: Phase
    """The calls on which `score` depends. They run in every round."""
    learning: Phase
    """The whole graph, with programs that run only the other calls, on the outputs of the rounds."""


@dataclass(frozen=True)
class RoleModels:
    """The models of a recipe's roles, opened without their weights."""

    graph: DataflowGraph
    """Dataflow graph of the recipe. It includes router replay for mixtures of experts that need it."""
    configs: Mapping[str, ModelConfig]
    parts: Mapping[str, TrainablePart]
    """The part of each role's model that training updates."""
    stored: dict[str, StoredModel]
    """The model of each role, with its shape, head and data type, for roles whose size is known."""

    @property
    def shapes(self) -> dict[str, ModelShape]:
        """Shapes of the models of all roles whose size is known."""
        return {role: of.shape for role, of in self.stored.items()}

    @property
    def attention_costs(self) -> dict[str, float]:
        """By role, see `families.sizes.estimate_attention_cost`."""
        return {role: estimate_attention_cost(shape) for role, shape in self.shapes.items()}


@dataclass(frozen=True)
class Job:
    """A recipe compiled for a cluster.

    All ranks create the same job from the same recipe and plan, and then run it.
    """

    experiment: Experiment
    models: RoleModels
    plan: Plan
    """Plan of the training step."""
    homes: Mapping[str, Placement]
    """Placement of each role's parameters between steps."""
    kept: Mapping[str, tuple[Placement, ...]]
    """Placements of each role's additional parameter copies that stay in memory between steps."""
    start: list[Program]
    """Programs that create the kept copies before the first step."""
    phases: Mapping[str, Phase]
    """Kinds of steps by name: `train`, unless the job only evaluates, and `eval`, if there are records for it."""
    sampled: SampledStep | None = None
    """The training step in two parts, if it samples in rounds; otherwise None."""

    @property
    def train(self) -> Phase:
        """The training step."""
        return self.phases["train"]

    @property
    def evaluation(self) -> Phase | None:
        """The evaluation step; None if there is none."""
        return self.phases.get("eval")

    @cached_property
    def memory(self) -> Memory:
        """Memory that programs occupy. Roles of unknown size count as 0."""
        return Memory(self.models.stored, self.homes, offloaded(self.plan), self.kept)

    @property
    def trained(self) -> list[str]:
        """Roles that the training step trains, in the order of the graph."""
        graph = self.models.graph
        return [role for role in graph.roles if graph.trained(role)]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Roles whose size is not known on this machine."""
        return tuple(role for role in self.homes if role not in self.models.stored)

    @property
    def placements(self) -> list[Placement]:
        """Placements of all calls in all kinds of steps."""
        return [place for phase in self.phases.values() for place in phase.plan.placements.values()]

    @property
    def programs(self) -> dict[str, list[Program]]:
        """Programs of all ranks, by name: `start`, unless it is empty, and each kind of step.

        `train-due-2` has the programs of steps in which only moving averages of period 2 are due, and
        `train-batches-1` those of a first step that only samples the batch that is trained on one step later.
        """
        starts = any(program.instructions for program in self.start)
        found = {"start": self.start} if starts else {}
        phases = dict(self.phases)
        if self.sampled is not None:
            phases |= {"sampling": self.sampled.sampling, "learning": self.sampled.learning}
        for name, phase in phases.items():
            found[name] = phase.programs
            for (due, batches), programs in phase.partial.items():
                parts = [name]
                if due != phase.graph.periods and 0 in batches:
                    parts.append(f"due-{'-'.join(map(str, sorted(due))) or 'none'}")
                if len(batches) <= phase.graph.ahead:
                    parts.append(f"batches-{'-'.join(map(str, batches))}")
                found["-".join(parts)] = programs
        return found


def make_job(
    experiment: Experiment, cluster: Cluster, plan: Plan | None = None, *, download: bool = False
) -> Job:
    """Create the job that trains a recipe on a cluster. Raises UserError for an invalid plan.

    `plan` replaces the recipe's plan. It is required if the recipe has `plan: search`. `download` fetches the
    `config.json` of models on the hub. Without it, checks that depend on sizes cover only the models whose sizes
    are known on this machine. Memory is not checked.
    """
    models = open_models(experiment, download=download)
    graph = models.graph
    if plan is None:
        plan = make_written_plan(experiment, cluster, models)
    else:
        plan.check(graph, models.shapes)
    if experiment.exact:
        plan.check_exact(graph)
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    _check_batch(experiment, graph, plan)
    start = lower_start(plan, homes, kept, models.parts)
    validate_start(start, homes, offloaded(plan), kept, models.parts)
    compile_phase = partial(_compile_phase, homes=homes, kept=kept, models=models)
    phases = {"train": compile_phase(graph, plan)}
    if experiment.eval_graph is not None:
        evaluating = plan.evaluation(experiment.eval_graph, graph, exact=experiment.exact)
        phases["eval"] = compile_phase(experiment.eval_graph, evaluating)
    sampled = None
    if (rounds := experiment.spec.sampling_rounds(experiment)) != 1:
        sampling = compile_phase(graph.upstream(SCORE), plan)
        done = {call.name: plan[call.name] for call in sampling.graph.calls}
        sampled = SampledStep(rounds, sampling, compile_phase(graph, plan, done=done))
    job = Job(experiment, models, plan, homes, kept, start, phases, sampled)
    check_offloading(plan, job.memory.holders)
    return job


def make_evaluation_job(
    experiment: Experiment, cluster: Cluster, plan: Plan | None = None, *, download: bool = False
) -> Job:
    """Create the job that evaluates a recipe without training. The arguments are those of `make_job`.

    The job has no optimizer state, no kept copies, and only the roles that evaluation uses. Raises UserError if the
    recipe has no evaluation, or if the plan does not fit its models.
    """
    graph = experiment.eval_graph
    if graph is None:
        raise UserError("data.eval: missing; give the records to evaluate on")
    models = open_models(experiment, evaluates=True, download=download)
    plan = plan or make_written_plan(experiment, cluster, open_models(experiment))
    plan.check(experiment.graph, models.shapes)
    if experiment.exact:
        plan.check_exact(experiment.graph)
    evaluating = plan.evaluation(graph, experiment.graph, exact=experiment.exact)
    used = replace(evaluating, offload_optimizer=(), keep=())
    homes = home_placements(graph, used)
    phase = _compile_phase(graph, used, homes=homes, kept={}, models=models)
    return Job(experiment, models, used, homes, {}, [], {"eval": phase})


def make_written_plan(experiment: Experiment, cluster: Cluster, models: RoleModels) -> Plan:
    """Create the plan that a recipe names: a preset or a plan file. Raises UserError if it does not fit."""
    assert experiment.plan != SEARCH, "a searched plan must be found first"
    tokens, recompute = experiment.micro_batch_tokens, experiment.recompute
    return make_plan(experiment.plan, models.graph, cluster, tokens, models.shapes, recompute=recompute)


def open_models(experiment: Experiment, *, evaluates: bool = False, download: bool = False) -> RoleModels:
    """Open the models of a recipe: find their shapes, adapters and shared weights, without reading weights.

    `evaluates`: open only the roles that evaluation uses, all of them frozen. `download`: fetch the `config.json`
    of models on the hub. Raises UserError if a file is wrong or missing. Also raises UserError if the recipe trains
    more layers than a model has, balances experts of a model without experts, or compares models with different
    vocabularies.
    """
    graph, configs = experiment.graph, experiment.model_configs
    if evaluates:
        assert experiment.eval_graph is not None, "there is an evaluation"
        graph = experiment.eval_graph
        configs = {role: freeze(config) for role, config in configs.items() if role in graph.roles}
    shapes = {}
    for role in experiment.spec.list_sources_first(experiment):
        if role in configs:
            try:
                shape = find_model_shape(configs[role]) if download else known_shape(configs[role])
            except UserError as error:
                raise UserError(f"models.{role}: {error}") from None
            if shape is not None:
                shapes[role] = shape.for_lengths(experiment.longest[0])
    _check_candidates(graph, shapes)
    adapters = _find_adapters(configs, graph.averages)
    shapes = {role: shape.model_copy(update={"lora": adapters.get(role)}) for role, shape in shapes.items()}
    parts = _find_trainable_parts(configs, graph.averages, adapters)
    _check_sizes(configs, shapes, experiment.spec.heads, parts)
    bases = _name_shared_weights(configs, shapes, experiment.spec.heads, parts, graph.averages)
    stored = {
        role: StoredModel(
            shape=shapes[role],
            head=experiment.spec.heads[role],
            dtype=DTYPES[config.compute_dtype],
            trained=graph.trained(role),
            part=parts[role],
            exact=experiment.exact,
            base=bases.get(role),
        )
        for role, config in configs.items()
        if role in shapes
    }
    if not evaluates:
        graph = _replay_routers(graph, configs, shapes)
    return RoleModels(graph, configs, parts, stored)


def _find_trainable_parts(
    configs: Mapping[str, ModelConfig], averages: Sequence[MovingAverage], adapters: Mapping[str, LowRank]
) -> dict[str, TrainablePart]:
    """Find the part of each role's model that training updates.

    A role that is the moving average of another role has the same part as its source. The part of a frozen role
    whose adapters stay separate is its adapters.
    """
    parts = {
        role: TrainablePart(adapters=role in adapters, quantised=config.quantised is not None)
        for role, config in configs.items()
    }
    for role, config in trained_models(configs).items():
        if role not in adapters:
            parts[role] = TrainablePart(config.trainable_layers, config.freeze_embeddings)
    return parts | {average.role: parts[average.source] for average in averages}


def _check_sizes(
    configs: Mapping[str, ModelConfig],
    shapes: Mapping[str, ModelShape],
    heads: Mapping[str, Head],
    parts: Mapping[str, TrainablePart],
) -> None:
    """Check settings that depend on the sizes of models. Raises UserError for a mistake."""
    for role, shape in shapes.items():
        try:
            model_tensors(shape, heads[role])
        except UserError as error:
            raise UserError(f"models.{role}.{error}" if shape.lora else str(error)) from None
        layers = parts[role].last_layers
        if layers is not None and layers > shape.layers:
            raise UserError(
                f"models.{role}.trainable_layers={layers} is more than the {shape.layers} decoder layers of the"
                " model; null trains all of them"
            )
    for role, config in trained_models(configs).items():
        if config.router_loss and role in shapes and shapes[role].mixture is None:
            raise UserError(
                f"models.{role}.router_loss={config.router_loss:g} balances the experts of a mixture, but layers of"
                " the model have no experts; leave it out"
            )
        last = parts[role].last_layers
        if config.router_loss and role in shapes and last is not None:
            shape = shapes[role]
            if all(shape.mixture_of(layer) is None for layer in range(shape.layers - last, shape.layers)):
                raise UserError(
                    f"models.{role}: router_loss={config.router_loss:g} and trainable_layers={last} exclude each"
                    f" other: none of the last {last} layers has experts, so all routers are frozen"
                )


def _replay_routers(
    graph: DataflowGraph, configs: Mapping[str, ModelConfig], shapes: Mapping[str, ModelShape]
) -> DataflowGraph:
    """Add router replay for mixtures of experts that are trained on their own samples. `shapes`: the known shapes.

    Raises UserError if a recipe requests replay for a role that has nothing to replay.
    """
    sampling, widths = find_replaying_roles(graph), {}
    for role, config in trained_models(configs).items():
        if role not in shapes:
            continue
        shape, field = shapes[role], f"models.{role}.router_replay={str(config.router_replay).lower()}"
        if shape.mixture is None:
            if config.router_replay is not None:
                raise UserError(
                    f"{field}: the model is not a mixture of experts, so it has no router; leave the setting out"
                )
        elif role in sampling:
            if config.router_replay is not False:
                lost = None
                if any(call.span > 1 for call in graph.calls):
                    lost = "asynchrony.partial=true, the experts of an answer's first tokens are not kept"
                elif graph.streaming is not None:
                    lost = "asynchrony.portions, the experts of answers are not kept"
                if lost is not None:
                    raise UserError(f"models.{role}: with {lost}; set models.{role}.router_replay=false")
                widths[role] = shape.layers * shape.mixture.per_token
        elif config.router_replay:
            raise UserError(f"{field}: {role} is not trained on samples of its own; leave the setting out")
    return add_router_replay(graph, widths) if widths else graph


def _check_candidates(graph: DataflowGraph, shapes: Mapping[str, ModelShape]) -> None:
    """Check that compared models have equal vocabularies, with enough candidate tokens. Raises UserError if not."""
    for call in graph.calls:
        if call.candidates is None or call.model_role not in shapes:
            continue
        vocabulary, candidates = shapes[call.model_role].vocab_size, call.candidates
        if candidates.count > vocabulary:
            raise UserError(
                f"{candidates.setting}={candidates.count} is more than the {vocabulary} tokens of the vocabulary of"
                f" models.{call.model_role}"
            )
        source = graph.producer(candidates.ids) if candidates.ids is not None else None
        if source is None or source.is_function or source.model_role not in shapes:
            continue
        other = shapes[source.model_role].vocab_size
        if other != vocabulary:
            raise UserError(
                f"models.{source.model_role} has a vocabulary of {other} tokens and models.{call.model_role} one of"
                f" {vocabulary}; {call.name} compares their distributions, which takes the same one"
            )


def _compile_phase(
    graph: DataflowGraph,
    plan: Plan,
    *,
    homes: Mapping[str, Placement],
    kept: Mapping[str, tuple[Placement, ...]],
    models: RoleModels,
    done: Mapping[str, Placement] | None = None,
) -> Phase:
    """Compile a kind of step, and validate its programs.

    `done`: placements of the calls that have already run and whose outputs the programs use.
    """
    parts = models.parts
    homes = {role: homes[role] for role in graph.roles}
    kept = {role: kept[role] for role in graph.roles if role in kept}

    def build(graph: DataflowGraph, batches: range) -> list[Program]:
        if graph.streaming is not None:
            return lower_step(graph, plan, homes, kept, parts)
        return lower(graph, plan, homes, kept, parts, done or {}, batches)

    made: dict[tuple[frozenset[int], range], list[Program]] = {}
    everything = range(graph.ahead + 1)
    for due in {graph.periods: None, **share_steps(graph.periods)}:
        of_due = graph.with_due(due)

        def programs_of(batches: range, of_due: DataflowGraph = of_due) -> list[Program]:
            name = _name_step(of_due.periods, batches)
            if name not in made:
                made[name] = build(of_due, batches)
            return made[name]

        if graph.streaming is not None:
            programs_of(everything)
            validate_portions(of_due, plan, homes, kept, parts)
        elif graph.ahead:
            validate_ahead(programs_of, of_due, homes, offloaded(plan), kept, parts)
        else:
            validate(programs_of(everything), of_due, homes, offloaded(plan), kept, parts, done)
    programs = made.pop((graph.periods, everything))
    return Phase(graph, plan, programs, made, models.attention_costs)


def _name_step(due: frozenset[int], batches: range) -> tuple[frozenset[int], range]:
    """Identify the programs of a step. No moving average is due in a step that trains on no batch."""
    return due if 0 in batches else frozenset(), batches


def _check_batch(experiment: Experiment, graph: DataflowGraph, plan: Plan) -> None:
    batch, samples = experiment.data.batch, experiment.spec.samples_per_prompt(experiment)
    for call in graph.calls:
        dp = plan[call.name].strategy.dp
        if call.portions > 1 and batch // dp < call.portions:
            raise UserError(
                f"asynchrony.portions={call.portions}: data.batch={batch} gives {batch // dp} whole prompts to each"
                f" of the {dp} data-parallel ranks of {call.name}, and each portion takes at least one; set fewer"
                " portions"
            )
        if batch * samples // call.minibatches < dp:
            items = f"data.batch={batch}"
            items += f", each sampled {samples} times," if samples > 1 else ""
            items += f" in {call.minibatches} mini-batches" if call.minibatches > 1 else ""
            raise UserError(
                f"{items} gives less than one item to each of the {dp} data-parallel ranks of {call.name}; make it"
                f" at least {-(-dp * call.minibatches // samples)}"
            )


def _find_adapters(
    configs: Mapping[str, ModelConfig], averages: Iterable[MovingAverage]
) -> dict[str, LowRank]:
    """Find the adapter settings of each role whose adapters stay separate from its model.

    Such a role trains adapters, or is the moving average of a role that does. The adapters in a frozen role's own
    directory also stay separate if another role trains adapters for the same model. Both roles then share the
    memory of the model. In all other cases, and for quantised models, adapters are merged into the model.
    """
    found = {role: of.lora for role, of in trained_models(configs).items() if of.lora is not None}
    trained_for = {_name_base(configs[role]) for role in found}
    followed = {average.role: average.source for average in averages}
    for role, config in configs.items():
        source = followed.get(role)
        if source in found:
            found[role] = found[source]
        elif _is_frozen(role, configs) and config.path is not None and is_local(config.path):
            saved = known_adapters(config.path)
            shares = saved is not None and saved.lora.targets and _name_base(config) in trained_for
            if saved is not None and shares and not adapts_single_experts(saved):
                found[role] = saved.lora
    return found


def _name_shared_weights(
    configs: Mapping[str, ModelConfig],
    shapes: Mapping[str, ModelShape],
    heads: Mapping[str, Head],
    parts: Mapping[str, TrainablePart],
    averages: Iterable[MovingAverage],
) -> dict[str, str]:
    """Give names to the frozen weights of roles with adapters, and of frozen language models.

    Roles whose weights have the same name share these weights, or a part of them, in the same dtype. Quantised
    roles get no name.
    """
    changing = {average.role for average in averages if not average.same_start}
    found = {}
    for role, shape in shapes.items():
        path = configs[role].path
        merged = path is not None and known_adapters(path) is not None
        frozen = _is_frozen(role, configs) and heads[role] == "lm" and not merged
        if role not in changing and (parts[role].adapters or frozen):
            sizes = shape.model_copy(update={"lora": None}).model_dump_json()
            found[role] = f"{_name_base(configs[role])} {sizes}"
    return found


def _is_frozen(role: str, configs: Mapping[str, ModelConfig]) -> bool:
    """Return whether a role is frozen and not quantised."""
    return role not in trained_models(configs) and configs[role].quantised is None


def _name_base(config: ModelConfig) -> str:
    """Name the weights of a model, without its adapters, and their dtype.

    Freshly initialised weights have an empty name, because they depend only on sizes and seed.
    """
    saved = None if config.path is None else known_adapters(config.path)
    base = saved.base if saved is not None else config.path or ""
    return f"{local_path(base).resolve() if is_local(base) else base} {config.dtype}"
