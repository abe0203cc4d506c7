"""Changes of a recipe, or of its plan file, that save memory under its plan. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.axes import list_degrees
from realrl.plan.placement import Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import Footprint
from realrl.planner.simulate.memory_part import PartKind
from realrl.runtime.prepare.compile import models
from realrl.runtime.prepare.fit.change import Change, Draft, is_wide, list_halves, set_fields

Degrees = Sequence[Change]
"""Degrees of one change, the mildest first."""


def list_plan_changes(
    draft: Draft, graph: DataflowGraph, peak: Footprint, *, offload: bool = True
) -> Iterator[Degrees]:
    """List changes that may help a device that holds `peak` during a call of `graph`.

    The least costly in time come first, and last those that change the results. `offload`: whether the host has
    other memory than the device.
    """
    longest = draft.experiment.data.max_tokens
    if draft.plan is None:
        tokens = draft.experiment.micro_batch_tokens
        yield [set_fields(f"micro_batch_tokens={n}") for n in list_halves(tokens, longest)]
        yield [] if draft.experiment.recompute else [set_fields("recompute=true")]
    else:
        yield from _file_changes(draft.plan, graph, peak, longest, offload)
    for role, config in models(draft.experiment).items():
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
                ", ".join(f"{axis}: {degree}" for axis, degree in s.degrees.named().items()),
                together,
                degrees=s.degrees,
            )
            for s in _more_parts(plan[call.name], plan.cluster.largest_node)
        ]


def _strategy(text: str, calls: Sequence[str], **fields: object) -> Change:
    """Change settings of calls in the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files are changed call by call"
        placements = dict(draft.plan.placements)
        for name in calls:
            place = placements[name]
            placements[name] = replace(place, strategy=replace(place.strategy, **fields))  # type: ignore[arg-type]
        return replace(draft, plan=replace(draft.plan, placements=placements))

    return Change(f"{text} on {' and '.join(calls)}", apply)


def _listed(key: str, role: str) -> Change:
    """Add a role to a list of the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files have such lists"
        roles = dict.fromkeys((*getattr(draft.plan, key), role))
        return replace(draft, plan=replace(draft.plan, **{key: tuple(roles)}))  # type: ignore[arg-type]

    return Change(f"{role} in {key}", apply)


def _unlisted(key: str, role: str) -> Change:
    """Remove a role from a list of the plan file."""

    def apply(draft: Draft) -> Draft:
        assert draft.plan is not None, "only plan files have such lists"
        others = tuple(other for other in getattr(draft.plan, key) if other != role)
        return replace(draft, plan=replace(draft.plan, **{key: others}))  # type: ignore[arg-type]

    return Change(f"{role} removed from {key}", apply)


def _more_parts(place: Placement, most: int) -> list[Strategy]:
    """Divide the model into more parts on the same mesh, as few as possible first, `most` of tensor parallelism."""
    old, size = place.strategy, place.mesh.size
    allowed = {
        "tp": [old.tp << doublings for doublings in range((most // old.tp).bit_length())],
        "pp": [old.pp << doublings for doublings in range((size // old.pp).bit_length())],
    }
    found = (replace(old, degrees=degrees) for degrees in list_degrees(size, allowed, rest="dp"))
    return sorted((s for s in found if s != old), key=lambda s: (-s.dp, s.pp))
