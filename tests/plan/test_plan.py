from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan

KEYS = (Key("prompts", "int64"), Key("sequences", "int64"), Key("score", "float32", "one"))
GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), ("sequences",), work=("prompts",))
SCORE = Call("reward.inference", "reward", Kind.INFERENCE, ("sequences",), ("score",), work=("sequences",))
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("sequences", "score"), work=("sequences",))
GRAPH = DataflowGraph([GENERATE, SCORE, TRAIN], KEYS)


SMALL = ModelShape(
    vocab_size=9, hidden_size=6, intermediate_size=8, layers=2, heads=3, kv_heads=1, head_dim=2
)


def place(mesh: str, dp: int, tp: int = 1, pp: int = 1, *, sp: bool = False) -> Placement:
    return Placement(Mesh.parse(mesh), Strategy(dp=dp, tp=tp, pp=pp, sequence_parallel=sp))


def plan_of(**placements: Placement) -> Plan:
    """A plan for GRAPH on 1x4, all calls on 0-3 where not said otherwise; `__` stands for the dot."""
    everywhere = {call.name: place("0-3", 4) for call in GRAPH.calls}
    return Plan(Cluster(1, 4), everywhere | {name.replace("__", "."): p for name, p in placements.items()})


def test_plan_file_round_trip(tmp_path: Path) -> None:
    plan = Plan(
        Cluster(2, 2),
        {
            "actor.generate": Placement(Mesh(0, 4), Strategy(dp=2, tp=2, micro_batch_tokens=100)),
            "actor.train": Placement(Mesh(2, 2), Strategy(recompute=True, pp=2, vpp=3, zero_bubble=True)),
        },
        offload=("actor",),
        offload_optimizer=("actor",),
        keep=("actor", "critic"),
    )
    plan.save(tmp_path / "plan.yaml", GRAPH)
    assert Plan.load(tmp_path / "plan.yaml", GRAPH) == plan


def test_a_plan_file_may_leave_out_defaults(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("cluster: 1x1\ncalls:\n  actor.train: {mesh: 0, dp: 1}\n")
    expected = Placement(Mesh(0, 1), Strategy(micro_batch_tokens=5))
    assert Plan.load(tmp_path / "p.yaml", GRAPH, micro_batch_tokens=5)["actor.train"] == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cluster: 1x2\ncalls:\n  a.train: {mesh: 0-1, dp: two}", "a.train: dp: 'two' is not a whole number"),
        (
            "cluster: 1x2\ncalls:\n  a.train: {mash: 0-1, dp: 2}",
            "a.train: mash: unknown key; did you mean mesh?",
        ),
        ("cluster: 1x2\ncalls:\n  a.train: {mesh: 0-1, dp: 1}", "a.train: dp=1 tp=1 pp=1 needs 1 devices"),
        (
            "cluster: 1x2\ncalls:\n  a.train: {mesh: 0-1, dp: 2, vpp: 2}",
            "a.train: strategy: vpp=2 divides the layers of a pipeline stage, but pp=1 has no pipeline",
        ),
        (
            "cluster: 1x4\ncalls:\n  a.train: {mesh: 0-3, dp: 2, pp: 2, vpp: 2, zero: 3}",
            "a.train: strategy: vpp=2 and zero=3 do not fit together",
        ),
        (
            "cluster: 1x2\ncalls:\n  a.train: {mesh: 0-1, dp: 2, zero_bubble: true}",
            "a.train: strategy: zero_bubble needs a pipeline and zero=1, not pp=1 and zero=1",
        ),
        ("cluster: 1x2\ncalls:\n  a.train: {mesh: x, dp: 1}", "a.train: mesh 'x' is not understood"),
        ("cluster: 1x2\ncalls:\n  a.train: 3", "a.train: 3 is not a section of keys"),
        ("cluster: two\ncalls: {}", "cluster='two' is not understood"),
        ("calls: {}", "cluster: missing"),
        ("- 1", "[1] is not a section of keys"),
        ("cluster: [", "line 1: not valid YAML"),
    ],
)
def test_a_mistake_in_a_plan_file_names_file_and_call(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Plan.load(path, GRAPH)
    assert "p.yaml" in str(caught.value) and sentence in str(caught.value)


def test_a_missing_plan_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml does not exist"):
        make_plan("nowhere.yaml", GRAPH, Cluster(1, 1), 10)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (plan_of(actor__tarin=place("0-3", 4)), "there is no call actor.tarin; did you mean actor.train?"),
        (Plan(Cluster(1, 4), {"actor.train": place("0-3", 4)}), "call actor.generate has no placement"),
        (plan_of(actor__train=place("4-7", 4)), "actor.train: mesh 4-7 lies outside the 4 devices"),
        (
            plan_of(actor__train=place("3-4", 2)),
            "actor.train: mesh 3-4 lies outside the 4 devices of cluster",
        ),
        (
            plan_of(actor__train=place("0-3", 1, 4)),
            "actor.train: tp=4 is more than the 3 attention heads of the model",
        ),
        (
            plan_of(reward__inference=place("0-3", 1, 1, 4)),
            "reward.inference: pp=4 is more pipeline stages than the model has layers (2)",
        ),
        (
            plan_of(reward__inference=Placement(Mesh(0, 4), Strategy(dp=2, pp=2, vpp=2))),
            "reward.inference: pp=2 with vpp=2 is more virtual pipeline stages than the model has layers (2)",
        ),
        (
            plan_of(actor__generate=Placement(Mesh(0, 2), Strategy(pp=2, vpp=1, zero_bubble=True))),
            "actor.generate: zero_bubble is for calls that train",
        ),
        (
            plan_of(actor__generate=place("0-3", 2, 2, sp=True), actor__train=place("0-3", 2, 2)),
            "actor.generate and actor.train share the parameters of actor, so sequence_parallel must be the same",
        ),
        (
            plan_of(actor__generate=Placement(Mesh(0, 4), Strategy(dp=4, recompute=True))),
            "actor.generate: recompute is for calls that train",
        ),
        (replace(plan_of(), offload=("ref",)), "offload: ref is not one of actor, reward"),
        (replace(plan_of(), offload_optimizer=("reward",)), "offload_optimizer: reward is not one of actor"),
        (replace(plan_of(), keep=("critic",)), "keep: critic is not one of actor, reward"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        plan.check(GRAPH, {"actor": SMALL, "reward": SMALL})
    text = str(caught.value)
    assert text.startswith("plan: ") and "\n" not in text and sentence in text


def test_calls_that_train_one_role_have_one_stage_of_zero() -> None:
    again = replace(TRAIN, name="actor.again")
    graph = DataflowGraph([GENERATE, SCORE, TRAIN, again], KEYS)
    for stage in (1, 2, 3):
        home = Placement(Mesh(0, 4), Strategy(dp=4, zero=2))
        plan = plan_of(actor__train=home, actor__again=replace(home, strategy=Strategy(dp=4, zero=stage)))
        if stage == 2:
            plan.check(graph, {"actor": SMALL, "reward": SMALL})
            continue
        with pytest.raises(
            UserError, match=r"actor\.train and actor\.again train one role, so they must have one"
        ):
            plan.check(graph, {"actor": SMALL, "reward": SMALL})


@pytest.mark.parametrize(("stage", "inferring"), [(1, 1), (2, 1), (3, 3)])
def test_evaluations_take_over_the_stage_of_training_as_far_as_they_can(stage: int, inferring: int) -> None:
    graph = DataflowGraph([replace(TRAIN, inputs=("prompts",), work=("prompts",))], KEYS[:1])
    infer = Call("actor.inference", "actor", Kind.INFERENCE, ("sequences",), ("score",), work=("sequences",))
    evaluation = DataflowGraph([GENERATE, infer], KEYS)
    home = Placement(Mesh(0, 4), Strategy(dp=4, zero=stage))
    plan = Plan(Cluster(1, 4), {"actor.train": home}).evaluation(evaluation, graph)
    plan.check(evaluation, {"actor": SMALL})
    assert [plan[call.name].strategy.zero for call in (GENERATE, infer)] == [1, inferring]


@pytest.mark.parametrize(("exact", "degrees"), [(False, {"dp": 2, "cp": 2}), (True, {"dp": 4})])
def test_evaluations_of_exact_runs_do_not_divide_the_cache(exact: bool, degrees: dict[str, int]) -> None:
    """A call that generates only in evaluations takes over the degrees of training."""
    graph = DataflowGraph([replace(TRAIN, inputs=("prompts",), work=("prompts",))], KEYS[:1])
    evaluation = DataflowGraph([GENERATE], KEYS)
    home = Placement(Mesh(0, 4), Strategy(dp=2, cp=2))
    plan = Plan(Cluster(1, 4), {"actor.train": home}).evaluation(evaluation, graph, exact=exact)
    assert plan["actor.generate"].strategy == Strategy(**degrees)
    if exact:
        plan.check_exact(evaluation)
        return
    with pytest.raises(UserError, match="exact=true needs cp=1 in calls that generate"):
        plan.check_exact(evaluation)


def test_any_overlap_of_meshes_and_any_strategy_fits() -> None:
    Plan(
        Cluster(1, 4),
        {
            "actor.generate": place("0-1", 1, 2),
            "actor.train": place("0-3", 2, 1, 2),
            "reward.inference": place("1", 1),
        },
        offload=("reward",),
        keep=("actor",),
    ).check(GRAPH, {"actor": SMALL})


@pytest.mark.parametrize("name", PRESETS)
def test_make_plan_takes_every_preset_and_its_saved_file(tmp_path: Path, name: str) -> None:
    cluster = Cluster(1, 4)
    plan = make_plan(name, GRAPH, cluster, 50)
    plan.save(tmp_path / "p.yaml", GRAPH)
    assert make_plan(str(tmp_path / "p.yaml"), GRAPH, cluster, 999) == plan


def test_an_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'symetric' is neither a preset .*; did you mean symmetric\?"):
        make_plan("symetric", GRAPH, Cluster(1, 1), 10)


def test_a_plan_file_for_another_cluster_is_refused(tmp_path: Path) -> None:
    make_plan("symmetric", GRAPH, Cluster(1, 4), 50).save(tmp_path / "p.yaml", GRAPH)
    with pytest.raises(UserError, match="is for cluster 1x4; this run has 1x2"):
        make_plan(str(tmp_path / "p.yaml"), GRAPH, Cluster(1, 2), 50)


EVALUATION = DataflowGraph(
    [
        GENERATE,
        Call("actor.inference", "actor", Kind.INFERENCE, ("sequences",), work=("sequences",)),
        Call("reward.score", "reward", Kind.INFERENCE, ("sequences",), ("score",), work=("sequences",)),
    ],
    KEYS,
)


def test_evaluation_runs_where_the_same_call_or_else_the_same_role_runs() -> None:
    plan = Plan(
        Cluster(1, 4),
        {
            "actor.generate": place("0-1", 2),
            "actor.train": place("2-3", 2),
            "reward.inference": place("2-3", 2),
        },
    )
    evaluation = plan.evaluation(EVALUATION, GRAPH)
    evaluation.check(EVALUATION)
    meshes = {name: str(placement.mesh) for name, placement in evaluation.placements.items()}
    assert meshes == {"actor.generate": "0-1", "actor.inference": "2-3", "reward.score": "2-3"}


def test_recomputation_is_for_train_calls_and_not_for_evaluation() -> None:
    plan = make_plan("symmetric", GRAPH, Cluster(1, 2), 10, recompute=True)
    assert {name for name, p in plan.placements.items() if p.strategy.recompute} == {"actor.train"}
    evaluation = plan.evaluation(EVALUATION, GRAPH)
    assert not any(p.strategy.recompute for p in evaluation.placements.values())
