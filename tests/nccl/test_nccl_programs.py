"""No program of any plan can deadlock on NCCL, whatever makes its hosts wait."""

from random import Random

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.layout.layout import build_layout
from realrl.layout.routing.chunks import RankScheduler, group_messages
from realrl.layout.routing.routes import reallocate
from realrl.plan.cluster import Cluster
from realrl.program.lower import home_placements, kept_copies, lower
from tests.conftest import thin
from tests.nccl.calls import SHAPE
from tests.nccl.programs import LIMITS, post_program, random_placement, random_plan
from tests.nccl.simulator import Launch, Messages, check

PPO = train_graph(minibatches=1)
CLUSTERS = [Cluster(1, 2), Cluster(1, 4), Cluster(2, 2), Cluster(1, 8), Cluster(2, 4)]


@pytest.mark.parametrize("seed", thin(range(9), 2))
def test_programs_of_random_plans_end_even_if_every_operation_makes_the_host_wait(seed: int) -> None:
    random = Random(seed)
    cluster = CLUSTERS[seed % len(CLUSTERS)]
    plan = random_plan(PPO, cluster, random)
    homes = home_placements(PPO, plan)
    programs = lower(PPO, plan, homes, kept_copies(PPO, plan, homes))
    # Two steps, in which ranks may overlap.
    check({program.rank: 2 * [*post_program(PPO, cluster, program)] for program in programs})


@pytest.mark.parametrize("seed", range(16))
def test_reallocations_between_random_layouts_end_however_groups_are_divided(seed: int) -> None:
    random = Random(seed)
    cluster = [Cluster(1, 8), Cluster(2, 8), Cluster(4, 4), Cluster(4, 8)][seed % 4]
    source, target = (build_layout(SHAPE, "lm", random_placement(cluster, random)) for _ in range(2))
    moved = reallocate(source, target, cluster)
    posted, world = {}, "-".join(map(str, range(cluster.size)))
    for rank in range(cluster.size):
        messages = RankScheduler(moved, rank, 4, limits=LIMITS).schedule().messages
        posted[rank] = [
            Launch(
                world,
                Messages(
                    world,
                    *(tuple((m.peer, m.numel) for m in group if m.sends == sent) for sent in (True, False)),
                ),
            )
            for group in group_messages(messages, LIMITS)
        ]
    check(posted)
