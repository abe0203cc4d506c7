"""Changes of a recipe or of its devices, so that some plan fits. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from realrl.dataflow.call import Kind
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DEVICES
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.runtime.prepare.compile import models
from realrl.runtime.prepare.fit.change import (
    Attempts,
    Change,
    Draft,
    in_order,
    is_wide,
    list_halves,
    set_fields,
)

_MOST_DEVICES = 1024
_SHORTEST = 64
"""Minimum tokens worth suggesting."""
_MOST_HALVINGS = 3
"""Maximum halvings of the batch."""


def list_search_changes(draft: Draft) -> Iterator[Attempts]:
    """List changes with which some plan may fit, the cheapest first.

    Other settings come first, then other devices, and last what changes the results.
    """
    yield in_order(_narrower_types(draft.experiment))
    yield _more_nodes(draft.spec)
    yield in_order(_larger_devices(draft.spec))
    yield in_order(_quantised(draft.experiment))
    yield in_order(_shorter_sequences(draft))
    yield in_order(islice(list_smaller_batches(draft.experiment), _MOST_HALVINGS))


def list_smaller_batches(experiment: Experiment) -> list[Change]:
    """Fewer records per step, which changes what is learnt."""
    return [set_fields(f"data.batch={n}") for n in list_halves(experiment.data.batch, 1)]


def _narrower_types(experiment: Experiment) -> Iterator[Change]:
    """Store frozen roles, or all roles, in bfloat16."""
    graph = build_graph(experiment)
    # A moving average needs all digits of float32.
    averages = {average.role for average in graph.averages}
    wide = [role for role, config in models(experiment).items() if is_wide(config)]
    wide = [role for role in wide if role not in averages]
    frozen = [role for role in wide if not graph.trained(role)]
    for roles in dict.fromkeys((tuple(frozen), tuple(wide))):
        if roles:
            yield set_fields(*(f"models.{role}.dtype=bfloat16" for role in roles))


def _quantised(experiment: Experiment) -> Iterator[Change]:
    """Store the matrices of all roles that do not change as int8."""
    graph = build_graph(experiment)
    changing = {average.role for average in graph.averages}
    changing |= {role for role in graph.roles if graph.trained(role)}
    still = [role for role, of in models(experiment).items() if role not in changing and of.quantised is None]
    if still:
        yield set_fields(*(f"models.{role}.dtype=int8" for role in still))


def _more_nodes(spec: ClusterSpec) -> Attempts:
    """Find the fewest nodes of the same kind: doubled until a plan fits, then bisected."""
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
    """Replace devices by a larger built-in kind: least memory first, and of about equal ones the slowest."""
    group, *others = spec.groups
    if group.device.cpu or others:
        return
    for kind in sorted(DEVICES.values(), key=lambda kind: (kind.memory_bytes >> 33, kind.bf16_flops)):
        if not kind.cpu and kind.memory_bytes > 1.1 * group.device.memory_bytes:
            larger = replace(group, device=kind, node_bytes_per_s=kind.node_bytes_per_s)
            yield _on(str(larger), ClusterSpec(str(larger), (larger,)))


def _shorter_sequences(draft: Draft) -> Iterator[Change]:
    """Shorten prompts or answers, whichever are longer; sequences where nothing is generated."""
    experiment, workload = draft.experiment, draft.scenario().workload
    if not any(call.kind is Kind.GENERATE for call in build_graph(experiment).calls):
        for longest in _shorter(max(workload.prompts)):
            also = [f"data.max_prompt_tokens={longest}"] * (experiment.data.max_prompt_tokens > longest)
            yield _shorter_prompts(longest, f"data.max_tokens={longest}", *also)
    elif workload.max_new_tokens < max(workload.prompts):
        for longest in _shorter(max(workload.prompts)):
            yield _shorter_prompts(longest, f"data.max_prompt_tokens={longest}")
    else:
        generation = get_spec(experiment).generation
        fewest = 0 if generation is None else generation(experiment).min_new_tokens
        for longest in _shorter(workload.max_new_tokens):
            also = [f"generation.min_new_tokens={longest}"] * (fewest > longest)
            yield set_fields(f"generation.max_new_tokens={longest}", *also)


def _shorter(tokens: int) -> Sequence[int]:
    """Half of a length, a quarter, and so on; not all the way down."""
    return list_halves(tokens, _SHORTEST // 2 + 1)


def _shorter_prompts(longest: int, *overrides: str) -> Change:
    """Cut prompts, or whole sequences, in the recipe and in the measured lengths."""
    change = set_fields(*overrides)

    def apply(draft: Draft) -> Draft:
        prompts = draft.measured.prompts
        if prompts is not None:
            prompts = tuple(min(tokens, longest) for tokens in prompts)
        return replace(change.apply(draft), measured=replace(draft.measured, prompts=prompts))

    return replace(change, apply=apply)


def _on(text: str, spec: ClusterSpec) -> Change:
    """Use other devices."""
    return Change(text, lambda draft: replace(draft, spec=spec), preposition="on")
