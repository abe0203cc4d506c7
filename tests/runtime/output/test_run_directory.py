"""What a run leaves behind: one directory that tells everything about it."""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from realrl.checkpoint.manifest import Manifest
from realrl.checkpoint.saved import list_checkpoints
from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.config.user_code import UserFunction
from realrl.data.order import split_eval_batches
from realrl.plan.plan import Plan
from realrl.program.lower import home_placements
from realrl.program.text import parse_program
from realrl.program.validate import validate
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.load import dump_experiment, load_experiment
from realrl.runtime.output.rundir import RunDirectory
from tests.conftest import World, read_metrics
from tests.runtime.conftest import run

ALGORITHMS = ["sft", "reward", "ppo"]


def strict_json(text: str) -> Any:
    """Parse what any JSON parser accepts: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(file: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in file.read_text().splitlines()]


def program_lines(run_dir: Path, kind: str, rank: int) -> list[str]:
    return (run_dir / "programs" / f"{kind}-rank{rank}.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_saved_config_plan_and_programs_load_back(finished: Mapping[str, Path], algorithm: str) -> None:
    run_dir = finished[algorithm]
    experiment = load_experiment(str(run_dir / "config.yaml"))
    assert dump_experiment(experiment) == (run_dir / "config.yaml").read_text()
    graph, eval_graph = build_graph(experiment), build_eval_graph(experiment)
    assert eval_graph is not None
    plan = Plan.load(run_dir / "plan.yaml", graph)
    plan.check(graph)
    homes = home_placements(graph, plan)
    for kind, calls in (("train", graph), ("eval", eval_graph)):
        files = sorted((run_dir / "programs").glob(f"{kind}-rank*.txt"))
        programs = [parse_program(file.read_text()) for file in files]
        assert [program.rank for program in programs] == list(range(plan.cluster.size))
        validate(programs, calls, {role: homes[role] for role in calls.roles})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_metrics_are_strict_json_in_the_order_of_steps(finished: Mapping[str, Path], algorithm: str) -> None:
    records = lines(finished[algorithm] / "metrics.jsonl")
    order = [(record["step"], record["kind"]) for record in records]
    train, evaluation = [(s, "train") for s in range(1, 6)], [(s, "eval") for s in (0, 2, 4, 5)]
    assert order == sorted(train + evaluation, key=lambda entry: (entry[0], entry[1] == "eval"))
    for record in records:
        assert record["seconds"] > 0 and all(isinstance(v, float) for v in record["metrics"].values())


def test_metrics_that_are_not_finite_become_null(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.log(1, "train", 0.5, {"a": float("nan"), "b": float("-inf"), "c": 1.5})
    directory.write_samples(1, [{"prompt": "NaN", "score": float("nan")}])
    assert lines(tmp_path / "metrics.jsonl")[0]["metrics"] == {"a": None, "b": None, "c": 1.5}
    assert lines(tmp_path / "samples" / "step-000001.jsonl") == [{"prompt": "NaN", "score": None}]


def test_the_summary_describes_the_run(finished: Mapping[str, Path]) -> None:
    summary = strict_json((finished["reward"] / "summary.json").read_text())
    assert summary["algorithm"] == "reward" and summary["steps"] == 5 and summary["seconds"] > 0


def test_every_trained_role_is_saved_on_the_way_and_at_the_end(finished: Mapping[str, Path]) -> None:
    run_dir = finished["ppo"]
    saved = sorted(path.parent.relative_to(run_dir).as_posix() for path in run_dir.rglob("config.json"))
    on_the_way = [f"checkpoints/step-00000{n}/{role}" for n in (2, 4, 5) for role in ("actor", "critic")]
    assert saved == [*on_the_way, "final", "final-critic"]
    assert [*list_checkpoints(run_dir)] == [5, 4, 2]


def test_sample_scores_average_to_the_metrics(finished: Mapping[str, Path]) -> None:
    run_dir = finished["ppo"]
    evaluations = read_metrics(run_dir, "eval")
    for step, figure in zip((0, 2, 4, 5), evaluations, strict=True):
        rows = lines(run_dir / "samples" / f"step-{step:06}.jsonl")
        assert len(rows) == 80 and all(row.keys() == rows[0].keys() for row in rows)
        assert [row["judge"] for row in rows] == [len(row["completion"]) for row in rows]
        for name, key in (("judge", "judge"), ("reward.inference/score", "score")):
            assert figure[name] == pytest.approx(sum(row[key] for row in rows) / 80, rel=1e-5)


def test_only_as_many_samples_are_written_as_asked_for(world: World, tmp_path: Path) -> None:
    run_dir = run(world, "ppo", tmp_path, evaluation__shown=3, training__steps=1)
    assert len(lines(run_dir / "samples" / "step-000000.jsonl")) == 3


def test_evaluation_does_not_depend_on_processes_or_its_batches(
    finished: Mapping[str, Path], finished_on_two: Path
) -> None:
    one, two = finished["ppo"], finished_on_two
    expected = read_metrics(one, "eval")[0]
    assert read_metrics(two, "eval")[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    name = "samples/step-000000.jsonl"
    for ours, theirs in zip(lines(two / name), lines(one / name), strict=True):
        assert ours.pop("score") == pytest.approx(theirs.pop("score"), abs=1e-5)
        assert ours == theirs


@pytest.mark.parametrize(("ranks", "batch"), [(1, 16), (2, 27)])
def test_the_trace_has_a_row_per_rank_with_its_instructions_in_order(
    finished: Mapping[str, Path], finished_on_two: Path, ranks: int, batch: int
) -> None:
    run_dir = finished["ppo"] if ranks == 1 else finished_on_two
    events = strict_json((run_dir / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {rank: f"rank {rank}" for rank in range(ranks)}
    for rank in range(ranks):
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        train, evaluation = (program_lines(run_dir, kind, rank) for kind in ("train", "eval"))
        evaluation = evaluation * len(split_eval_batches(80, batch))
        due = [train + (evaluation if step in (2, 4, 5) else []) for step in range(1, 6)]
        assert [e["name"] for e in slices] == sum(due, evaluation)
        stop_token_ids = [e["ts"] + e["dur"] for e in slices]
        assert slices[0]["ts"] >= 0
        assert all(b["ts"] >= end - 1 for end, b in zip(stop_token_ids, slices[1:], strict=False))


def test_tensorboard_has_the_metrics(finished: Mapping[str, Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished["sft"] / "tensorboard"))
    board.Reload()
    for kind in ("train", "eval"):
        expected = read_metrics(finished["sft"], kind)
        for name in expected[0]:
            values = [event.value for event in board.Scalars(f"{kind}/{name}")]
            assert values == pytest.approx([step[name] for step in expected])


def test_skipped_records_are_counted_and_the_first_is_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = (world.root / "sft.jsonl").read_text().splitlines()
    records[3:3] = ["{", '{"prompt": "an answer is missing"}']
    (tmp_path / "data.jsonl").write_text("\n".join(records))
    data = str(tmp_path / "data.jsonl")
    run(world, "sft", tmp_path, data__train=data, data__on_error="skip", training__steps=1)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: data.")]
    assert len(notes) == 1
    assert f"data.train: skipped 2 records, first {data}:4: not valid JSON" in notes[0]


def test_the_handling_of_plain_prompts_is_noted_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world.tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    records = str(world.root / "sft.jsonl")
    recipe = world.recipe(
        "sft",
        tmp_path,
        models__actor__tokenizer=str(tmp_path / "tokenizer"),
        data__eval=records,
        training__steps=1,
    )
    assert run_app(["train", str(recipe)]) == 0
    assert capsys.readouterr().err.count("note: prompts are plain text and are used as they stand") == 1


def test_a_new_head_is_noted(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(world, "reward", tmp_path, training__steps=1)
    assert "note: models.reward starts with a new scoring head (score.weight)" in capsys.readouterr().err


def test_without_shuffling_the_seed_does_not_change_the_order(world: World, tmp_path: Path) -> None:
    def losses(seed: int, shuffle: bool) -> list[float]:
        directory = tmp_path / f"{seed}-{shuffle}"
        directory.mkdir()
        more = {"models__actor": {"path": world.actor}, "data__eval": None, "training__steps": 2}
        run_dir = run(world, "sft", directory, seed=seed, data__shuffle=shuffle, **more)
        return [step["actor.train/loss"] for step in read_metrics(run_dir)]

    assert losses(1, False) == losses(2, False)
    assert losses(1, True) != losses(2, True)


JUDGES: dict[str, tuple[str, str]] = {
    "no function": ("x = 1", "has no judge"),
    "does not import": ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
    "is no Python": ("def judge(", "cannot be imported: SyntaxError"),
}


@pytest.mark.parametrize("case", JUDGES)
def test_a_judge_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    code, sentence = JUDGES[case]
    (tmp_path / "judge.py").write_text(code)
    with pytest.raises(UserError, match=sentence):
        UserFunction("evaluation.judge", f"{tmp_path / 'judge.py'}:judge")


def test_a_judge_must_give_a_number_for_each_completion(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.py").write_text("def judge(completions):\n    return [1.0]\n")
    judge = {"judge": f"{tmp_path / 'short.py'}:judge"}
    recipe = world.recipe("ppo", tmp_path, data__eval=str(world.root / "ppo.jsonl"), evaluation=judge)
    assert run_app(["train", str(recipe)]) == 2
    assert "gave 1 numbers for 80 completions" in capsys.readouterr().err


def test_a_full_disk_leaves_what_was_saved_and_is_named(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = Manifest.save

    def full(manifest: Manifest, directory: Path) -> None:
        if "step-000004" in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(manifest, directory)

    monkeypatch.setattr(Manifest, "save", full)
    recipe = world.recipe("ppo", tmp_path, checkpoint__every=2)
    assert run_app(["train", str(recipe)]) == 1
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == (
        f"realrl: {checkpoints}/step-000004 cannot be written: No space left on device;"
        f" the last complete checkpoint is {checkpoints}/step-000002"
    )
    assert "Traceback" not in error
    assert not list(run_dir.rglob(".*")) and not (run_dir / "summary.json").exists()
    assert [*list_checkpoints(run_dir)] == [2]


def earlier_run(directory: Path) -> None:
    """What marks a run's directory, and a model in it."""
    (directory / "programs").mkdir(parents=True)
    (directory / "final").mkdir()
    for name in ("config.yaml", "plan.yaml", "final/model.safetensors"):
        (directory / name).write_text("precious")


def somebody_elses(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.yaml").write_text("precious")


def a_file(path: Path) -> None:
    path.write_text("precious")


OCCUPIED: dict[str, tuple[Callable[[Path], None], dict[str, object], str]] = {
    "a run": (earlier_run, {"resume": "never"}, "holds an earlier run, and resume=never"),
    "not a run": (somebody_elses, {"overwrite": True}, "holds something other than a run"),
    "a file": (a_file, {"overwrite": True}, "is a file"),
    **{
        f"its own {field}": (
            earlier_run,
            {"overwrite": True, **fields},
            f"{field}=RUN/{file} lies in run_dir=RUN, which overwrite=true would delete; choose another run_dir",
        )
        for field, file, fields in (
            ("models.actor.path", "final", {"models__actor": {"path": "RUN/final"}}),
            ("models.actor.tokenizer", "final", {"models__actor__tokenizer": "RUN/final"}),
            ("data.train", "*.yaml", {"data__train": "RUN/*.yaml"}),
            ("data.eval", "config.yaml", {"data__eval": "RUN/config.yaml"}),
        )
    },
}


@pytest.mark.parametrize("case", OCCUPIED)
def test_a_directory_in_use_is_left_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    occupy, fields, sentence = OCCUPIED[case]
    occupy(tmp_path / "run")
    recipe = world.recipe("sft", tmp_path, **fields)
    recipe.write_text(recipe.read_text().replace("RUN", str(tmp_path / "run")))
    sentence = sentence.replace("RUN", str(tmp_path / "run"))
    before = contents(tmp_path / "run")
    assert run_app(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and str(tmp_path / "run") in error and error.count("\n") == 1
    assert contents(tmp_path / "run") == before


def test_code_and_a_plan_inside_the_run_directory_are_not_deleted(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    earlier_run(run_dir)
    (run_dir / "judge.py").write_text("precious")
    judge = {"data__eval": "e.jsonl", "evaluation__judge": f"{run_dir}/judge.py:f"}
    (run_dir / "family.py").write_text("from realrl.families.built_in.qwen import QWEN2 as FAMILY")
    actor = {"path": "x", "family": f"{run_dir}/family.py"}
    for field, fields in {
        "evaluation.judge": judge,
        "plan": {"plan": f"{run_dir}/plan.yaml"},
        "models.actor.family": {"models__actor": actor},
    }.items():
        experiment = load_experiment(str(world.recipe("ppo", tmp_path, overwrite=True, **fields)))
        with pytest.raises(UserError, match=rf"{field}={run_dir}/\w+\.(py|yaml) lies in run_dir"):
            RunDirectory(str(run_dir)).check(experiment)


def test_overwriting_replaces_the_whole_run_directory(world: World, tmp_path: Path) -> None:
    earlier_run(tmp_path / "run")
    run_dir = run(world, "sft", tmp_path, overwrite=True, training__steps=1)
    assert "precious" not in contents(run_dir).values()


def contents(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file): file.read_text(errors="replace") for file in files}
