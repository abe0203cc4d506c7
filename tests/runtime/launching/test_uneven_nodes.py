"""Ranks that torchrun starts on nodes of different size, all of them on this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.runtime.processes.network import find_node_place
from tests.conftest import World, read_metrics
from tests.runtime.processes import PATIENCE


def train(recipe: Path, processes: list[int]) -> list[tuple[int, str]]:
    """Train on nodes with these numbers of processes; the exit status and output of torchrun on each."""
    from torch.distributed.elastic.utils.distributed import get_free_port

    where = f"--nnodes={len(processes)} --master-addr=127.0.0.1 --master-port={get_free_port()}".split()
    started = []
    for node, count in enumerate(processes):
        here = [f"--node-rank={node}", f"--nproc-per-node={count}"]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *where,
            *here,
            "-m",
            "realrl",
            "train",
            str(recipe),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_nodes_of_two_processes_and_one_learn_what_one_process_learns(world: World, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert run_app(["train", str(world.recipe("ppo", tmp_path / "one", cluster="1x1"))]) == 0
    recipe = world.recipe("ppo", tmp_path, cluster="1x2+1x1", plan="separate")
    ended = train(recipe, [2, 1])
    assert [status for status, _ in ended] == [0, 0], ended
    ours, alone = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "one" / "run")
    assert len(ours) == len(alone)
    learnt = [name for name in alone[0] if name.endswith(("score", "grad_norm", "value_loss"))]
    assert len(learnt) >= 4
    for line, expected in zip(ours, alone, strict=True):
        for name in learnt:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


@pytest.mark.exhaustive
def test_nodes_in_another_order_than_named_are_refused(world: World, tmp_path: Path) -> None:
    ended = train(world.recipe("sft", tmp_path, cluster="1x2+1x1"), [1, 2])
    assert all(status != 0 for status, _ in ended)
    assert any(
        "cluster=1x2+1x1, but node 0 of 2 has 1 of the 3 processes, from rank 0 on" in output
        for _, output in ended
    )


def torchrun_says(cluster: Cluster, rank: int) -> dict[str, str]:
    """The variables of a process under torchrun."""
    ranks = cluster.ranks(node := cluster.node(rank))
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": cluster.size,
        "LOCAL_RANK": rank - ranks.start,
        "LOCAL_WORLD_SIZE": len(ranks),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": cluster.nodes,
    }
    return {name: str(number) for name, number in numbers.items()}


@pytest.mark.parametrize("text", ["1x1", "1x3", "2x4", "2x2+1x1", "1x1+1x3+1x2", "1x3+1x1+1x2"])
def test_every_process_knows_the_ranks_of_its_node(text: str) -> None:
    cluster = Cluster.parse(text)
    for rank in range(cluster.size):
        place = find_node_place(torchrun_says(cluster, rank))
        assert (place.node, place.ranks, place.nodes) == (
            cluster.node(rank),
            cluster.ranks(cluster.node(rank)),
            cluster.nodes,
        )
        assert place.match(cluster) == cluster


@pytest.mark.parametrize("named", [None, "1x3+1x1+1x2", "2x3", "3x2", "1x6", "1x1+1x2+1x3"])
def test_some_process_refuses_nodes_that_were_not_named_so(named: str | None) -> None:
    started, refused = Cluster.parse("1x1+1x3+1x2"), 0
    for rank in range(started.size):
        try:
            find_node_place(torchrun_says(started, rank)).match(
                None if named is None else Cluster.parse(named)
            )
        except UserError as error:
            assert f"cluster={named or 'auto'}, but " in str(error)
            refused += 1
    assert refused
