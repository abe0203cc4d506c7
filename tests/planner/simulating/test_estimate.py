"""Estimates of plans: their parts add up and are those of the programs of workers."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from realrl.algorithms.policy import make_eval_graph
from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Kind, MovingAverage
from realrl.families.sizes import SHAPES, count_layer_weights
from realrl.layout.layout import build_layout
from realrl.layout.routing.routes import reallocate
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimate import Estimate, MemoryPart, PartKind
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.plan_memory import compute_footprints
from realrl.planner.simulate.predicted_trace import predict_trace
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.flops import count_flops
from realrl.planner.workload.workload import Workload
from realrl.program.instructions import Run
from realrl.program.lower import home_placements, lower, offloaded
from realrl.program.memory import Memory, StoredModel
from realrl.program.text import format_instruction
from tests.plan.meshes import list_tidy

SMALL, LARGE = SHAPES["llama-3.2-1b"], SHAPES["llama-2-7b"]


def scenario(cluster: str = "a100-80g:1x4", *, ref_ema: float | None = None, ref_every: int = 1) -> Scenario:
    """PPO with a critic that is smaller than the actor, and embeddings that are tied."""
    spec = ClusterSpec.parse(cluster)
    models = {
        "actor": StoredModel(LARGE, "lm", "bfloat16", True),
        "ref": StoredModel(LARGE, "lm", "float32" if ref_ema else "bfloat16", False),
        "critic": StoredModel(SMALL, "scalar", "bfloat16", True),
        "reward": StoredModel(SMALL, "scalar", "bfloat16", False),
    }
    averages = [] if ref_ema is None else [MovingAverage("ref", "actor", ref_ema, period=ref_every)]
    graph = train_graph(minibatches=2, averages=averages)
    workload = Workload(32, (100, 200), (50, 100, 300), 400)
    return Scenario(
        graph=graph,
        models=models,
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def preset(name: str, of: Scenario) -> Plan:
    shapes = {role: model.shape for role, model in of.models.items()}
    return make_plan(name, of.graph, of.spec.cluster, 4096, shapes)


def sampled_plan(rng: random.Random, of: Scenario) -> Plan:
    """Sample meshes and strategies, offloading and persistent replicas."""
    places = {}
    for call in of.graph.calls:
        mesh = rng.choice(list_tidy(of.spec.cluster))
        tp = rng.choice([t for t in (1, 2, 4, 8) if mesh.size % t == 0 and t <= of.spec.cluster.largest_node])
        pp = rng.choice([p for p in (1, 2, 4) if mesh.size // tp % p == 0])
        again = call.kind is Kind.TRAIN and rng.random() < 0.5
        tokens = rng.choice([2048, 8192])
        places[call.name] = Placement(
            mesh, Strategy(dp=mesh.size // tp // pp, tp=tp, pp=pp, micro_batch_tokens=tokens, recompute=again)
        )
    roles = of.graph.roles
    chosen = [tuple(r for r in roles if rng.random() < 0.4) for _ in range(3)]
    trained = tuple(role for role in chosen[1] if of.graph.trained(role))
    return Plan(of.spec.cluster, places, chosen[0], trained, chosen[2])


@pytest.fixture(scope="module", params=["interleave", "separate", "heuristic"])
def found(request: pytest.FixtureRequest) -> Estimate:
    of = scenario(ref_ema=0.1)
    return estimate_plan(of, preset(request.param, of))


def test_a_call_takes_the_sum_of_its_terms(found: Estimate) -> None:
    for call in found.calls.values():
        assert call.end - call.start == pytest.approx(sum(call.terms.values()))
    assert list(found.calls) == sorted(found.calls, key=lambda name: found.calls[name].start)


def test_device_time_is_accounted_for(found: Estimate) -> None:
    whole = found.step_seconds * len(found.slices)
    assert sum(found.terms.values()) == pytest.approx(whole)
    assert all(seconds >= -1e-9 * whole for seconds in found.terms.values())
    assert 0 < found.mfu < found.utilisation <= 1 + 1e-9


@pytest.mark.parametrize(("slow", "factor"), [("actor", 16), ("ref", 1)])
def test_mfu_relates_each_call_to_the_peak_of_its_own_type(slow: str, factor: float) -> None:
    of = scenario()
    wide = {
        role: replace(model, dtype="float32" if role == slow else "bfloat16")
        for role, model in of.models.items()
    }
    of = replace(of, models=wide)
    calls = estimate_plan(of, preset("symmetric", of)).calls
    ratio = calls["critic.train"].peak_flops / calls["actor.train"].peak_flops
    assert ratio == pytest.approx(factor)


def test_a_step_ends_with_the_last_slice(found: Estimate) -> None:
    assert max(row[-1].start + row[-1].seconds for row in found.slices) == pytest.approx(found.step_seconds)
    # Between steps the writer takes the times of the other ranks.
    reports = Durations(scenario(ref_ema=0.1), found.plan).reporting
    assert found.repeated_seconds <= (found.step_seconds + reports) * (1 + 1e-9)


def test_steps_in_a_row_take_the_mean_over_steps_with_and_without_the_average() -> None:
    always, seldom, never = (scenario(ref_ema=0.1, ref_every=n) for n in (1, 4, 10**9))
    plan = preset("disjoint", always)
    with_it, mean, without = (estimate_plan(of, plan) for of in (always, seldom, never))
    assert mean.step_seconds == with_it.step_seconds
    assert with_it.repeated_seconds > without.repeated_seconds
    expected = 0.25 * with_it.repeated_seconds + 0.75 * without.repeated_seconds
    assert mean.repeated_seconds == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(6))
def test_reallocations_send_the_bytes_of_their_routes(seed: int) -> None:
    of = scenario("a100-80g:2x4", ref_ema=0.1)
    for move in estimate_plan(of, sampled_plan(random.Random(seed), of)).moves:
        model, instruction = of.models[move.instruction.role], move.instruction
        before, after = (
            build_layout(model.shape, model.head, p) for p in (instruction.source, instruction.target)
        )
        exact = reallocate(before, after, of.spec.cluster).bytes_by_link(2)
        assert move.sent_bytes == pytest.approx(exact.node + exact.network, rel=0.02, abs=2**20)
        assert move.network_bytes == pytest.approx(exact.network, rel=0.02, abs=2**20)


def test_reallocations_name_the_call_they_are_for() -> None:
    of = scenario(ref_ema=0.1)
    plan = preset("separate", of)
    unkept = {(m.instruction.role, m.before) for m in estimate_plan(of, replace(plan, keep=())).moves}
    assert unkept == {("actor", "actor.generate"), ("critic", "critic.inference"), ("actor", None)}
    assert {m.before for m in estimate_plan(of, plan).moves} == {None}


@pytest.mark.parametrize("call", ["actor.train", "ref.inference", "critic.train"])
def test_flops_are_twice_the_parameters_per_token_and_direction(call: str) -> None:
    of = scenario()
    role = of.graph.call(call).role
    shape = of.models[role].shape
    short = replace(of.workload, prompts=(2,), answers=(1,))
    matrices = shape.layers * count_layer_weights(shape)
    matrices += shape.hidden_size * (shape.vocab_size if of.models[role].head == "lm" else 1)
    rounds = 3 if call.endswith("train") else 1
    due = rounds * 2 * matrices * 3 * 32
    assert count_flops(of.graph.call(call), of.models[role], short, Strategy()) == pytest.approx(
        due, rel=1e-3
    )


def test_generation_flops_count_each_token_once() -> None:
    of = scenario()
    model, generate = of.models["actor"], of.graph.call("actor.generate")
    scored = count_flops(of.graph.call("ref.inference"), model, of.workload, Strategy())
    assert 0.9 * scored < count_flops(generate, model, of.workload, Strategy()) < scored


def test_generation_flops_count_a_prompt_once_for_all_its_samples() -> None:
    of = scenario()
    model, generate = of.models["actor"], of.graph.call("actor.generate")

    def count(prompt: int, samples: int) -> float:
        work = replace(of.workload, prompts=(prompt,), samples=samples)
        return count_flops(generate, model, work, Strategy())

    shared, apart, short = count(400, 8), count(400, 1), count(50, 1)
    # Attention to the prompt remains, for each of the samples.
    assert short < shared < 1.2 * short < apart


@pytest.mark.parametrize("seed", range(4))
def test_footprints_hold_replicas_of_programs_and_memory_of_calls(seed: int) -> None:
    of = scenario("a100-80g:2x4")
    plan = sampled_plan(random.Random(seed), of)
    for device in estimate_plan(of, plan).memory:
        calls = [call.name for call in of.graph.calls if device.rank in plan[call.name].ranks]
        assert sorted(footprint.during for footprint in device.footprints) == sorted(calls)
        for footprint in device.footprints:
            role = of.graph.call(footprint.during).role
            assert any(part.role == role and part.kind is PartKind.PARAMETERS for part in footprint.parts)
            assert all(size > 0 for size in footprint.parts.values())
            assert footprint.bytes <= device.peak.bytes
        for role in plan.offload:
            assert MemoryPart(PartKind.PARAMETERS, role) not in device.resident


def names(parts: Iterable[MemoryPart]) -> set[str]:
    """The texts of memory parts."""
    return {str(part) for part in parts}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (MemoryPart(PartKind.PARAMETERS, "actor"), "actor parameters"),
        (
            MemoryPart(PartKind.PARAMETERS, "actor", copy="d2 t1 p1 @2-3"),
            "actor parameters (copy d2 t1 p1 @2-3)",
        ),
        (MemoryPart(PartKind.PARAMETERS, "actor", host=True), "actor parameters (host copy)"),
        (MemoryPart(PartKind.OPTIMIZER, "actor"), "actor gradients and optimizer"),
        (MemoryPart(PartKind.OPTIMIZER, "actor", host=True), "actor optimizer (host copy)"),
        (MemoryPart(PartKind.CACHE), "cache"),
    ],
)
def test_a_memory_part_has_a_text(part: MemoryPart, text: str) -> None:
    assert str(part) == text


def test_memory_parts_are_named_by_role_and_content() -> None:
    of = scenario()
    found = estimate_plan(of, replace(preset("separate", of), keep=()))
    generating = next(f for f in found.memory[-1].footprints if f.during == "actor.generate")
    assert names(generating.parts) - {"logits"} == {
        "actor parameters (copy d2 t1 p1 @2-3)",
        "reward parameters",
        "ref parameters",
        "activations",
        "cache",
        "graphs",
        "fragmentation",
        "NCCL communicators",
    }
    training = next(f for f in found.memory[0].footprints if f.during == "actor.train")
    assert {"actor parameters", "actor gradients and optimizer"} < names(training.parts)


def test_offloaded_state_is_on_devices_only_while_it_is_used() -> None:
    of = scenario()
    plan = preset("symmetric", of)
    offloading = replace(plan, offload=("ref",), offload_optimizer=("actor",))
    plain, lean = (estimate_plan(of, p) for p in (plan, offloading))
    moved = {"ref parameters", "actor gradients and optimizer"}
    for during, used in (
        ("critic.train", set()),
        ("ref.inference", {"ref parameters"}),
        ("actor.train", {"actor gradients and optimizer"}),
    ):
        before, after = (
            next(f.parts for f in e.memory[0].footprints if f.during == during) for e in (plain, lean)
        )
        assert moved <= names(before)
        assert moved & names(after) == used
    assert lean.step_seconds > plain.step_seconds


def test_footprints_of_evaluation_include_idle_roles() -> None:
    of = scenario()
    plan, graph = preset("symmetric", of), make_eval_graph()
    homes = home_placements(of.graph, plan)
    programs = lower(graph, plan.evaluation(graph, of.graph), {role: homes[role] for role in graph.roles})
    held = Memory(of.models, homes, offloaded(plan), {})
    for device in compute_footprints(replace(of, graph=graph), held, programs):
        assert [f.during for f in device.footprints] == [call.name for call in graph.order]
        assert all("critic gradients and optimizer" in names(f.parts) for f in device.footprints)


def test_models_of_unknown_size_count_no_memory() -> None:
    of = scenario()
    plan = preset("symmetric", of)
    known = {role: model for role, model in of.models.items() if role != "ref"}
    held = Memory(known, home_placements(of.graph, plan), offloaded(plan), {})
    programs = lower(of.graph, plan, home_placements(of.graph, plan))
    for device in compute_footprints(replace(of, models=known), held, programs):
        assert not any(part.role == "ref" for part in device.resident)
        scoring = next(f for f in device.footprints if f.during == "ref.inference")
        assert scoring.parts == device.resident


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_predicted_trace_has_the_instructions_of_each_rank_and_the_terms_of_calls(name: str) -> None:
    of = scenario()
    plan = preset(name, of)
    slices = estimate_plan(of, plan).slices
    for rank, events in enumerate(predict_trace(of, plan, steps=2)):
        later = [event for event in events if event["args"]["step"] == 1]
        assert [event["name"] for event in later] == [format_instruction(s.instruction) for s in slices[rank]]
        for event, slice_ in zip(later, slices[rank], strict=True):
            assert ("compute" in event["args"]) == isinstance(slice_.instruction, Run)


def test_a_plan_that_runs_calls_side_by_side_is_faster_than_the_sum_of_its_calls() -> None:
    of = scenario("a100-80g:2x4")
    found = estimate_plan(of, preset("disjoint", of))
    assert found.step_seconds < sum(call.seconds for call in found.calls.values())
    assert Mesh(0, 2) == found.plan["actor.train"].mesh
