"""Router replay: calls of a mixture of experts use the experts that the same role chose while it sampled. The
method is "Rollout Routing Replay" (R3, Ma et al. 2025, arXiv 2510.11370)."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from realrl.dataflow.call import ROUTED_EXPERTS, Call, Key, Kind, Replay
from realrl.dataflow.graph import DataflowGraph


def find_replaying_roles(graph: DataflowGraph) -> tuple[str, ...]:
    """List the roles that infer or train on sequences that they sampled themselves."""
    pairs = [(call, reader) for call in graph.calls for reader in _readers(graph, call)]
    return tuple(dict.fromkeys(call.model_role for call, _ in pairs))


def add_router_replay(graph: DataflowGraph, widths: Mapping[str, int]) -> DataflowGraph:
    """Let roles record their experts while they sample, and use the same experts on the same sequences later.

    `widths` maps each role to the number of experts that a token uses, summed over layers. Calls of roles that are
    not in `widths` do not change.
    """
    calls = {call.name: call for call in graph.calls}
    keys = [*graph.keys.values()]
    for call in graph.calls:
        readers = _readers(graph, call, widths)
        if not readers:
            continue
        sequences, experts = f"{call.prefix}sequences", f"{call.prefix}{ROUTED_EXPERTS}"
        keys.append(Key(experts, "int16", sequences, widths[call.model_role]))
        calls[call.name] = replace(call, outputs=(*call.outputs, experts))
        for reader in readers:
            calls[reader.name] = _replay(calls[reader.name], Replay(sequences, experts))
    return DataflowGraph(calls.values(), keys, graph.averages)


def _readers(graph: DataflowGraph, call: Call, roles: Collection[str] | None = None) -> list[Call]:
    """List the calls that run the model of a generate call on its sequences. The list is empty if `call` is not a
    generate call, or if its role is not in `roles`."""
    if call.kind is not Kind.GENERATE or (roles is not None and call.role not in roles):
        return []
    return [
        other
        for other in graph.calls
        if other.role == call.role
        and other.kind in (Kind.INFERENCE, Kind.TRAIN)
        and f"{call.prefix}sequences" in other.work
    ]


def _replay(call: Call, made: Replay) -> Call:
    known = call.replays or (None,) * len(call.work)
    replays = tuple(made if key == made.sequences else old for key, old in zip(call.work, known, strict=True))
    return replace(call, inputs=(*call.inputs, made.experts), replays=replays)
