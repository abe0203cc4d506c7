"""List changes of a recipe, plan file or cluster that may make a plan fit. Does not import torch."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.axes import list_degrees
from realrl.plan.placement import Placement, Strategy, divides_experts
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.simulate.estimate import Footprint, PartKind
from realrl.planner.simulate.scenario import Scenario
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import apply_overrides, parse_experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.prepare.scenarios import Measured, make_scenario


@dataclass(frozen=True)
class Draft:
    """The parts of a run that changes apply to: recipe, plan file, and devices."""

    experiment: Experiment
    spec: ClusterSpec
    """Devices of the run."""
    plan: Plan | None = None
    """Content of the plan file; None if the recipe names a preset or a search."""
    measured: Measured = field(default_factory=Measured)

    def scenario(self) -> Scenario:
        """Describe the training step for the planner. Raises UserError if the shape of a model cannot be found."""
        return make_scenario(self.experiment, self.spec, self.measured)


@dataclass(frozen=True)
class Change:
    """A change that a user can make. `apply` returns the draft with this change.

    `apply` raises UserError if the change is not possible.
    """

    text: str
    """The change in words, for example `data.batch=32`, or the devices to use."""
    apply: Callable[[Draft], Draft]
    preposition: str = "with"


Attempts = Generator[Change, bool, None]
"""Generator of changes of one kind, the mildest first.

For each change, the caller sends whether everything fits with it. The generator may then yield a milder change. The
last change that fits is the result.
"""


def in_order(changes: Iterable[Change]) -> Attempts:
    """Yield changes in order; stop at the first that makes the plan fit."""
    for change in changes:
        if (yield change):
            return


def set_fields(*overrides: str) -> Change:
    """Return a change of fields of the recipe, each written as `key=value`."""

    def apply(draft: Draft) -> Draft:
        document = apply_overrides(draft.experiment.model_dump(mode="json"), overrides)
        return replace(draft, experiment=parse_experiment(document))

    return Change(" ".join(overrides), apply)


def is_wide(config: ModelConfig) -> bool:
    """Return whether a model would take less memory in bfloat16."""
    return config.dtype != "bfloat16" and config.quantised is None


def list_halves(number: int, least: int) -> list[int]:
    """List one half of a number, one quarter, and so on, down to `least`."""
    found = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found


_MOST_DEVICES = 1024
_SHORTEST = 64
"""Minimum length in tokens that is suggested."""
_MOST_HALVINGS = 3
"""Maximum number of halvings of the batch."""


def list_search_changes(draft: Draft) -> Iterator[Attempts]:
    """List changes with which some plan may fit, the cheapest first.

    Changes of settings come first, then other devices, then changes that alter the results.
    """
    yield in_order(_narrower_types(draft.experiment))
    yield _more_nodes(draft.spec)
    yield in_order(_larger_devices(draft.spec))
    yield in_order(_quantised(draft.experiment))
    yield in_order(_shorter_sequences(draft))
    yield in_order(islice(list_smaller_batches(draft.experiment), _MOST_HALVINGS))


def list_smaller_batches(experiment: Experiment) -> list[Change]:
    """List changes to smaller batches, which alter the results."""
    return [set_fields(f"data.batch={n}") for n in list_halves(experiment.data.batch, 1)]


def _narrower_types(experiment: Experiment) -> Iterator[Change]:
    """Yield the change to bfloat16 for frozen roles, then for all roles."""
    graph = experiment.graph
    # Leave out moving averages, which need the precision of float32.
    averages = {average.role for average in graph.averages}
    wide = [role for role, config in experiment.model_configs.items() if is_wide(config)]
    wide = [role for role in wide if role not in averages]
    frozen = [role for role in wide if not graph.trained(role)]
    for roles in dict.fromkeys((tuple(frozen), tuple(wide))):
        if roles:
            yield set_fields(*(f"models.{role}.dtype=bfloat16" for role in roles))


def _quantised(experiment: Experiment) -> Iterator[Change]:
    """Yield the change to int8 storage for the matrices of all frozen roles."""
    graph = experiment.graph
    changing = {average.role for average in graph.averages}
    changing |= {role for role in graph.roles if graph.trained(role)}
    still = [
        role for role, of in experiment.model_configs.items() if role not in changing and of.quantised is None
    ]
    if still:
        yield set_fields(*(f"models.{role}.dtype=int8" for role in still))


def _more_nodes(spec: ClusterSpec) -> Attempts:
    """Yield changes of the number of nodes: doubled until a plan fits, then bisected to find the smallest
    number."""
    if len(spec.groups) > 1:
        return
    nodes, most = spec.nodes, _MOST_DEVICES // spec.groups[0].devices_per_node
    too_few, enough = nodes, False
    while nodes < most and not enough:
        too_few, nodes = nodes, min(2 * nodes, most)
        enough = yield _on(f"{nodes} nodes", spec.with_nodes(nodes))
    while enough and nodes - too_few > 1:
        middle = (too_few + nodes) // 2
        if (yield _on(f"{middle} nodes", spec.with_nodes(middle))):
            nodes = middle
        else:
            too_few = middle


def _larger_devices(spec: ClusterSpec) -> Iterator[Change]:
    """Yield changes to built-in devices with more memory, in order of memory.

    Devices with about equal memory are in order of speed, the slowest first.
    """
    group, *others = spec.groups
    if group.device.cpu or others:
        return
    for kind in sorted(DEVICES.values(), key=lambda kind: (kind.memory_bytes >> 33, kind.bf16_flops)):
        if not kind.cpu and kind.memory_bytes > 1.1 * group.device.memory_bytes:
            larger = replace(group, device=kind, node_bytes_per_s=kind.node_bytes_per_s)
            yield _on(str(larger), ClusterSpec(str(larger), (larger,)))


def _shorter_sequences(draft: Draft) -> Iterator[Change]:
    """Yield changes that shorten prompts or answers, whichever are longer.

    In recipes without generation, the changes shorten whole sequences.
    """
    experiment, workload = draft.experiment, draft.scenario().workload
    if not any(call.kind is Kind.GENERATE for call in experiment.graph.calls):
        for longest in _shorter(max(workload.prompts)):
            also = [f"data.max_prompt_tokens={longest}"] * (experiment.data.max_prompt_tokens > longest)
            yield _shorter_prompts(longest, f"data.max_tokens={longest}", *also)
    elif workload.max_new_tokens < max(workload.prompts):
        for longest in _shorter(max(workload.prompts)):
            yield _shorter_prompts(longest, f"data.max_prompt_tokens={longest}")
    else:
        generation = experiment.spec.generation
        fewest = 0 if generation is None else generation(experiment).min_new_tokens
        for longest in _shorter(workload.max_new_tokens):
            also = [f"generation.min_new_tokens={longest}"] * (fewest > longest)
            yield set_fields(f"generation.max_new_tokens={longest}", *also)


def _shorter(tokens: int) -> Sequence[int]:
    """List one half of a length, one quarter, and so on, down to a useful minimum."""
    return list_halves(tokens, _SHORTEST // 2 + 1)


def _shorter_prompts(longest: int, *overrides: str) -> Change:
    """Return a change that shortens prompts, or whole sequences, in the recipe and in the measured lengths."""
    change = set_fields(*overrides)

    def apply(draft: Draft) -> Draft:
        prompts = draft.measured.prompts
        if prompts is not None:
            prompts = tuple(min(tokens, longest) for tokens in prompts)
        return replace(change.apply(draft), measured=replace(draft.measured, prompts=prompts))

    return replace(change, apply=apply)


def _on(text: str, spec: ClusterSpec) -> Change:
    """Return a change that replaces the devices by those of `spec`."""
    return Change(text, lambda draft: replace(draft, spec=spec), preposition="on")


Degrees = Sequence[Change]
"""Variants of one change, the mildest first."""


def list_plan_changes(
    draft: Draft, graph: DataflowGraph, peak: Footprint, *, offload: bool = True
) -> Iterator[Degrees]:
    """List changes that may reduce the `peak` of a device during a call of `graph`.

    Changes that cost the least time come first. Changes that alter the results come last. `offload`: whether hosts
    have memory of their own, so that offloading helps.
    """
    longest = draft.experiment.data.max_tokens
    if draft.plan is None:
        tokens = draft.experiment.micro_batch_tokens
        yield [set_fields(f"micro_batch_tokens={n}") for n in list_halves(tokens, longest)]
        yield [] if draft.experiment.recompute else [set_fields("recompute=true")]
    else:
        yield from _file_changes(draft.plan, graph, peak, longest, offload)
    for role, config in draft.experiment.model_configs.items():
        holds = any(part.role == role and part.kind is PartKind.PARAMETERS for part in peak.parts)
        if not graph.trained(role) and holds and config.quantised is None:
            types = ["bfloat16", "int8"] if is_wide(config) else ["int8"]
            yield [set_fields(f"models.{role}.dtype={name}") for name in types]


def _file_changes(
    plan: Plan, graph: DataflowGraph, peak: Footprint, longest: int, offload: bool
) -> Iterator[Degrees]:
    call = next((call for call in graph.calls if call.name == peak.during), None)
    if call is not None and call.name in plan.placements:
        together = [c.name for c in graph.role_calls(call.model_role) if c.name in plan.placements]
        together = [name for name in together if plan[name].layout == plan[call.name].layout]
        strategy = plan[call.name].strategy
        if strategy.tp > 1 and not strategy.sequence_parallel:
            yield [_strategy("sequence_parallel: true", together, sequence_parallel=True)]
        yield [
            _strategy(f"micro_batch_tokens: {n}", [call.name], micro_batch_tokens=n)
            for n in list_halves(strategy.micro_batch_tokens, longest)
        ]
        if strategy.zero_bubble:
            yield [_strategy("zero_bubble: false", [call.name], zero_bubble=False)]
        if call.kind is Kind.TRAIN and not strategy.recompute:
            yield [_strategy("recompute: true", [call.name], recompute=True)]
    running = call.role if call is not None else None
    training = running if call is not None and call.kind is Kind.TRAIN else None
    for part in sorted(peak.parts, key=lambda part: -peak.parts[part]):
        role, is_optimizer = part.role, part.kind is PartKind.OPTIMIZER
        if role is None:
            continue
        if part.host:
            yield [_unlisted("offload_optimizer" if is_optimizer else "offload", role)]
        elif part.copy is not None:
            yield [_unlisted("keep", role)] if role in plan.keep else []
        elif offload and is_optimizer and role != training:
            yield [_listed("offload_optimizer", role)]
        elif offload and not is_optimizer and role != running:
            yield [_listed("offload", role)]
    if call is not None and call.name in plan.placements:
        yield [
            _strategy(
                ", ".join(f"{axis}: {degree}" for axis, degree in s.all_degrees.named().items()),
                together,
                degrees=s.degrees,
            )
            for s in _more_parts(
                plan[call.name],
                plan.cluster.largest_node,
                [other for other in graph.calls if other.name in together],
            )
        ]


def _strategy(text: str, calls: Sequence[str], **fields: object) -> Change:
    """Return a change of some fields in the strategies of `calls` in the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files are changed call by call"
        placements = dict(draft.plan.placements)
        for name in calls:
            place = placements[name]
            placements[name] = replace(place, strategy=replace(place.strategy, **fields))  # type: ignore[arg-type]
        return replace(draft, plan=replace(draft.plan, placements=placements))

    return Change(f"{text} on {' and '.join(calls)}", apply)


def _listed(key: str, role: str) -> Change:
    """Return a change that adds a role to a list in the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files have such lists"
        roles = dict.fromkeys((*getattr(draft.plan, key), role))
        return replace(draft, plan=replace(draft.plan, **{key: tuple(roles)}))  # type: ignore[arg-type]

    return Change(f"{role} in {key}", apply)


def _unlisted(key: str, role: str) -> Change:
    """Return a change that removes a role from a list in the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files have such lists"
        others = tuple(other for other in getattr(draft.plan, key) if other != role)
        return replace(draft, plan=replace(draft.plan, **{key: others}))  # type: ignore[arg-type]

    return Change(f"{role} removed from {key}", apply)


def _more_parts(place: Placement, most: int, calls: Sequence[Call]) -> list[Strategy]:
    """List strategies that divide the model, the tokens of micro-batches, or the KV cache into more parts on the
    same mesh, the fewest parts first.

    `most`: maximum tensor parallelism. `calls`: the calls that get this strategy.
    """
    old, size = place.strategy, place.mesh.size
    generating = [call for call in calls if call.kind is Kind.GENERATE]
    contexts = 1 if any(call.is_function for call in calls) else (size // old.cp).bit_length()
    allowed = {
        "cp": [old.cp << doublings for doublings in range(contexts)],
        "tp": [old.tp << doublings for doublings in range((most // old.tp).bit_length())],
        "pp": [old.pp << doublings for doublings in range((size // old.pp).bit_length())],
    }
    found = (
        replace(old, degrees=degrees)
        for degrees in list_degrees(size, allowed, rest="dp")
        if (old.zero == 1 or degrees.copies > 1) and divides_experts(degrees, old.ep)
    )
    others = (s for s in found if s != old and all(s.can_generate(call.portions) for call in generating))
    return sorted(others, key=lambda s: (-s.dp, s.pp))
