"""`realrl profile` on a tiny model. No test looks at how long anything takes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import train_graph
from realrl.cli.app import run_app
from realrl.families.shape import ModelShape
from realrl.model.arithmetic.ops import PLAIN
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import CollectiveTime, Profile
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.load import load_experiment
from realrl.runtime.processes.process import Process
from realrl.runtime.profiler.decoding import Decoding
from realrl.runtime.profiler.passes import Passes
from realrl.runtime.profiler.points import (
    Bench,
    Clock,
    Measurer,
    Pace,
    Point,
    find_sweep_spread,
    take_medians,
)
from realrl.runtime.profiler.shapes import ShapeMeasurements, make_tensor_rank
from realrl.runtime.profiler.sizes import Sizes
from realrl.testing.shrink import SHAPE
from tests.conftest import World

TINY = ModelShape.model_validate(SHAPE)
CPU = torch.device("cpu")
SHARED = {"prepare", "optimizer", "product"}
BY_DEGREE = {
    *("embed", "embed_backward", "forward", "backward", "head", "head_backward"),
    *("scalar", "scalar_backward", "prefill", "start", "decode", "decode_overhead", "sample"),
}
COPIES, LINKS = {"copy", "clear", "allocate", "host"}, {"all_reduce", "all_gather", "reduce_scatter", "send"}


def measured(world: World, directory: Path, *options: str, cluster: str) -> Path:
    """A profile of `TINY` by as many processes as a cluster has devices."""
    file = directory / "profile.json"
    recipe = world.recipe("ppo", directory, cluster=cluster)
    assert run_app(["profile", str(recipe), "--quick", "--out", str(file), *options]) == 0
    return file


@pytest.fixture(scope="session")
def profiles(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """By number of processes."""
    return {
        number: measured(world, tmp_path_factory.mktemp("profile"), cluster=f"1x{number}")
        for number in (1, 2)
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_every_kind_is_measured_for_every_tp_degree(profiles: Mapping[int, Path], processes: int) -> None:
    found = Profile.load(profiles[processes])
    assert (
        found.device == "cpu"
        and found.processes == processes
        and found.software["torch"] == torch.__version__
    )
    (part,) = found.layers
    kinds = {(m.kind, m.tp) for m in part.measurements}
    assert kinds == {(k, 1) for k in SHARED} | {(k, tp) for k in BY_DEGREE for tp in range(1, processes + 1)}
    links = {c.kind for c in found.collectives if c.ranks == 2}
    assert {c.kind for c in found.collectives} - links == COPIES
    assert links == (LINKS if processes > 1 else set())
    rates = (found.peak_flops("float32"), found.memory_bytes_per_s())
    assert (
        all(rate is not None and 1e6 < rate < 1e15 for rate in rates) and found.peak_flops("bfloat16") is None
    )


def strategies(devices: int) -> Iterator[Strategy]:
    yield Strategy(dp=devices)
    yield Strategy(tp=devices)
    yield Strategy(pp=devices)
    yield Strategy(tp=devices, sequence_parallel=True, recompute=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_predictions_rest_on_nothing_but_measurements(profiles: Mapping[int, Path], processes: int) -> None:
    """On a device whose data sheet promises nothing, any other source would be noticed."""
    nothing = {
        "fp32_flops": 1e-9,
        "memory_bytes_per_s": 1e-9,
        "link_bytes_per_s": 1e-9,
        "link_latency_s": 1e9,
    }
    useless = replace(DEVICES["cpu"], host_bytes_per_s=1e-9, kernel_s=1e9, **nothing)
    group = NodeGroup(nodes=1, devices_per_node=processes, device=useless, node_bytes_per_s=1e-9)
    spec = ClusterSpec("useless", (group,))
    cost = CostModel(spec, Profile.load(profiles[processes]))
    graph, workload = train_graph(minibatches=2), Workload(16, (4, 6), (6, 12), 12)
    workload = replace(workload, experience_calls=("actor.train", "critic.train"))
    for call in graph.calls:
        model = StoredModel(TINY, PPO_SPEC.heads[call.role], "float32", graph.trained(call.role))
        for strategy in strategies(processes):
            found = cost.call(call, model, Placement(Mesh(0, processes), strategy), workload)
            assert 0 < found.seconds < 1000, (call.name, strategy, found)
    assert cost.offload(1 << 20) < 1000


def test_known_entries_are_not_measured_again(
    world: World, profiles: Mapping[int, Path], tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(profiles[1].read_text())
    before = Profile.load(file)
    measured(world, tmp_path, "--dtype", "float32", "--dtype", "bfloat16", cluster="1x1")
    both = Profile.load(file)
    assert [part.dtype for part in both.layers] == ["float32", "bfloat16"]
    assert (both.layers[0], both.collectives) == (before.layers[0], before.collectives)
    measured(world, tmp_path, "--again", cluster="1x1")
    anew = Profile.load(file)
    assert anew.layers[0] != before.layers[0] and anew.layers[1] == both.layers[1]
    assert {m.key for m in anew.layers[0].measurements} >= {m.key for m in before.layers[0].measurements}


def test_entries_of_other_software_are_measured_again(
    world: World, profiles: Mapping[int, Path], tmp_path: Path
) -> None:
    old = Profile.load(profiles[1])
    old.model_copy(update={"software": {"torch": "1.0"}}).save(tmp_path / "profile.json")
    found = Profile.load(measured(world, tmp_path, cluster="1x1"))
    assert found.software == old.software and found.layers != old.layers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--shape NAME"),
        (["--shape", "lama-2-7b"], "did you mean llama-2-7b"),
        (["--shape", "llama-2-7b", "--dtype", "float16"], "'float16' is none of"),
        (["--shape", "llama-2-7b", "--out", "/"], "is a directory"),
        (["--shape", "llama-2-7b", "--cluster", "h100:1x8+a100-80g:1x8"], "several kinds"),
        (["--shape", "llama-2-7b", "--cluster", "cpu:2x2"], "2 nodes"),
        (["no-such-recipe.yaml"], "no-such-recipe.yaml"),
    ],
)
def test_mistakes_in_a_profile_request_are_one_error_message(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(["profile", *arguments]) == 2
    error = capfd.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_gpus_that_are_not_there_are_not_measured(capfd: pytest.CaptureFixture) -> None:
    assert run_app(["profile", "--shape", "llama-2-7b", "--cluster", "h100:1x8"]) == 2
    assert "torch finds none here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "h100"}, "is for device h100"),
        ({"processes": 2}, "by 2 processes"),
        (None, "not valid JSON"),
    ],
)
def test_files_of_other_machines_are_left_alone(
    change: dict[str, object] | None,
    words: str,
    world: World,
    profiles: Mapping[int, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    file, recipe = tmp_path / "profile.json", world.recipe("ppo", tmp_path)
    text = json.dumps({**json.loads(profiles[1].read_text()), **change}) if change else "no profile"
    file.write_text(text)
    assert run_app(["profile", str(recipe), "--out", str(file)]) == 2
    assert words in capfd.readouterr().err and file.read_text() == text


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_tp_rank_alone_computes_with_its_own_shard(head: str, tp: int) -> None:
    model = make_tensor_rank(TINY, head, tp, layers=2, dtype=torch.float32, device=CPU, products=PLAIN)
    assert model.shard.tp == tp and len(model.shard.queries) == -(-TINY.heads // tp)
    times = Passes(model, Clock(CPU)).measure([8] * 4)
    assert len(times) == 6
    if head == "lm":
        hidden = torch.zeros(3, TINY.hidden_size)
        assert model.transformer.compute_logits(hidden).shape == (3, TINY.vocab_size)


ONCE = Pace(1, 0.0, (1, 1), limit=15.0, total=60.0)


def copied(work: Callable[[int], float], *sizes: int, ranks: int = 1) -> list[Point[CollectiveTime]]:
    """Copies of sizes that take as long as `work` says."""
    return [
        Point(
            (CollectiveTime(kind="copy", ranks=ranks, bytes=size, seconds=1.0),),
            lambda size=size: {"copy": work(size)},
            size,
        )
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("pace", "rows", "expected"),
    [
        (ONCE, [(1, 10, 100, 1000)], {1, 10, 100}),
        (ONCE, [(10, 20), (500,), (30,)], {10, 20, 30}),
        (replace(ONCE, total=-1.0), [(1, 10), (2, 20)], {1, 2}),
    ],
)
def test_points_that_take_too_long_are_skipped(
    pace: Pace, rows: list[tuple[int, ...]], expected: set[int]
) -> None:
    told: list[None] = []
    entries: dict = {}
    measurer = Measurer(entries, bench(), pace, lambda: told.append(None))
    for sizes in rows:
        measurer.measure(copied(lambda size: 0.1 * size, *sizes))
    assert {c.bytes for c in entries.values()} == expected
    assert len(told) == sum(map(len, rows))


def test_times_of_one_tp_degree_do_not_skip_points_of_another() -> None:
    entries: dict = {}
    measurer = Measurer(entries, bench(), ONCE, lambda: None)
    measurer.measure(copied(lambda size: 1.0 * size, 1, 100, ranks=1))
    measurer.measure(copied(lambda size: 0.1 * size, 100, ranks=2))
    measurer.measure(copied(lambda size: 1.0 * size, 100, ranks=1))
    assert sorted((c.ranks, c.bytes) for c in entries.values()) == [(1, 1), (2, 100)]


def test_tp_degrees_are_measured_in_turn() -> None:
    shape = ShapeMeasurements(
        TINY, "float32", Sizes.usual(thin=True), GenerationConfig(), (1, 2, 4), Clock(CPU)
    )
    blanks = [row[0].blanks[0] for row in shape.rows()]
    degrees = [blank.tp for blank in blanks if blank.kind not in SHARED]
    assert len(degrees) > 3
    assert degrees == [1, 2, 4] * (len(degrees) // 3)


@pytest.mark.parametrize("fewest", [0, 8])
def test_generation_is_measured_whether_or_not_answers_may_end(fewest: int) -> None:
    """Where answers have a minimum length, the sampler forbids what would end them."""
    model = make_tensor_rank(TINY, "lm", 1, layers=3, dtype=torch.float32, device=CPU, products=PLAIN)
    decoding = Decoding(model, GenerationConfig(max_new_tokens=8, min_new_tokens=fewest), Clock(CPU))
    for found in (decoding.start(8, 4), decoding.measure_step(2, 12)):
        assert all(isfinite(seconds) for seconds in found.values())


def test_points_that_do_not_fit_are_skipped_with_all_larger_ones() -> None:
    def work(size: int) -> float:
        if size > 10:
            raise torch.OutOfMemoryError
        return 0.1

    entries: dict = {}
    measurer = Measurer(entries, bench(), ONCE, lambda: None)
    measurer.measure(copied(work, 1, 10, 100, 1000))
    assert sorted(c.bytes for c in entries.values()) == [1, 10]


def test_the_median_over_sweeps_is_kept() -> None:
    def sweep(**seconds: float) -> dict:
        return {
            kind: CollectiveTime(kind=kind, ranks=1, bytes=1, seconds=s)  # type: ignore[arg-type]
            for kind, s in seconds.items()
        }

    found = take_medians([sweep(copy=1.0, clear=5.0), sweep(copy=9.0), sweep(copy=2.0)])
    assert {kind: entry.seconds for kind, entry in found.items()} == {"copy": 2.0, "clear": 5.0}


def test_the_spread_of_sweeps_is_that_of_each_as_a_whole() -> None:
    def sweep(factor: float, *odd: float) -> dict:
        rows = [*(1.0, 2.0, 3.0, 4.0, 5.0), *odd]
        return {
            size: CollectiveTime(kind="copy", ranks=1, bytes=size, seconds=factor * row)
            for size, row in enumerate(rows, 1)
        }

    factors = (1.0, 1.5, 1 / 1.5)
    expected = math.log(1.5) * math.sqrt(2 / 3)
    assert find_sweep_spread([sweep(f) for f in factors], ()) == pytest.approx(expected)
    # One entry that jumps is not the machine as a whole.
    assert find_sweep_spread([sweep(1.0, 1.0), sweep(1.0, 9.0), sweep(1.0, 5.0)], ()) == 0
    assert find_sweep_spread([sweep(f) for f in factors], range(1, 6)) is None
    assert find_sweep_spread([sweep(1.0)], ()) is None


def bench() -> Bench:
    return Bench(Process(0, 1, CPU), patience=0.0, repetitions=(1, 1))


def test_the_largest_micro_batch_holds_a_pair(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("reward", tmp_path, micro_batch_tokens=16)
    experiment = load_experiment(str(recipe))
    assert Sizes.of(experiment).micro_batch == 2 * experiment.data.max_tokens


@given(
    st.builds(
        Sizes,
        st.integers(1, 20000),
        st.integers(1, 5000),
        st.integers(0, 1000),
        st.integers(0, 1000),
        st.integers(1, 500),
        st.booleans(),
    )
)
def test_measured_sizes_end_at_the_largest(sizes: Sizes) -> None:
    sizes = replace(sizes, micro_batch=max(sizes.micro_batch, sizes.length))
    passes = list(sizes.passes())
    assert max(length for _, length in passes) == sizes.length
    assert all(tokens % length == 0 and 0 < tokens <= sizes.micro_batch for tokens, length in passes)
    assert max(tokens + length for tokens, length in passes) > sizes.micro_batch
    turns = list(sizes.turns())
    if sizes.answer:
        assert max(context for _, context in turns) == sizes.prompt + sizes.answer
        assert all(rows <= sizes.rows for rows, _ in turns) and min(rows for rows, _ in turns) == 1
