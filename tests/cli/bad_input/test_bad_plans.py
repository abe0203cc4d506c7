"""An impossible plan gives one message and exit status 2, before any process starts or torch is loaded."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World

CALLS = {
    "actor.generate": "mesh: 0-3, dp: 4",
    "reward.inference": "mesh: 0-1, dp: 2",
    "ref.inference": "mesh: 2-3, dp: 2",
    "critic.inference": "mesh: 0-3, dp: 2, tp: 2",
    "actor.train": "mesh: 0-3, dp: 2, pp: 2",
    "critic.train": "mesh: 0-3, dp: 4",
}
Changes = dict[str, str | None]
CASES: dict[str, tuple[Changes, str, str]] = {
    "does not fill its mesh": (
        {"actor.train": "mesh: 0-3, dp: 2, tp: 4"},
        "",
        "plan file DIR/plan.yaml: actor.train: dp=2 tp=4 pp=1 needs 8 devices, but mesh 0-3 has 4",
    ),
    "mesh is outside": (
        {"reward.inference": "mesh: 4-5, dp: 2"},
        "",
        "plan: reward.inference: mesh 4-5 lies outside the 4 devices of cluster 1x4",
    ),
    "more stages than layers": (
        {"actor.train": "mesh: 0-3, dp: 1, pp: 4"},
        "",
        "plan: actor.train: pp=4 is more pipeline stages than the model has layers (2)",
    ),
    "call missing": ({"critic.train": None}, "", "plan: call critic.train has no placement"),
    "unknown call": (
        {"critic.tarin": "mesh: 0, dp: 1"},
        "",
        "plan: there is no call critic.tarin; did you mean critic.train?",
    ),
    "parameters used in two ways": (
        {"critic.train": "mesh: 0-3, dp: 2, tp: 2, sequence_parallel: true"},
        "",
        "plan: critic.inference and critic.train share the parameters of critic, so sequence_parallel must be",
    ),
    "keeps an unknown role": (
        {},
        "keep: [critc]",
        "plan: keep: critc is not one of actor, reward, ref, critic",
    ),
    "does not fit in memory": ({}, "offload: [ref]", "plan DIR/plan.yaml: device 2 needs"),
    "no memory at all": (
        {},
        "offload: [ref]",
        "device_memory: cpu: 100 KiB is less than drivers and message buffers need",
    ),
    "another cluster": ({}, "cluster: 1x8", "plan file DIR/plan.yaml is for cluster 1x8; this run has 1x4"),
}


@pytest.mark.parametrize("command", ["train", "show"])
@pytest.mark.parametrize("case", CASES)
def test_a_bad_plan_is_one_error_message_before_any_process_starts(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
    command: str,
) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr("realrl.runtime.launcher.launch.launch", refuse)
    changes, extra, sentence = CASES[case]
    calls = {name: entry for name, entry in (CALLS | changes).items() if entry is not None}
    lines = [f"  {name}: {{{entry}}}" for name, entry in calls.items()]
    cluster = [] if extra.startswith("cluster") else ["cluster: 1x4"]
    (tmp_path / "plan.yaml").write_text("\n".join([*cluster, "calls:", *lines, extra]))
    sizes = {"does not fit in memory": "66MiB", "no memory at all": "100KiB"}
    memory = {"device_memory": sizes[case]} if case in sizes else {}
    recipe = world.recipe("ppo", tmp_path, cluster="1x4", plan=str(tmp_path / "plan.yaml"), **memory)
    assert run_app([command, str(recipe)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1
    assert sentence.replace("DIR", str(tmp_path)) in captured.err
    assert not (tmp_path / "run").exists()


def test_more_tp_ranks_than_heads_is_one_error_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe("sft", tmp_path, cluster="1x5", plan="heuristic")
    assert run_app(["train", str(recipe)]) == 2
    assert "plan: actor.train: tp=5 is more than the 4 attention heads" in capsys.readouterr().err
