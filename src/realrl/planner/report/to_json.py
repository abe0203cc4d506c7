"""JSON form of plan reports. Times are in seconds, and sizes in bytes."""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import yaml

from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.report.report import Alternative, Contender, PlanReport, Preset, SizeReport
from realrl.planner.simulate.estimate import LEVEL, CallEstimate, Estimate, MoveEstimate
from realrl.planner.simulate.scenario import Scenario

if TYPE_CHECKING:
    from realrl.planner.reliability.goodput import Goodput


def report_to_json(report: PlanReport) -> dict[str, Any]:
    """Convert a report to dicts, lists, text, numbers and None."""
    result = {
        **estimate_to_json(report.chosen, report.scenario.graph),
        "lower_bound_seconds": report.lower_bound_seconds,
        "gap": report.gap,
        "search_seconds": report.search_seconds,
        "evaluations": report.evaluations,
        "options": dict(report.candidates),
        "objective": report.objective,
        "interval": list(astuple(report.outlook.interval)),
        "level": LEVEL,
        "contenders": [
            _contender(contender, report.scenario.graph) for contender in report.contenders.values()
        ],
        "presets": {name: _preset(preset, report.scenario.graph) for name, preset in report.presets.items()},
        "alternatives": [_alternative(alternative) for alternative in report.alternatives],
        "cluster": _cluster(report.scenario.spec),
        "workload": _workload(report.scenario),
    }
    if report.goodput is not None:
        result["failures"] = _goodput(report.goodput, report.expected_gap)
    if report.sizes:
        result["nodes"] = [_size(size, report.scenario.graph) for size in report.sizes]
    if report.staleness:
        result["staleness"] = [
            {
                "asynchrony": row.settings.model_dump(),
                **(
                    {"refused": row.refused}
                    if row.estimate is None
                    else {
                        "step_seconds": row.estimate.step_seconds,
                        "gap": row.gap,
                        "plan": _plan(row.estimate, report.scenario.graph),
                    }
                ),
            }
            for row in report.staleness
        ]
    return result


def _goodput(found: "Goodput", gap: float) -> dict[str, Any]:
    """Convert the prediction of a run with failures. Infinite seconds become None."""
    expected = found.step_seconds if math.isfinite(found.step_seconds) else None
    return {
        "per_day": found.failures_per_day,
        "step_seconds": expected,
        "gap": gap,
        "goodput": found.share,
        "checkpoint_every": found.every,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_seconds": found.of.write,
        "waiting_seconds": found.of.stop,
        "restart_seconds": found.of.restart,
        "restart": dict(found.restart),
        "sockets": found.start.sockets,
        "communicators": found.start.communicators,
    }


def estimate_to_json(estimate: Estimate, graph: DataflowGraph) -> dict[str, Any]:
    """Convert an estimate to dicts, lists, text, numbers and None."""
    return {
        "plan": _plan(estimate, graph),
        "step_seconds": estimate.step_seconds,
        "repeated_seconds": estimate.repeated_seconds,
        "fits": estimate.fits,
        "peak_bytes": estimate.peak_bytes,
        "tokens_per_second": estimate.tokens_per_second,
        "utilisation": estimate.utilisation,
        "mfu": estimate.mfu,
        "terms": dict(estimate.terms),
        "calls": {name: _call(call) for name, call in estimate.calls.items()},
        "reallocations": [_move(move) for move in estimate.moves],
        "memory": _memory(estimate),
    }


def _plan(estimate: Estimate, graph: DataflowGraph) -> dict[str, Any]:
    """Convert a plan to the content of its file."""
    content: dict[str, Any] = yaml.safe_load(estimate.plan.to_text(graph))
    return content


def _contender(contender: Contender, graph: DataflowGraph) -> dict[str, Any]:
    return {
        "name": contender.name,
        "step_seconds": contender.estimate.step_seconds,
        "interval": list(astuple(contender.outlook.interval)),
        "fastest": contender.outlook.fastest,
        "parts": contender.parts,
        "plan": _plan(contender.estimate, graph),
    }


def _preset(preset: Preset, graph: DataflowGraph) -> dict[str, Any]:
    if preset.estimate is None:
        return {"refused": preset.refused}
    return {**estimate_to_json(preset.estimate, graph), "recompute_added": preset.recompute}


def _placement(placement: Placement, *, function: bool) -> dict[str, Any]:
    """Convert a placement. The placement of a function has only a mesh and a data-parallel degree."""
    strategy = placement.strategy
    if function:
        return {"mesh": str(placement.mesh), "dp": strategy.dp}
    return {
        "mesh": str(placement.mesh),
        **strategy.all_degrees.named(),
        "micro_batch_tokens": strategy.micro_batch_tokens,
        "recompute": strategy.recompute,
        "zero_bubble": strategy.zero_bubble,
        "zero": strategy.zero,
        "dtype": strategy.dtype,
    }


def _call(call: CallEstimate) -> dict[str, Any]:
    is_function = call.call.is_function
    strategy = call.placement.strategy
    own = (
        {"function": call.call.function} if is_function else {"sequence_parallel": strategy.sequence_parallel}
    )
    return {
        **own,
        **_placement(call.placement, function=is_function),
        "start": call.start,
        "end": call.end,
        # None for a function that no run has measured, which counts no time.
        "seconds": None if is_function and not call.terms else call.seconds,
        "terms": dict(call.terms),
    }


def _move(move: MoveEstimate) -> dict[str, Any]:
    return {
        "role": move.instruction.role,
        "parameter_set": move.instruction.parameter_set,
        "into": move.instruction.into or move.instruction.role,
        "from": move.instruction.source.layout,
        "to": move.instruction.target.layout,
        "before": move.before,
        "start": move.start,
        "seconds": move.seconds,
        "bytes": move.sent_bytes,
        "network_bytes": move.network_bytes,
    }


def _memory(estimate: Estimate) -> dict[str, Any]:
    device = estimate.peak_device
    return {
        "rank": device.rank,
        "capacity": device.capacity,
        "during": device.peak.during,
        "parts": {str(part): size for part, size in device.peak.parts.items()},
        "resting": {str(part): size for part, size in device.resident.items()},
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    changes = {
        "dtype": alternative.dtype,
        "offload": list(alternative.offload),
        "on_device": list(alternative.on_device),
        "keep": alternative.keep,
    }
    return {
        "call": alternative.call,
        **_placement(alternative.placement, function=alternative.function),
        **({} if alternative.function else changes),
        "step_seconds": alternative.step_seconds,
        "fits": alternative.fits,
        "reason": alternative.reason,
    }


def _cluster(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "devices": spec.size,
        "groups": [
            {
                "device": group.device.name,
                "nodes": group.nodes,
                "devices_per_node": group.devices_per_node,
                "memory_bytes": group.device.memory_bytes,
                "price_per_device_hour": group.price_per_device_hour,
            }
            for group in spec.groups
        ],
    }


def _workload(scenario: Scenario) -> dict[str, Any]:
    workload, environment = scenario.workload, {}
    if workload.environment is not None:
        times = workload.environment.times
        environment = {
            "environment": {
                "agents": times.agents,
                **{name: _lengths(getattr(times, name)) for name in ("seconds", "turns", "given")},
            }
        }
    return {
        "items": workload.items,
        "tokens": workload.tokens(scenario.graph),
        "prompts": _lengths(workload.prompts),
        "answers": {**_lengths(workload.answers), "longest": workload.longest_answer},
        "epochs": workload.epochs,
        "samples_per_prompt": workload.samples,
        **environment,
    }


def _lengths(lengths: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(lengths) / len(lengths), "least": min(lengths), "most": max(lengths)}


def _size(size: SizeReport, graph: DataflowGraph) -> dict[str, Any]:
    result: dict[str, Any] = {
        "cluster": size.cluster,
        "nodes": size.nodes,
        "devices": size.devices,
        "price_per_hour": size.price_per_hour,
        "fits": size.estimate is not None,
    }
    if size.estimate is None:
        return {**result, "refused": size.refused}
    return {
        **result,
        "step_seconds": size.estimate.step_seconds,
        **({} if size.goodput is None else {"failures": _goodput(size.goodput, size.gap or 0.0)}),
        "tokens_per_second": size.estimate.tokens_per_second,
        "device_hours": size.device_hours,
        "price": size.price,
        "gap": size.gap,
        "plan": _plan(size.estimate, graph),
    }
