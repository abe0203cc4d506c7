"""Will it fit? Which device does not, what of, and a change with which everything does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import Footprint, MemoryPart, PartKind
from realrl.recipe.load import load_experiment
from realrl.recipe.model import ModelConfig
from realrl.runtime.prepare.cluster import written_cluster
from realrl.runtime.prepare.devices import memory_spec
from realrl.runtime.prepare.fit import check
from realrl.runtime.prepare.fit.changes import Draft, list_plan_changes
from realrl.runtime.prepare.fit.check import check_fit, compute_device_memory, find_peak_device
from realrl.runtime.prepare.job import Job, make_job
from tests.conftest import World

PPO = str(Path(__file__).parents[3] / "recipes" / "reference" / "ppo.yaml")
LEAN = "mesh: 0-7, dp: 1, tp: 8, sequence_parallel: true, micro_batch_tokens: 256"
WIDE = "mesh: 0-7, dp: 8, micro_batch_tokens: 256"
CALLS = {
    "actor.generate": LEAN,
    "reward.inference": LEAN,
    "ref.inference": LEAN,
    "critic.inference": LEAN,
    "actor.train": f"{LEAN}, recompute: true",
    "critic.train": f"{LEAN}, recompute: true",
}
"""As little memory as without offloading is possible on 8 devices."""

LONG = ("data.max_tokens=4096", "data.max_prompt_tokens=2048", "generation.max_new_tokens=2048")
STATELESS = "offload_optimizer: [actor, critic]"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which change is found must not depend on how busy the machine is."""
    monkeypatch.setattr(check, "_SECONDS", 600.0)


def job(*overrides: str, download: bool = False) -> Job:
    """The reference recipe of four 7B models on 8 A100, changed."""
    experiment = load_experiment(PPO, ["cluster=a100-80g:1x8", *overrides])
    cluster = written_cluster(experiment.cluster)
    assert cluster is not None
    return make_job(experiment, cluster, download=download)


def refusal(*overrides: str) -> str:
    """The sentence about a recipe that does not fit."""
    with pytest.raises(UserError) as caught:
        check_fit(job(*overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plan_file(directory: Path, extra: str = "", **calls: str) -> str:
    """`plan=FILE` of a plan for the reference recipe."""
    named = CALLS | {name.replace("__", "."): entry for name, entry in calls.items()}
    lines = [f"  {name}: {{{entry}}}" for name, entry in named.items()]
    (directory / "plan.yaml").write_text("\n".join(["cluster: 1x8", "calls:", *lines, extra]))
    return f"plan={directory / 'plan.yaml'}"


def test_sizes_that_only_the_hub_knows_are_asked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()
    shape = load_experiment(PPO, []).models.actor.shape
    assert shape is not None

    def known(config: ModelConfig) -> ModelShape | None:
        return config.shape or (shape if config.path in asked else None)

    def ask(config: ModelConfig) -> ModelShape:
        asked.update([config.path] if config.path else [])
        return known(config) or shape

    monkeypatch.setattr("realrl.runtime.prepare.job.known_shape", known)
    monkeypatch.setattr("realrl.runtime.prepare.job.find_model_shape", ask)
    model = ("models.actor.path=some/model", "models.actor.shape=null", "plan=symmetric")
    before = job(*model)
    assert before.unknown == ("actor", "ref") and not asked
    after = job(*model, download=True)
    assert not after.unknown and asked == {"some/model"}
    assert after.models.stored["ref"].shape == shape
    missing = [find_peak_device(one, ClusterSpec.parse("a100-80g:1x8")).shortfall for one in (before, after)]
    assert missing[0] < missing[1]


def test_the_sentence_names_device_call_and_what_is_largest() -> None:
    sentence = refusal("plan=symmetric")
    assert re.match(
        r"plan symmetric: device 0 needs 1\d\d GiB of 77\.4 GiB during actor\.train \(actor gradients and"
        r" optimizer 37\.7 GiB, critic gradients and optimizer 36\.9 GiB, activations [\d.]+ GiB and \d more\); ",
        sentence,
    )


def test_what_is_offloaded_must_fit_into_the_memory_of_hosts(tmp_path: Path) -> None:
    file = plan_file(tmp_path, "offload_optimizer: [actor]")
    found = re.fullmatch(
        r"plan \S+: the host of node 0 needs ([\d.]+) GiB of 28\.0 GiB for what is offloaded; offload less, or set"
        r" host_memory if a node's host has more",
        refusal(file, "host_memory=60GiB", "device_memory=1TiB"),
    )
    assert found is not None and float(found[1]) > 28
    # A process of each of the 8 devices takes 4 GiB besides.
    enough = f"host_memory={float(found[1]) + 8 * 4 + 0.1:.1f}GiB"
    check_fit(job(file, enough, "device_memory=1TiB"))


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (("plan=heuristic", "device_memory=50GiB"), "micro_batch_tokens"),
        (("plan=heuristic", "device_memory=39GiB", "micro_batch_tokens=4096", *LONG), "recompute"),
        (
            (
                "plan=heuristic",
                "device_memory=34GiB",
                "micro_batch_tokens=256",
                "recompute=true",
                "models.ref.dtype=float32",
            ),
            "models.ref.dtype",
        ),
    ],
)
def test_what_is_suggested_for_a_preset_makes_it_fit(overrides: tuple[str, ...], change: str) -> None:
    found = re.search(rf"; it fits with ({change}=\w+) \(needs [\d.]+ GiB\)$", refusal(*overrides))
    assert found is not None
    check_fit(job(*overrides, found[1]))


@pytest.mark.parametrize(
    ("overrides", "extra", "calls", "change"),
    [
        (
            ("device_memory=58GiB",),
            "",
            {
                "critic__train": "mesh: 0-7, dp: 1, tp: 8",
                "critic__inference": "mesh: 0-7, dp: 1, tp: 8",
            },
            "sequence_parallel: true on critic.inference and critic.train",
        ),
        (
            ("device_memory=54GiB",),
            "",
            {"actor__generate": "mesh: 0-7, dp: 8, micro_batch_tokens: 40000"},
            "micro_batch_tokens: 10000 on actor.generate",
        ),
        (("device_memory=37GiB", *LONG), "", {"actor__train": LEAN}, "recompute: true on actor.train"),
        (
            ("device_memory=45GiB",),
            "",
            {"actor__generate": "mesh: 0-7, dp: 8, micro_batch_tokens: 40000"},
            "actor in offload_optimizer",
        ),
        (("device_memory=20.5GiB",), STATELESS, {}, "ref in offload"),
        (
            ("device_memory=31GiB",),
            f"{STATELESS}\nkeep: [actor]",
            {"actor__generate": WIDE},
            "actor removed from keep",
        ),
        (
            ("device_memory=60GiB",),
            "",
            {"actor__generate": WIDE, "actor__train": f"{WIDE}, recompute: true"},
            "dp: 4, tp: 2, pp: 1 on actor.generate and actor.train",
        ),
    ],
)
def test_the_cheapest_change_of_a_plan_file_that_helps_is_named(
    tmp_path: Path, overrides: tuple[str, ...], extra: str, calls: dict[str, str], change: str
) -> None:
    sentence = refusal(plan_file(tmp_path, extra, **calls), *overrides)
    assert re.search(rf"; it fits with {change} \(needs [\d.]+ GiB\)$", sentence), sentence


def test_one_change_is_not_always_enough(tmp_path: Path) -> None:
    """No search and no other preset helps where the kind of the device, and so its speed, is not known."""
    overrides = ("cluster=1x8", "data.batch=16", "ppo.minibatches=1", "device_memory=19GiB")
    sentence = refusal(plan_file(tmp_path, STATELESS), *overrides)
    assert re.search(
        r"; it fits with ref in offload and \w+ in offload( and .*)? \(needs 1\d\.\d GiB\)$", sentence
    ), sentence


def test_more_parts_are_offered_to_calls_under_zero_3(tmp_path: Path) -> None:
    """More context parallelism, too; never one rank alone, which shards nothing."""
    sharded = "mesh: 0-7, dp: 8, zero: 3, recompute: true"
    found = job(plan_file(tmp_path, actor__train=sharded, actor__generate=WIDE))
    draft = Draft(found.experiment, memory_spec(found.experiment, found.plan.cluster), found.plan)
    offered = {
        name: {
            change.text.partition(" on ")[0]
            for changes in list_plan_changes(draft, found.experiment.graph, Footprint(name, {}))
            for change in changes
        }
        for name in ("actor.train", "actor.generate")
    }
    assert {"dp: 4, tp: 2, pp: 1", "dp: 1, cp: 8, tp: 1, pp: 1"} <= offered["actor.train"]
    assert "dp: 1, tp: 8, pp: 1" not in offered["actor.train"]
    assert "dp: 1, tp: 8, pp: 1" in offered["actor.generate"]
    assert any("cp: 2" in text for text in offered["actor.generate"])


def test_a_call_is_offered_to_have_no_zero_bubble(tmp_path: Path) -> None:
    trained = "mesh: 0-7, dp: 1, tp: 4, pp: 2, vpp: 2, zero_bubble: true, sequence_parallel: true"
    found = job(plan_file(tmp_path, actor__train=trained))
    draft = Draft(found.experiment, memory_spec(found.experiment, found.plan.cluster), found.plan)
    offered = list_plan_changes(draft, found.experiment.graph, Footprint("actor.train", {}))
    texts = [change.text for changes in offered for change in changes]
    assert texts.index("zero_bubble: false on actor.train") < texts.index("recompute: true on actor.train")


def test_no_call_is_offered_to_offload_the_optimizer_that_it_uses(tmp_path: Path) -> None:
    """Whatever the call is named."""
    train = Call("actor.update", "actor", Kind.TRAIN, inputs=("tokens",), work=("tokens",))
    score = replace(train, name="actor.train", kind=Kind.INFERENCE)
    graph = DataflowGraph([score, train], [Key("tokens", "int64")])
    found = job(plan_file(tmp_path))
    plan = replace(found.plan, placements={})
    draft = Draft(found.experiment, memory_spec(found.experiment, plan.cluster), plan)
    parts = {MemoryPart(PartKind.OPTIMIZER, "actor"): 1 << 30}
    offered = {
        call.name: [
            change.text
            for changes in list_plan_changes(draft, graph, Footprint(call.name, parts))
            for change in changes
        ]
        for call in graph.calls
    }
    assert offered == {"actor.train": ["actor in offload_optimizer"], "actor.update": []}


def test_offloading_is_no_help_where_host_and_device_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_file(tmp_path, **{"actor__generate": WIDE})
    more = ("cluster=1x8", "device=cpu", plan)
    monkeypatch.setattr("realrl.runtime.prepare.fit.check._SECONDS", 1.0)
    assert "with actor in offload_optimizer" in refusal(*more, "device_memory=50GiB")
    monkeypatch.setattr("realrl.runtime.prepare.devices.host_memory", lambda: 8 * 50 << 30)
    assert "offload" not in refusal(*more).rpartition(";")[2]


def test_a_search_is_suggested_with_what_it_finds() -> None:
    sentence = refusal("plan=symmetric")
    assert re.search(r"; it fits with plan=search \(needs [\d.]+ GiB, step [\d.]+ s\)$", sentence)


def test_what_fits_nowhere_is_said_by_the_search() -> None:
    sentence = refusal("plan=symmetric", "models.actor.shape=llama-2-70b")
    assert re.search(
        r"; no plan fits llama-2-70b \(actor, ref\) and .*; it fits on \d+ nodes \(step", sentence
    )


def test_evaluations_count(world: World, tmp_path: Path) -> None:
    more = {"data__eval": str(world.root / "ppo.jsonl"), "data__eval_batch": 80, "data__batch": 2}
    tokens = {"micro_batch_tokens": 100_000, "ppo__minibatches": 1}
    experiment = load_experiment(str(world.recipe("ppo", tmp_path, **more, **tokens)))
    found = make_job(experiment, Cluster(1, 1))
    spec = memory_spec(experiment, Cluster(1, 1))
    assert find_peak_device(found, spec).phase == "eval"
    cache = {
        name: max(footprint.parts.get(MemoryPart(PartKind.CACHE), 0) for footprint in devices[0].footprints)
        for name, devices in compute_device_memory(found, spec).items()
    }
    assert cache["eval"] > 2 * cache["train"] > 0


def test_models_that_are_elsewhere_count_nothing(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("ppo", tmp_path, models__ref={"path": "some/hub-model"})
    experiment = load_experiment(str(recipe))
    found = make_job(experiment, Cluster(1, 1))
    assert found.unknown == ("ref",)
    (device,) = compute_device_memory(found, memory_spec(experiment, Cluster(1, 1)))["train"]
    held = {str(part) for part in device.resident}
    assert "actor parameters" in held and "ref parameters" not in held
    check_fit(found)


def test_a_plan_that_this_machine_cannot_hold_is_refused_before_any_process_starts(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr("realrl.runtime.launcher.launch.launch", refuse)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 33_116}.__getitem__)
    assert run_app(["train", str(world.recipe("sft", tmp_path, cluster="1x2"))]) == 2
    error = capsys.readouterr().err
    assert "KiB (this machine's memory over 2 processes, as device_memory is not given) during" in error
    assert error.startswith("realrl: plan symmetric: device 0 needs") and error.count("\n") == 1
