"""Roles with quantised matrices in runs: their memory, the same scores under every plan, and what is refused."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.engine.buffers import LocalSet
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.families.tensors import Quantisation
from realrl.layout.layout import build_layout
from realrl.layout.sets import BASE, QUANTISED, TUNED, TrainablePart
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Workload
from realrl.program.memory import HeldState, Memory, StoredModel
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.shrink import SHAPE
from tests.conftest import PPO_CALLS, World, read_metrics, thin
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.models.test_offload import home, prepared

INT8 = {"models__ref": {"dtype": "int8"}, "models__reward__dtype": "fp8"}
PLAN = {
    "actor.train": {"mesh": "0-1", "dp": 1, "tp": 2},
    "ref.inference": {"mesh": "0-1", "dp": 1, "tp": 2},
    "reward.inference": {"mesh": "0-1", "dp": 1, "pp": 2},
}
SHARDED = {name: {"mesh": "0-1", "dp": 2, "zero": 3} for name in PPO_CALLS if name != "actor.generate"}
OFFLOADED = ["ref", "reward"]
COMPARED = ("loss", "score", "kl", "response_tokens", "grad_norm")
MATRICES = ("qkv", "out", "gate_up", "down")


def run(file: Path) -> list[dict[str, float]]:
    assert run_app(["train", str(file)]) == 0
    return read_metrics(file.parent / "run")


def recipe(world: World, directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    given = {"training__steps": 2, "debug__verify_reallocation": True, **INT8}
    return world.recipe("ppo", directory, **deepcopy({**given, **changes}))


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of a run in one process."""
    return run(recipe(world, tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(("plan", "offload"), thin([(PLAN, OFFLOADED), (PLAN, []), (SHARDED, OFFLOADED)], 2))
def test_quantised_roles_score_the_same_in_two_processes(
    world: World, tmp_path: Path, alone: list[dict[str, float]], plan: dict[str, object], offload: list[str]
) -> None:
    calls = {name: {"mesh": "0-1", "dp": 2} for name in PPO_CALLS} | plan
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump({"cluster": "1x2", "calls": calls, "offload": offload})
    )
    found = run(recipe(world, tmp_path, cluster="1x2", plan=str(tmp_path / "plan.yaml")))
    for one, other in zip(found, alone, strict=True):
        for name in other:
            if name.endswith(COMPARED):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def test_quantised_roles_score_nearly_what_they_were_saved_as(
    world: World, tmp_path: Path, alone: list[dict[str, float]]
) -> None:
    plain = run(recipe(world, tmp_path, models__ref={}, models__reward__dtype="auto"))
    name = next(name for name in plain[0] if name.endswith("/score"))
    assert alone[0][name] != plain[0][name]
    assert alone[0][name] == pytest.approx(plain[0][name], abs=0.05)


def test_the_memory_of_quantised_roles_is_counted_and_held(world: World, tmp_path: Path) -> None:
    ready = prepared(recipe(world, tmp_path))
    assert ready.roles.held() == sum(ready.job.memory.at_rest(0).values())
    for role, head in (("ref", "lm"), ("reward", "scalar")):
        sets = home(ready, role).sets
        tensors = model_tensors(home(ready, role).shape.model_copy(update={"quantised": None}), head)
        matrices = [spec.shape for spec in tensors if spec.parameter in MATRICES]
        rest = sum(spec.numel for spec in tensors if spec.parameter not in MATRICES)
        assert sets[QUANTISED].memory.nbytes == sum(rows * columns + 4 * rows for rows, columns in matrices)
        assert sets[BASE].memory.nbytes == 4 * rest
    bases = {home(ready, role).sets[BASE].buffer.data.data_ptr() for role in ("actor", "ref")}
    assert len(bases) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "strategy",
    [*((1, 1, 1, 1), (5, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (2, 3, 2, 1)), (5, 1, 1, 3), (2, 3, 2, 3)],
)
def test_every_rank_allocates_the_predicted_bytes(dtype: Dtype, strategy: tuple[int, int, int, int]) -> None:
    dp, tp, pp, zero = strategy
    shape = load_shape("int8")
    placement = Placement(Mesh(0, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp, zero=zero))
    stored = StoredModel(shape, "lm", dtype, False, TrainablePart(quantised=True))
    memory = Memory({"ref": stored}, {"ref": placement}, (), {})
    widths = {BASE: getattr(torch, dtype), QUANTISED: torch.uint8}
    most = 0
    for rank in placement.ranks:
        held = memory.at_rest(rank)
        for name, of in stored.sets.items():
            local = LocalSet(
                build_layout(shape, "lm", placement, of.tensors), rank, widths[name], torch.device("cpu")
            )
            assert held[HeldState("ref", placement.layout, "parameters", False, name)] == local.memory.nbytes
        most = max(most, sum(held.values()))
    model = MemoryModel(ClusterSpec.parse(f"h100:1x{dp * tp * pp}"))
    # The search takes the largest shard of each set.
    assert model.parameters(stored, placement) == pytest.approx(most, rel=0.02)
    largest = model.largest_sets(stored, Strategies.of([placement.strategy]))
    assert sum(int(size[0]) for size in largest.values()) >= most


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_planner_counts_less_memory_and_more_time(kind: Quantisation) -> None:
    spec = ClusterSpec.parse("h100:1x8")
    graph = build_graph(load_experiment("recipes/reference/ppo-70b.yaml"))
    call = next(call for call in graph.calls if call.name == "ref.inference")
    workload = Workload(64, (512,), (256,), 512)
    place = Placement(Mesh(0, 8), Strategy(tp=8))
    plain = StoredModel(SHAPES["llama-2-70b"], "lm", "bfloat16", False)
    shape = plain.shape.model_copy(update={"quantised": kind})
    stored = replace(plain, shape=shape, part=TrainablePart(quantised=True))
    need, wide = (MemoryModel(spec).call(call, model, place, workload) for model in (stored, plain))
    matrices = 80 * (8192 * (8192 * 2 + 2 * 1024) + 3 * 8192 * 28672) / 8
    rows = 80 * ((8192 + 2 * 1024 + 2 * 28672) / 8 + 2 * 8192)
    assert wide.static_bytes - need.static_bytes == pytest.approx(matrices - 4 * rows, rel=1e-4)
    widened = 2 * 8192 * 2 * 28672 / 8
    assert need.dynamic["activations"] - wide.dynamic["activations"] == pytest.approx(widened, rel=1e-6)
    cost = CostModel(spec)
    seconds = [cost.call(call, model, place, workload).terms["compute"] for model in (stored, plain)]
    # A byte is read, and three times two bytes are written or read, of each number and pass.
    device = spec.groups[0].device
    traffic = 7 * matrices / (device.memory_bytes_per_s * cost.efficiency.memory)
    assert seconds[0] - seconds[1] == pytest.approx(
        traffic * round((seconds[0] - seconds[1]) / traffic), rel=1e-3
    )
    assert seconds[0] > seconds[1]


def load_shape(kind: Quantisation) -> ModelShape:
    return ModelShape.model_validate({**SHAPE, "heads": 6, "kv_heads": 2}).model_copy(
        update={"quantised": kind}
    )


def test_a_fresh_teacher_is_quantised_alike_under_every_plan(world: World, tmp_path: Path) -> None:
    found = []
    for name, changes in (("one", {}), ("two", {"cluster": "1x2", "plan": "heuristic"})):
        (tmp_path / name).mkdir()
        file = world.recipe("distillation", tmp_path / name, **{"models__teacher__dtype": "int8", **changes})
        found.append(run(file))
    for one, other in zip(*found, strict=True):
        for key in one:
            if key.endswith(COMPARED):
                assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


def test_evaluation_alone_and_a_resumed_run_have_quantised_roles(world: World, tmp_path: Path) -> None:
    records = str(world.root / "ppo.jsonl")
    file = recipe(
        world, tmp_path, data__eval=records, evaluation__every=2, checkpoint__every=1, checkpoint__keep=9
    )
    whole = run(file)
    resumed = interrupt(tmp_path / "run", 1, tmp_path / "killed")
    assert run_app(["train", str(file), f"run_dir={resumed}"]) == 0
    for one, other in zip(read_metrics(resumed), whole, strict=True):
        for key in other:
            if key.endswith(COMPARED):
                assert one[key] == pytest.approx(other[key], rel=1e-6, abs=1e-9), key
    assert run_app(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    scores = []
    for number, changes in enumerate(([], ["cluster=1x2"], ["models.reward.dtype=float32"])):
        out = tmp_path / str(number)
        assert run_app(["eval", str(file), "models.ref.dtype=int8", *changes, "--out", str(out)]) == 0
        report = json.loads((out / "metrics.json").read_text())
        scores.append(next(value for key, value in report["metrics"].items() if key.endswith("score")))
    assert scores[1] == pytest.approx(scores[0], rel=1e-5) and scores[2] != scores[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"models__actor__dtype": "int8"},
            r"models.actor.dtype=int8: actor is trained, and quantised weights",
        ),
        ({"models__critic": {"dtype": "fp8"}}, r"models.critic.dtype=fp8: critic is trained"),
        (
            {"models__actor__dtype": "int8", "models__actor__lora": {}},
            r"models.actor.dtype=int8: actor is trained, .* choose auto, float32, mixed or bfloat16",
        ),
        (
            {"ppo__ref_ema": 0.5},
            r"models.ref.dtype=int8: ref follows actor, and quantised weights cannot change",
        ),
        (
            {"models__ref": {"computes_in": "float32"}},
            r"models.ref.computes_in: follows from dtype and the device",
        ),
        ({"models__ref__dtype": "int4"}, r"models.ref.dtype"),
        (
            {"models__reward": {"shape": {**SHAPE, "quantised": "int8"}}},
            r"models.reward.shape: how a role stores its matrices is its own setting: write models.ROLE.dtype",
        ),
    ],
)
def test_weights_that_change_are_not_quantised(
    world: World, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(str(recipe(world, tmp_path, **changes)))


def test_roles_take_over_no_quantisation(world: World, tmp_path: Path) -> None:
    """The critic starts from the reward model, and takes its type over unless that is how it is stored."""
    models = load_experiment(str(recipe(world, tmp_path))).models
    critic, reward = getattr(models, "critic"), getattr(models, "reward")  # noqa: B009
    assert (critic.dtype, reward.dtype, reward.compute_dtype) == ("float32", "fp8", "float32")


def test_a_quantised_reference_has_no_part_in_a_base_of_others(world: World, tmp_path: Path) -> None:
    ready = prepared(
        recipe(
            world,
            tmp_path,
            models__actor__lora={"rank": 4},
            models__ref={"path": world.actor, "dtype": "int8"},
        )
    )
    assert not ready.job.memory.holders
    assert [*home(ready, "ref").sets] == [BASE, QUANTISED] and [*home(ready, "actor").sets] == [BASE, TUNED]
    assert ready.roles.held() == sum(ready.job.memory.at_rest(0).values())


def test_plans_say_what_is_quantised(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe(world, tmp_path)
    assert run_app(["plan", str(file), "--cluster", "h100:1x2", "--html", str(tmp_path / "plan.html")]) == 0
    page = (tmp_path / "plan.html").read_text()
    assert "28.8 k parameters in int8 (ref)" in capsys.readouterr().out
    assert "int8 and bfloat16" in page and "fp8 and bfloat16" in page
    assert run_app(["show", str(file), "cluster=1x2"]) == 0
