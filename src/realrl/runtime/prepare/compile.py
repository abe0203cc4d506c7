"""Compilation of a recipe to validated programs; the models, adapters and shared weights of its roles. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.dataflow.call import MovingAverage
from realrl.dataflow.graph import DataflowGraph, share_steps
from realrl.dataflow.replay import add_router_replay, find_replaying_roles
from realrl.families.adapters import LowRank
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface.directory import find_model_shape, known_adapters, known_shape
from realrl.layout.sets import TrainablePart
from realrl.plan.cluster import Cluster
from realrl.plan.placement import DTYPES, Placement
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH, make_plan
from realrl.program.instructions import Program
from realrl.program.lower import home_placements, kept_copies, lower, lower_start, offloaded
from realrl.program.memory import Memory, StoredModel, check_offloading
from realrl.program.order import TrainableParts
from realrl.program.validate import validate, validate_start
from realrl.recipe.algorithm import SCORE
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig, freeze, trained_models


def replay_routers(
    graph: DataflowGraph, configs: Mapping[str, ModelConfig], shapes: Mapping[str, ModelShape]
) -> DataflowGraph:
    """Add router replay for mixtures that are trained on their own samples; `shapes` has the known shapes.

    Raises UserError if a recipe asks for it in a role without anything to replay.
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
                widths[role] = shape.layers * shape.mixture.per_token
        elif config.router_replay:
            raise UserError(f"{field}: {role} is not trained on samples of its own; leave the setting out")
    return add_router_replay(graph, widths) if widths else graph


@dataclass(frozen=True)
class Phase:
    """One kind of step: its graph, its plan, and the program of every rank.

    `programs` update all moving averages of the graph. `partial` has the programs of steps in which only some are
    due, by the periods of the due ones.
    """

    graph: DataflowGraph
    plan: Plan
    programs: list[Program]
    partial: Mapping[frozenset[int], list[Program]]

    def programs_of(self, step: int) -> list[Program]:
        """Find the programs of a training step, counted from 1."""
        return self.partial.get(self.graph.due(step), self.programs)


@dataclass(frozen=True)
class SampledStep:
    """A training step in two parts, for sampling in rounds (`AlgorithmSpec.sampling_rounds`)."""

    rounds: int
    """Maximum number of rounds."""
    sampling: Phase
    """The calls on which `score` depends; they run in every round."""
    learning: Phase
    """The whole graph, with programs of the other calls; they start from the rounds' outputs."""


@dataclass(frozen=True)
class Compiled:
    """A recipe compiled for a cluster: training steps, evaluation steps, and homes of parameters between steps.

    `start` has the programs that make the `kept` copies before the first step.
    """

    train: Phase
    evaluation: Phase | None
    homes: Mapping[str, Placement]
    kept: Mapping[str, tuple[Placement, ...]]
    start: list[Program]
    memory: Memory
    sampled: SampledStep | None = None
    """The training step in two parts, if it samples in rounds."""

    @property
    def phases(self) -> dict[str, Phase]:
        """Kinds of steps by name."""
        return {"train": self.train} | ({"eval": self.evaluation} if self.evaluation else {})

    @property
    def unknown(self) -> tuple[str, ...]:
        """Roles whose size is not known on this machine."""
        return tuple(role for role in self.homes if role not in self.memory.stored)

    @property
    def programs(self) -> dict[str, list[Program]]:
        """Programs of all ranks: `start`, unless it is empty, and each kind of step.

        `train-due-2` has the programs of steps in which only moving averages of period 2 are due.
        """
        starts = any(program.instructions for program in self.start)
        found = {"start": self.start} if starts else {}
        phases = self.phases
        if self.sampled is not None:
            phases |= {"sampling": self.sampled.sampling, "learning": self.sampled.learning}
        for name, phase in phases.items():
            found[name] = phase.programs
            for due, programs in phase.partial.items():
                found[f"{name}-due-{'-'.join(map(str, sorted(due))) or 'none'}"] = programs
        return found


def find_trainable_parts(
    configs: Mapping[str, ModelConfig], averages: Sequence[MovingAverage]
) -> dict[str, TrainablePart]:
    """Find the part of every role that training updates.

    A role that follows another, and a frozen role whose adapters stay separate, are divided in the same way.
    """
    adapted = find_adapters_of_roles(configs, averages)
    parts = {
        role: TrainablePart(adapters=role in adapted, quantised=config.quantised is not None)
        for role, config in configs.items()
    }
    for role, config in trained_models(configs).items():
        if role not in adapted:
            parts[role] = TrainablePart(config.trainable_layers, config.freeze_embeddings)
    return parts | {average.role: parts[average.source] for average in averages}


def stored_models(
    experiment: Experiment, graph: DataflowGraph, shapes: Mapping[str, ModelShape]
) -> dict[str, StoredModel]:
    """Describe the storage of roles; `shapes` has the shapes of their files.

    Raises UserError if a recipe trains more layers than a model has, balances experts of a model without
    experts, or compares models with different vocabularies.
    """
    _check_candidates(graph, shapes)
    configs = experiment.model_configs
    shapes = adapt_shapes(shapes, configs, graph.averages)
    heads = experiment.spec.heads
    parts = find_trainable_parts(configs, graph.averages)
    bases = find_shared_bases(configs, shapes, heads, parts, graph.averages)
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
    return {
        role: StoredModel(
            shape=shapes[role],
            head=heads[role],
            dtype=DTYPES[config.compute_dtype],
            trained=graph.trained(role),
            part=parts[role],
            exact=experiment.exact,
            base=bases.get(role),
        )
        for role, config in configs.items()
        if role in shapes
    }


def _check_candidates(graph: DataflowGraph, shapes: Mapping[str, ModelShape]) -> None:
    """Check that vocabularies are equal and have enough candidate tokens. Raises UserError if not."""
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


def compile_recipe(experiment: Experiment, cluster: Cluster, plan: Plan | None = None) -> Compiled:
    """Compile a recipe to graph, plan and validated programs. Raises UserError for an invalid plan.

    `plan` replaces the recipe's plan, and is required if that is `search`. Checks that depend on sizes cover the
    models whose sizes are known without the network. Memory is not checked.
    """
    graph = experiment.graph
    stored = _known_models(experiment, graph)
    graph = replay_routers(graph, experiment.model_configs, {role: of.shape for role, of in stored.items()})
    if plan is None:
        plan = make_written_plan(experiment, cluster)
    else:
        plan.check(graph, {role: of.shape for role, of in stored.items()})
    if experiment.exact:
        plan.check_exact()
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    _check_batch(experiment, graph, plan)
    parts = find_trainable_parts(experiment.model_configs, graph.averages)
    start = lower_start(plan, homes, kept, parts)
    validate_start(start, homes, offloaded(plan), kept, parts)
    train, evaluation, eval_graph = (
        _phase(graph, plan, homes, kept, parts),
        None,
        experiment.eval_graph,
    )
    if eval_graph is not None:
        evaluation = _phase(eval_graph, plan.evaluation(eval_graph, graph), homes, kept, parts)
    memory = Memory(stored, homes, offloaded(plan), kept)
    check_offloading(plan, memory.holders)
    rounds = experiment.spec.sampling_rounds(experiment)
    sampled = None if rounds == 1 else _sampled_step(rounds, train, homes, kept, parts)
    return Compiled(train, evaluation, homes, kept, start, memory, sampled)


@dataclass(frozen=True)
class CompiledEvaluation:
    """Evaluation of a recipe without training, compiled for a cluster: steps, and homes of parameters."""

    evaluation: Phase
    homes: Mapping[str, Placement]


def make_written_plan(experiment: Experiment, cluster: Cluster) -> Plan:
    """Make the plan that a recipe names: a preset or a plan file. Raises UserError if it does not fit."""
    assert experiment.plan != SEARCH, "a searched plan must be found first"
    graph, tokens = experiment.graph, experiment.micro_batch_tokens
    shapes = {role: of.shape for role, of in _known_models(experiment, graph).items()}
    return make_plan(experiment.plan, graph, cluster, tokens, shapes, recompute=experiment.recompute)


def compile_evaluation(experiment: Experiment, plan: Plan) -> CompiledEvaluation:
    """Compile the evaluation of a recipe without training, on its plan.

    Roles that evaluation does not use, optimizer state and kept copies are left out. Raises UserError if the recipe
    has no evaluation, or the plan does not fit its models.
    """
    graph, eval_graph = experiment.graph, experiment.eval_graph
    if eval_graph is None:
        raise UserError("data.eval: missing; give the records to evaluate on")
    plan.check(graph, {role: of.shape for role, of in _known_models(experiment, graph).items()})
    if experiment.exact:
        plan.check_exact()
    plan = replace(plan.evaluation(eval_graph, graph), offload_optimizer=(), keep=())
    homes = home_placements(eval_graph, plan)
    frozen = {
        role: freeze(config) for role, config in experiment.model_configs.items() if role in eval_graph.roles
    }
    phase = _phase(eval_graph, plan, homes, {}, find_trainable_parts(frozen, ()))
    return CompiledEvaluation(phase, homes)


def _known_models(experiment: Experiment, graph: DataflowGraph) -> dict[str, StoredModel]:
    """Describe the storage of roles whose size is known without the network."""
    known = {role: known_shape(config) for role, config in experiment.model_configs.items()}
    return stored_models(experiment, graph, {role: shape for role, shape in known.items() if shape})


def with_sizes(experiment: Experiment, compiled: Compiled, plan: Plan | None) -> Compiled:
    """Compile again with the hub's shapes, if this machine does not know the shapes of all models.

    Only `config.json` is fetched. `plan` is as in `compile_recipe`. Raises UserError if the hub does not answer.
    """
    if not compiled.unknown:
        return compiled
    configs = experiment.model_configs
    for role in experiment.spec.list_sources_first(experiment):
        try:
            find_model_shape(configs[role])
        except UserError as error:
            raise UserError(f"models.{role}: {error}") from None
    return compile_recipe(experiment, compiled.train.plan.cluster, plan)


def _phase(
    graph: DataflowGraph,
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Mapping[str, tuple[Placement, ...]],
    parts: TrainableParts,
    done: Mapping[str, Placement] | None = None,
) -> Phase:
    homes = {role: homes[role] for role in graph.roles}
    kept = {role: kept[role] for role in graph.roles if role in kept}

    def build(graph: DataflowGraph) -> list[Program]:
        programs = lower(graph, plan, homes, kept, parts, done or {})
        validate(programs, graph, homes, offloaded(plan), kept, parts, done)
        return programs

    partial = [due for due in share_steps(graph.periods) if due != graph.periods]
    return Phase(graph, plan, build(graph), {due: build(graph.with_due(due)) for due in partial})


def _sampled_step(
    rounds: int,
    train: Phase,
    homes: Mapping[str, Placement],
    kept: Mapping[str, tuple[Placement, ...]],
    parts: TrainableParts,
) -> SampledStep:
    graph, plan = train.graph, train.plan
    sampling = _phase(graph.upstream(SCORE), plan, homes, kept, parts)
    done = {call.name: plan[call.name] for call in sampling.graph.calls}
    return SampledStep(rounds, sampling, _phase(graph, plan, homes, kept, parts, done))


def _check_batch(experiment: Experiment, graph: DataflowGraph, plan: Plan) -> None:
    batch, samples = experiment.data.batch, experiment.spec.samples_per_prompt(experiment)
    for call in graph.calls:
        dp = plan[call.name].strategy.dp
        if batch * samples // call.minibatches < dp:
            items = f"data.batch={batch}"
            items += f", each sampled {samples} times," if samples > 1 else ""
            items += f" in {call.minibatches} mini-batches" if call.minibatches > 1 else ""
            raise UserError(
                f"{items} gives less than one item to each of the {dp} data-parallel ranks of {call.name}; make it"
                f" at least {-(-dp * call.minibatches // samples)}"
            )


def find_adapters_of_roles(
    configs: Mapping[str, ModelConfig], averages: Iterable[MovingAverage]
) -> dict[str, LowRank]:
    """Find the adapter settings of each role whose adapters stay separate from its model.

    A role trains adapters, or follows a role that does. A frozen role keeps the adapters in its own directory
    separate if another role trains adapters for the same model: the two then share the model's memory. In all other
    cases, and for quantised models, adapters are merged into the model.
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
            if saved is not None and saved.lora.targets and _name_base(config) in trained_for:
                found[role] = saved.lora
    return found


def adapt_shapes(
    shapes: Mapping[str, ModelShape],
    configs: Mapping[str, ModelConfig],
    averages: Iterable[MovingAverage],
) -> dict[str, ModelShape]:
    """Set the adapters in the shapes of roles (see `find_adapters_of_roles`)."""
    adapters = find_adapters_of_roles(configs, averages)
    return {
        role: shape.model_copy(update={"lora": adapters.get(role)})
        if shape.lora != adapters.get(role)
        else shape
        for role, shape in shapes.items()
    }


def find_shared_bases(
    configs: Mapping[str, ModelConfig],
    shapes: Mapping[str, ModelShape],
    heads: Mapping[str, Head],
    parts: Mapping[str, TrainablePart],
    averages: Iterable[MovingAverage],
) -> dict[str, str]:
    """Name the frozen weights of roles with adapters, and of frozen language models.

    Roles with the same name have the same base set in the same type, or a part of it. A quantised role has no name.
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
    """Tell whether a role is frozen and not quantised."""
    return role not in trained_models(configs) and configs[role].quantised is None


def _name_base(config: ModelConfig) -> str:
    """Name the weights under adapters, or of a model without adapters, with their type.

    Freshly initialised weights have an empty name: they depend on sizes and seed alone.
    """
    saved = None if config.path is None else known_adapters(config.path)
    base = saved.base if saved is not None else config.path or ""
    return f"{local_path(base).resolve() if is_local(base) else base} {config.dtype}"
