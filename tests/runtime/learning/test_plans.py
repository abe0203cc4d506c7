"""PPO samples the same tokens and learns the same under every plan, on 1 to 8 processes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.testing.ranks import Tokens, run_on_ranks, sampled
from realrl.testing.records import NOUNS
from tests.conftest import PPO_CALLS, World, build_world, read_metrics, write_jsonl

STEPS = 2
TOLERANCE = 1e-4
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5}
"""With the usual `eps`, Adam makes full steps of what is only rounding error in elements without gradient."""
SHAPE = {
    "vocab_size": 320,  # neither 3 nor 6 divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "layers": 4,
    "heads": 12,
    "kv_heads": 4,
    "head_dim": 8,
    "tied_embeddings": True,
}
NEAR_ZERO = {"kl": 1e-5, "policy_loss_per_token": 1e-6, "loss": 1e-6}
"""Figures that are sums of terms around 1 which cancel, with what rounding may make of that."""


@dataclass(frozen=True)
class Case:
    """A cluster, and either a preset or the text of each call's placement without a micro-batch, in the order of
    PPO_CALLS."""

    cluster: str
    plan: str | tuple[str, ...]
    extras: Mapping[str, list[str]] | None = None

    @property
    def size(self) -> int:
        return Cluster.parse(self.cluster).size


def everywhere(placement: str) -> tuple[str, ...]:
    return (placement,) * 6


ALL_OFFLOADED = {
    "offload": ["actor", "reward", "ref", "critic"],
    "offload_optimizer": ["actor", "critic"],
}
CASES = {
    "2 symmetric": Case("1x2", "symmetric"),
    "2 interleave": Case("1x2", "interleave"),
    "2 separate": Case("1x2", "separate"),
    "2 heuristic": Case("1x2", "heuristic"),
    "2 two stages, everything offloaded": Case("1x2", everywhere("d1 t1 p2 @0-1"), ALL_OFFLOADED),
    "2 training recomputed": Case("1x2", (*["d1 t2 p1 @0-1"] * 4, "d1 t2 p1 @0-1 rc", "d1 t1 p2 @0-1 rc")),
    "2 contexts": Case(
        "1x2",
        (
            "d2 t1 p1 @0-1",
            "d1 c2 t1 p1 @0-1",
            "d1 c2 t1 p1 z3 @0-1",
            "d1 t1 p2 @0-1",
            "d1 c2 t1 p1 @0-1",
            "d1 c2 t1 p1 @0-1",
        ),
        {"keep": ["actor"], "offload_optimizer": ["actor"]},
    ),
    "4 divided caches": Case(
        "1x4",
        (
            "d1 c2 t2 p1 @0-3",
            "d4 t1 p1 @0-3",
            "d1 c4 t1 p1 @0-3",
            "d2 t2 p1 @0-3",
            "d2 c2 t1 p1 @0-3",
            "d4 t1 p1 @0-3",
        ),
        {"keep": ["actor"]},
    ),
    "2 virtual stages and zero bubbles": Case(
        "1x2",
        (
            "d2 t1 p1 @0-1",
            "d1 t1 p2 v2 @0-1",
            "d1 t1 p2 @0-1",
            "d1 t1 p2 v2 @0-1",
            "d1 t1 p2 v2 @0-1 zb",
            "d1 t1 p2 @0-1 rc zb",
        ),
        {"keep": ["actor"], "offload": ["ref"], "offload_optimizer": ["critic"]},
    ),
    "2 deepspeed-chat": Case("1x2", "deepspeed-chat"),
    "4 openrlhf": Case("2x2", "openrlhf"),
    "4 stages of ZeRO, everything offloaded": Case(
        "1x4",
        (
            "d1 t4 p1 @0-3",
            "d4 t1 p1 z3 @0-3",
            "d2 t1 p1 z3 @2-3",
            "d2 t1 p2 z3 @0-3",
            "d2 t2 p1 z3 @0-3 rc",
            "d2 t1 p2 @0-3 z2",
        ),
        ALL_OFFLOADED,
    ),
    "3 symmetric, on nodes of two and one": Case("1x2+1x1", "symmetric"),
    "3 heuristic, on nodes of two and one": Case("1x2+1x1", "heuristic"),
    "3 six strategies on nodes of two and one": Case(
        "1x2+1x1",
        (
            "d1 t3 p1 @0-2",
            "d2 t1 p1 @1-2",
            "d1 t1 p1 @2",
            "d1 t1 p3 @0-2",
            "d1 t2 p1 @1-2",
            "d3 t1 p1 @0-2",
        ),
        {"keep": ["critic"], "offload": ["ref"], "offload_optimizer": ["actor"]},
    ),
    "4 disjoint": Case("1x4", "disjoint"),
    "4 heuristic": Case("1x4", "heuristic"),
    "4 four stages": Case("1x4", everywhere("d1 t1 p4 @0-3")),
    "4 separate, sides of different strategies": Case(
        "1x4",
        ("d1 t2 p1 @2-3", *["d2 t1 p1 @2-3"] * 3, "d1 t1 p2 @0-1", "d1 t2 p1 @0-1"),
        {"keep": ["actor", "critic"], "offload": ["actor"], "offload_optimizer": ["critic"]},
    ),
    "4 six strategies on overlapping meshes, everything offloaded": Case(
        "1x4",
        (
            "d1 t4 p1 @0-3",
            "d1 t1 p2 @0-1",
            "d2 t1 p1 @2-3",
            "d1 t2 p1 @0-1",
            "d2 t1 p2 @0-3",
            "d2 t2 p1 @0-3",
        ),
        ALL_OFFLOADED,
    ),
    "6 interleave": Case("1x6", "interleave"),
    "6 separate": Case("1x6", "separate"),
    "6 three and three": Case(
        "1x6",
        (
            "d1 t3 p1 @3-5",
            "d3 t1 p1 @0-2",
            "d1 t1 p3 @3-5",
            "d1 t3 p1 @0-2",
            "d1 t1 p3 @0-2",
            "d3 t1 p1 @3-5",
        ),
    ),
    "6 meshes that begin anywhere, from one node into another": Case(
        "1x4+1x2",
        (
            "d1 t4 p1 @1-4",
            "d1 t3 p1 @1-3",
            "d2 t1 p1 @4-5",
            "d1 t1 p2 @2-3",
            "d1 t5 p1 @1-5",
            "d5 t1 p1 @0-4",
        ),
        {"offload": ["actor"]},
    ),
    "6 six strategies": Case(
        "3x2",
        (
            "d3 t2 p1 @0-5",
            "d1 t2 p2 @2-5",
            "d2 t1 p1 @0-1",
            "d1 t1 p4 @2-5",
            "d2 t3 p1 @0-5",
            "d1 t2 p3 @0-5",
        ),
        {"keep": ["critic"], "offload_optimizer": ["actor"]},
    ),
    "8 symmetric": Case("2x4", "symmetric"),
    "8 disjoint": Case("1x8", "disjoint"),
    "8 interleave": Case("2x4", "interleave"),
    "8 separate": Case("2x4", "separate"),
    "8 heuristic": Case("2x4", "heuristic"),
    "8 six strategies on overlapping meshes": Case(
        "2x4",
        (
            "d2 t4 p1 @0-7",
            "d1 t1 p4 @0-3",
            "d1 t2 p2 @4-7",
            "d2 t1 p2 @4-7",
            "d2 t2 p2 @0-7",
            "d4 t1 p2 @0-7",
        ),
        {"offload": ["ref", "reward"], "offload_optimizer": ["actor", "critic"]},
    ),
}


def recipe(world: World, directory: Path, name: str, case: Case) -> Path:
    """The recipe of a case, which runs into a directory of its own."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in name)
    plan = case.plan
    if not isinstance(plan, str):
        document: dict[str, object] = {"cluster": case.cluster, "calls": {}, **(case.extras or {})}
        calls = {}
        for call, text in zip(PPO_CALLS, case.plan, strict=True):
            place = Placement.parse(re.sub(r"@\S+", r"\g<0> mb=256", text))
            strategy = place.strategy
            calls[call] = {
                "mesh": str(place.mesh),
                **strategy.all_degrees.named(),
                "recompute": strategy.recompute,
                "zero_bubble": strategy.zero_bubble,
                "zero": strategy.zero,
            }
        document["calls"] = calls
        plan = str(directory / f"{stem}.plan.yaml")
        Path(plan).write_text(yaml.safe_dump(document))
    file = world.recipe(
        "ppo",
        directory,
        run_dir=str(directory / stem),
        cluster=case.cluster,
        plan=plan,
        data__eval=str(directory / "eval.jsonl"),
        data__eval_batch=12,
        training__steps=STEPS,
        models__actor__optimizer=OPTIMIZER,
        models__critic__optimizer=OPTIMIZER,
        debug__verify_reallocation=True,
    )
    return file.rename(directory / f"{stem}.yaml")


@dataclass(frozen=True)
class Outcome:
    """What a run sampled, and its metrics at every step."""

    tokens: Tokens
    steps: list[dict[str, float]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose models can be cut in three and in four, both ways."""
    return build_world(tmp_path_factory.mktemp("wide"), SHAPE)


def outcomes(
    world: World, tmp_path_factory: pytest.TempPathFactory, cases: Mapping[str, Case]
) -> dict[str, Outcome]:
    """Run cases of one size, all in the same processes."""
    directory = tmp_path_factory.mktemp("plans")
    write_jsonl(directory / "eval.jsonl", [{"prompt": f"the {noun}"} for noun in (*NOUNS, "end", "start")])
    files = {name: recipe(world, directory, name, case) for name, case in cases.items()}
    (size,) = {case.size for case in cases.values()}
    run_on_ranks(size, list(files.values()))
    return {
        name: Outcome(
            sampled(file), read_metrics(file.with_suffix("")) + read_metrics(file.with_suffix(""), "eval")
        )
        for name, file in files.items()
    }


@pytest.fixture(scope="module")
def alone(wide: World, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcomes(wide, tmp_path_factory, {"alone": Case("1x1", "symmetric")})["alone"]


def test_one_process_changes_samples_and_weights(alone: Outcome) -> None:
    found = [tokens for name, tokens in alone.tokens.items() if not name.endswith(" prompt")]
    sequences = [tuple(tokens) for of_item in found for tokens in of_item]
    assert len(sequences) == STEPS * 16 + 2 * 12
    assert len(set(sequences)) > len(sequences) / 2
    assert all(step["actor.train/grad_norm"] > 0 for step in alone.steps[:STEPS])


@pytest.mark.parametrize("size", [2, 8, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4, 6))])
def test_every_plan_samples_and_learns_as_one_process_does(
    wide: World, alone: Outcome, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    cases = {name: case for name, case in CASES.items() if case.size == size}
    for name, outcome in outcomes(wide, tmp_path_factory, cases).items():
        assert outcome.tokens == alone.tokens, name
        for step, (ours, reference) in enumerate(zip(outcome.steps, alone.steps, strict=True)):
            assert ours.keys() == reference.keys(), name
            for figure, value in reference.items():
                kind = figure.rpartition("/")[2]
                if kind in NEAR_ZERO or kind.endswith(("loss", "score", "tokens", "grad_norm")):
                    expected = pytest.approx(value, rel=TOLERANCE, abs=NEAR_ZERO.get(kind))
                    assert ours[figure] == expected, (name, step, figure)
