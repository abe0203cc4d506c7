"""Plans count the experts that router replay records: in the cache, in messages, and where they are taken over."""

from dataclasses import replace

import pytest
import torch

from realrl.algorithms.policy import GENERATE, KEYS, infer_on_sequences
from realrl.dataflow.call import ROUTED_EXPERTS
from realrl.dataflow.graph import DataflowGraph
from realrl.dataflow.replay import add_router_replay
from realrl.families.shape import Mixture
from realrl.layout.kv_blocks import size_cache
from realrl.model.kv_cache import PagedCache
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.moves.exchange import count_exchanged_bytes
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.model.small_models import SHAPES

SHAPE = SHAPES["qwen3_moe"].model_copy(update={"layers": 5, "mixture": Mixture(experts=7, per_token=3)})
MODEL = StoredModel(SHAPE, "lm", "bfloat16", False)
WIDTH = 15
PROMPT, NEW, ITEMS = 40, 30, 6
WORKLOAD = Workload(ITEMS, (PROMPT,), (NEW,), NEW)
BASE = DataflowGraph.using([GENERATE, infer_on_sequences("actor.inference", "ref_logprobs")], KEYS)
GRAPH = add_router_replay(BASE, {"actor": WIDTH})


def place(pp: int) -> Placement:
    return Placement(Mesh(0, pp), Strategy(pp=pp, micro_batch_tokens=1 << 16))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cluster", ["cpu:1x2", "h100:1x2"])
def test_the_cache_of_a_plan_has_room_for_keys_values_and_experts(pp: int, cluster: str) -> None:
    memory, placement = MemoryModel(ClusterSpec.parse(cluster)), place(pp)
    size = size_cache(1 << 16, prompt_blocks=3 * ITEMS, longest_prompt=PROMPT, rows=ITEMS, new_tokens=NEW)
    recording, plain = (
        memory.stages(graph.call("actor.generate"), MODEL, placement, WORKLOAD) for graph in (GRAPH, BASE)
    )
    for stage, (layers, need, other) in enumerate(
        zip((3, 2) if pp == 2 else (5,), recording, plain, strict=True)
    ):
        held = PagedCache(
            size,
            layers=layers,
            kv_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            experts=3,
        )
        assert held.experts is not None
        assert need.dynamic["cache"] - other.dynamic["cache"] == held.experts.nbytes, stage


def test_messages_carry_the_experts_of_every_position() -> None:
    pair = ("actor.generate", "actor.inference")
    with_experts, without = (count_exchanged_bytes(graph, WORKLOAD)[pair] for graph in (GRAPH, BASE))
    assert with_experts - without == ITEMS * (PROMPT + NEW) * 2 * WIDTH
    assert GRAPH.keys[ROUTED_EXPERTS].dtype == "int16"


def test_a_call_that_replays_holds_the_experts_of_its_stage_for_a_micro_batch() -> None:
    placement = place(2)
    placement = replace(placement, strategy=replace(placement.strategy, micro_batch_tokens=70))
    memory = MemoryModel(ClusterSpec.parse("h100:1x2"))
    needs = [memory.stages(g.call("actor.inference"), MODEL, placement, WORKLOAD) for g in (GRAPH, BASE)]
    more = [a.dynamic["activations"] - b.dynamic["activations"] for a, b in zip(*needs, strict=True)]
    assert more == [70 * 2 * 3 * 3, 70 * 2 * 3 * 2]
