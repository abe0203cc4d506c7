"""Choice of the number of processes on a machine that computes on CPUs."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup, load_cluster
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import CollectiveTime, LayerTimes, Measurement, Profile, ShapeKey
from realrl.planner.simulate.estimator import estimate_plan
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import load_experiment
from realrl.runtime.measure.performance import find_peak_flops
from realrl.runtime.prepare.devices import spec_of
from realrl.runtime.prepare.host import count_cores, count_threads, cpu_quota
from realrl.runtime.prepare.job import make_written_plan, open_models
from realrl.runtime.prepare.processes import choose_processes, list_splits
from realrl.runtime.prepare.scenarios import Measured, make_scenario
from tests.conftest import World, read_metrics

RECIPES = Path(__file__).parents[3] / "recipes"
DEMO = (
    "{vocab_size: 2048, hidden_size: 192, intermediate_size: 512, layers: 3, heads: 6, kv_heads: 6, head_dim: 32,"
    " max_positions: 256, tied_embeddings: true}"
)


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, threads: str | None = None) -> None:
    """Make this machine one of so many cores, and OMP_NUM_THREADS what it is there."""
    monkeypatch.setattr("realrl.runtime.prepare.host.cpu_quota", lambda: None)
    monkeypatch.setattr("realrl.runtime.prepare.processes.count_cores", lambda: cores)
    monkeypatch.setattr("realrl.runtime.prepare.host.count_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)


def demo(name: str, *changes: str) -> Experiment:
    """A recipe of the demo, on models of its size."""
    weights = {
        "sft": [],
        "ppo": [
            *("models.actor.path=null", f"models.actor.shape={DEMO}"),
            *("models.reward.path=null", f"models.reward.shape={DEMO}"),
        ],
    }
    return load_experiment(str(RECIPES / "demo" / f"{name}.yaml"), [*weights[name], *changes])


@pytest.mark.parametrize(
    ("cores", "threads", "found"),
    [
        (1, None, [(1, 1)]),
        (2, None, [(1, 2), (2, 1)]),
        (6, None, [(1, 6), (2, 3), (3, 2), (6, 1)]),
        (4, "2", [(1, 2), (2, 2)]),
        (4, "8", [(1, 8)]),
        (4, "1", [(1, 1), (2, 1), (4, 1)]),
        (2, "many", [(1, 2), (2, 1)]),
    ],
)
def test_cores_are_divided_evenly_among_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: str | None, found: list[tuple[int, int]]
) -> None:
    machine(monkeypatch, cores, threads)
    assert [(split.processes, split.threads) for split in list_splits()] == found


@pytest.mark.parametrize(
    ("files", "own", "found"),
    [
        ({}, "", None),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b\n", 1.5),
        ({"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, "5:cpu,cpuacct:/x\n", None),
        (
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            "5:cpuacct,cpu:/x\n",
            2.0,
        ),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(
    tmp_path: Path, files: dict[str, str], own: str, found: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cpu_quota(tmp_path, tmp_path / "own") == found


def test_at_least_one_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.host.cpu_quota", lambda: 0.5)
    assert count_cores() == 1
    monkeypatch.setattr("realrl.runtime.prepare.host.cpu_quota", lambda: 1e9)
    everywhere = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert count_cores() == everywhere


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_the_demo_computes_in_one_process_on_two_cores(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(monkeypatch, 2)
    choice = choose_processes(demo(name))
    assert choice.chosen.cluster == Cluster(1, 1) and choice.chosen.threads == 2
    one, two = (split.seconds for split in choice.compared)
    assert one is not None and two is not None and two < one < 1.1 * two
    assert str(choice).startswith("1 process with 2 threads: a step of full length is predicted to take ")
    assert "(2 processes with 1 thread each: " in str(choice)
    assert str(choice).endswith("; more processes would have to save 15 %)")


def test_many_cores_are_shared_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16)
    choice = choose_processes(demo("ppo", "data.batch=2048"))
    seconds = {split.processes: split.seconds for split in choice.compared}
    assert set(seconds) == {1, 2, 4, 8, 16} and 1 < choice.chosen.processes < 16
    best = min(value for value in seconds.values() if value is not None)
    for processes, predicted in seconds.items():
        assert predicted is not None and (processes < choice.chosen.processes) <= (0.85 * predicted > best)


def test_a_searched_plan_is_compared_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    symmetric, searched = choose_processes(demo("sft")), choose_processes(demo("sft", "plan=search"))
    for found, reference in zip(searched.compared, symmetric.compared, strict=True):
        assert found.seconds is not None and reference.seconds is not None
        assert found.seconds <= 1.001 * reference.seconds


def test_numbers_of_processes_that_a_batch_or_memory_cannot_fill_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, 4)
    small = choose_processes(demo("sft", "data.batch=2"))
    assert [split.seconds is not None for split in small.compared] == [True, True, False]
    monkeypatch.setattr("realrl.runtime.prepare.devices.host_memory", lambda: 200 << 20)
    tight = choose_processes(demo("sft"))
    assert tight.compared[-1].seconds is None and tight.chosen.cluster == Cluster(1, 1)


def test_what_cannot_be_predicted_computes_in_one_process(
    monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    machine(monkeypatch, 2)
    recipe = world.recipe("ppo", tmp_path, cluster="auto", models__actor__path=str(tmp_path / "nowhere"))
    choice = choose_processes(load_experiment(str(recipe)))
    assert choice.chosen.cluster == Cluster(1, 1) and "could be predicted" in str(choice)


def test_a_plan_file_says_how_many_processes_there_are(
    monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    machine(monkeypatch, 4)
    plan = tmp_path / "plan.yaml"
    plan.write_text("cluster: 1x2\ncalls:\n  actor.train: {mesh: 0-1, dp: 2}\n")
    recipe = load_experiment(str(world.recipe("sft", tmp_path, cluster="auto", plan=str(plan))))
    choice = choose_processes(recipe)
    assert choice.chosen.cluster == Cluster(1, 2) and choice.chosen.threads == 2


def estimate(experiment: Experiment, processes: int, profile: Profile | None = None) -> float:
    """Predicted seconds of a step of this many processes of this machine."""
    cluster = Cluster(1, processes)
    spec = spec_of(experiment, cluster, "cpu")
    assert spec is not None
    scenario = make_scenario(experiment, spec, Measured(profile))
    return estimate_plan(
        scenario, make_written_plan(experiment, cluster, open_models(experiment))
    ).step_seconds


def test_one_process_uses_all_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    both = estimate(demo("ppo"), 1)
    machine(monkeypatch, 2, threads="1")
    assert count_threads(1) == 1
    # Host time per operation is not divided among threads.
    assert 1.8 < estimate(demo("ppo"), 1) / both < 1.905


def test_named_processes_of_a_cpu_have_the_threads_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    machine(monkeypatch, 8)
    experiment = load_experiment(str(world.recipe("sft", tmp_path, cluster="cpu:1x2")))
    here, elsewhere = (spec_of(experiment, Cluster(1, 2), at) for at in ("cpu", None))  # type: ignore[arg-type]
    assert here is not None and here.device(0).threads == 4
    assert elsewhere is not None and elsewhere.device(0).threads == 1


def test_a_cluster_file_may_give_the_threads_of_a_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "groups: [{nodes: 2, devices_per_node: 2, device: {like: cpu, threads: 8, memory_gb_per_s: 60}}]"
    )
    device = load_cluster(str(file)).device(0)
    expected = DEVICES["cpu"].with_threads(8)
    assert (device.threads, device.fp32_flops) == (8, expected.fp32_flops)
    assert device.memory_bytes_per_s == 60e9 and device.guessed == {"bf16_flops", "fp32_flops"}
    assert device.with_threads(1).with_threads(8) == device


def test_measured_times_are_scaled_to_the_threads_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    experiment = demo("sft")
    shape = experiment.models.actor.shape  # type: ignore[attr-defined]
    points = [
        Measurement(kind=kind, tokens=tokens, context=128 if kind != "optimizer" else 0, seconds=tokens / 1e5)
        for kind in ("embed", "embed_backward", "forward", "backward", "head", "head_backward", "optimizer")
        for tokens in (512, 8192)
    ]
    product = Measurement(kind="product", tokens=1000, seconds=0.01)
    layers = LayerTimes(shape=ShapeKey.of(shape), dtype="float32", measurements=(*points, product))
    copies = tuple(
        CollectiveTime(kind=kind, ranks=1, bytes=1 << 20, seconds=0.01)
        for kind in ("copy", "clear", "allocate")
    )

    def measured(threads: int | None) -> Profile:
        return Profile(device="cpu", threads=threads, software={}, layers=(layers,), collectives=copies)

    same = estimate(experiment, 1, measured(2))
    assert same == estimate(experiment, 1, measured(None))
    assert estimate(experiment, 1, measured(1)) == pytest.approx(same / (2 / 1.05))
    device = DEVICES["cpu"].with_threads(2)
    assert find_peak_flops(device, "float32", measured(2)) == 2e11
    assert find_peak_flops(device, "float32", measured(1)) == pytest.approx(2e11 * 2 / 1.05)


def test_threads_change_the_roofline_of_a_cpu_and_nothing_between_processes() -> None:
    one = DEVICES["cpu"]
    several = one.with_threads(4)
    assert (
        several.fp32_flops / one.fp32_flops == several.memory_bytes_per_s / one.memory_bytes_per_s == 4 / 1.15
    )
    assert (several.kernel_s, several.link_latency_s, several.name) == (
        one.kernel_s,
        one.link_latency_s,
        "cpu",
    )
    group = NodeGroup(nodes=1, devices_per_node=2, device=several, node_bytes_per_s=1e9)
    assert CostModel(ClusterSpec("x", (group,))).spec.device(1).threads == 4


def test_plan_says_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, 4)
    recipe = world.recipe("sft", tmp_path, cluster="auto")
    assert run_app(["plan", str(recipe), "--effort", "100000"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "cluster=auto chose 1 process with 4 threads: a step of full length is predicted to take" in text
    assert "(2 processes with 2 threads each: " in text and "; 4 processes with 1 thread each: " in text
    assert run_app(["plan", str(recipe), "cluster=1x2", "--effort", "100000"]) == 0
    assert "cpu:1x2, with 2 threads each" in " ".join(capsys.readouterr().out.split())


def test_a_run_starts_the_processes_and_threads_that_were_chosen(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, 4)
    seconds = {1: 9.0, 2: 1.0, 4: 7.0}
    monkeypatch.setattr(
        "realrl.runtime.prepare.processes._predict",
        lambda split, *_: replace(split, seconds=seconds[split.processes]),
    )
    function = tmp_path / "threads.py"
    function.write_text(
        "import os, torch\n"
        "def score(completions, **kwargs):\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "        print(os.environ['WORLD_SIZE'], torch.get_num_threads(), file=file)\n"
        "    return [0.0] * len(completions)\n"
    )
    changes = {"models__reward": None, "reward__function": f"{function}:score", "training__steps": 1}
    recipe = world.recipe("grpo", tmp_path, cluster="auto", **changes)
    assert run_app(["train", str(recipe)]) == 0
    assert set((tmp_path / "seen").read_text().splitlines()) == {"2 2"}
    note = "cluster=auto chose 2 processes with 2 threads each: a step of full length is predicted to take 1 s (1"
    assert f"note: {note}" in capfd.readouterr().err
    assert len(read_metrics(tmp_path / "run")) == 1


def test_more_processes_than_cores_are_noted_and_more_than_memory_holds_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.host.count_cores", lambda: 2)
    monkeypatch.setattr("realrl.runtime.prepare.host.host_memory", lambda: 23 << 30)
    recipe = str(world.recipe("sft", tmp_path, training__steps=1))
    assert run_app(["train", recipe, "cluster=1x64", "data.batch=64"]) == 2
    error = capfd.readouterr().err
    assert "64 processes on this machine take 25.0 GiB for libraries alone, of 23.0 GiB" in error
    assert "such as cluster=1x2 for its 2 cores" in error
    assert run_app(["train", recipe, "cluster=1x2"]) == 0
    assert "share 2 cores" not in capfd.readouterr().err
    monkeypatch.setattr("realrl.runtime.prepare.host.count_cores", lambda: 1)
    assert run_app(["train", recipe, "cluster=1x2", "overwrite=true"]) == 0
    note = "note: 2 processes share 1 core, so steps take longer than with cluster=1x1"
    assert note in capfd.readouterr().err
