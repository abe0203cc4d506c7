"""Where no plan fits: what would have to be different, each change found by a search."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from realrl.algorithms.ppo.graph import train_graph as ppo_graph
from realrl.algorithms.ppo.spec import ALGORITHM as PPO_SPEC
from realrl.algorithms.sft.graph import train_graph
from realrl.config.errors import UserError
from realrl.families.published import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.cost.model import CostModel
from realrl.planner.evaluate.shortage import DoesNotFit
from realrl.planner.memory.model import MemoryModel
from realrl.planner.report.remedies import _fewer, _narrower, no_plan, remedies
from realrl.planner.search.plan_search import Wanted, find_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import Choices
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored
from tests.planner.problems import GRAPH

LEAN = Wanted(choices=Choices(offload=False))
"""Offloading would make most things fit."""
SPEC = ClusterSpec.parse("a100-80g:1x1")


def scenario(
    cluster: str, model: str = "llama-2-7b", *, element_bytes: int = 2, tokens: int = 128
) -> Scenario:
    """PPO with one model for all roles."""
    spec = ClusterSpec.parse(cluster)
    models = {
        role: Stored(SHAPES[model], PPO_SPEC.heads[role], element_bytes, GRAPH.trained(role))
        for role in GRAPH.roles
    }
    workload = Workload(64, (tokens,), (tokens,), tokens)
    return Scenario(GRAPH, models, spec, workload, CostModel(spec), MemoryModel(spec))


def refusal(of: Scenario, wanted: Wanted) -> str:
    """What the user is told."""
    with pytest.raises(DoesNotFit) as caught:
        find_plan(of, seconds=2.0, wanted=wanted)
    error = no_plan(of, caught.value.shortage, wanted)
    assert isinstance(error, UserError)
    return str(error)


def test_the_fewest_nodes_that_suffice_are_found() -> None:
    of = scenario("a100-40g:1x4")
    sentence = refusal(of, LEAN)
    assert sentence.startswith("no plan fits llama-2-7b (actor, reward, ref, critic) on a100-40g:1x4: ")
    found = re.search(r"on (\d+) nodes \(step [\d.]+ s\)", sentence)
    assert found is not None
    nodes = int(found[1])
    assert nodes > 1
    find_plan(_on(of, nodes), seconds=2.0, wanted=LEAN)
    with pytest.raises(DoesNotFit):
        find_plan(_on(of, nodes - 1), seconds=2.0, wanted=LEAN)


class Named:
    """Trials that only remember what would be tried."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def first(self, candidates: Iterator[tuple[str, Scenario]]) -> None:
        self.texts += [text for text, _ in candidates]


def test_a_smaller_batch_is_one_that_mini_batches_share_out() -> None:
    minibatches = max(call.minibatches for call in GRAPH.calls)
    for items, wanted in ((8 * minibatches, (4, 2, 1)), (6 * minibatches, (3,)), (5 * minibatches, ())):
        named, of = Named(), scenario("a100-80g:1x1")
        _fewer(replace(of, workload=replace(of.workload, items=items)), named)
        assert named.texts == [f"with data.batch={n * minibatches}" for n in wanted]


def test_a_moving_average_stays_in_float32() -> None:
    for rate, roles in ((None, {"reward", "ref"}), (0.01, {"reward"})):
        named, of = Named(), scenario("a100-80g:1x1", element_bytes=4)
        _narrower(replace(of, graph=ppo_graph(minibatches=4, ref_ema=rate)), named)
        frozen, everything = (set(re.findall(r"models\.(\w+)\.", text)) for text in named.texts)
        assert frozen == roles and everything == roles | {"actor", "critic"}


def test_a_search_that_ran_out_of_time_proves_nothing() -> None:
    of = scenario("a100-40g:1x1", "llama-2-70b")
    with pytest.raises(DoesNotFit) as caught:
        find_plan(of, seconds=2.0, wanted=LEAN)
    shortage = caught.value.shortage
    for proven, words in ((True, "no plan fits llama"), (False, "no plan was found that fits llama")):
        error = no_plan(of, replace(shortage, proven=proven), LEAN, seconds=0.0)
        assert str(error).startswith(words)


def _on(of: Scenario, nodes: int) -> Scenario:
    spec = of.spec.with_nodes(nodes)
    return replace(of, spec=spec, cost=CostModel(spec), memory=MemoryModel(spec))


def test_what_is_needed_is_said_with_figures() -> None:
    sentence = refusal(scenario("a100-40g:1x1", "llama-2-70b"), Wanted())
    assert "on a100-40g:1x1, even with recomputation and offloading: what comes nearest needs" in sentence
    assert re.search(
        r"needs \d+ GiB of 37\.\d GiB in actor\.\w+, most of it [\w ]+, 3\.\d+ times what", sentence
    )
    assert re.search(r"; it fits on \d+ nodes \(step \d", sentence)
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("of", "wanted", "change"),
    [
        (
            scenario("a100-40g:1x8", element_bytes=4),
            LEAN,
            "with models.reward.dtype=bfloat16 models.ref.dtype=bfloat16",
        ),
        (scenario("a100-40g:1x4"), LEAN, "on a100-80g:1x4"),
        (scenario("a100-40g:1x8", tokens=1 << 17), Wanted(), "with generation.max_new_tokens=65536"),
    ],
)
def test_changes_are_tried(of: Scenario, wanted: Wanted, change: str) -> None:
    assert change in [remedy.text for remedy in remedies(of, wanted)]


def test_small_micro_batches_are_tried_where_nothing_else_fits() -> None:
    graph = train_graph()
    call, model = graph.calls[0], Stored(SHAPES["llama-2-7b"], "lm", 2, True)
    workload = Workload(64, (128,))
    needs = {}
    for tokens in (128, 4096):
        strategy = Strategy(1, micro_batch_tokens=tokens, recompute=True)
        place = Placement(Mesh(0, 1), strategy)
        needs[tokens] = MemoryModel(SPEC).call(call, model, place, workload).bytes
    taken = SPEC.device(0).memory_bytes - MemoryModel(SPEC).capacity(0)
    (group,) = SPEC.groups
    device = replace(group.device, memory_bytes=taken + (needs[128] + needs[4096]) // 2)
    spec = replace(SPEC, groups=(replace(group, device=device),))
    of = Scenario(graph, {"actor": model}, spec, workload, CostModel(spec), MemoryModel(spec))
    found = find_plan(of, seconds=1.0, presets={}, wanted=LEAN)
    assert found.plan["actor.train"].strategy.micro_batch_tokens == 128
