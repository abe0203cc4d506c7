"""An algorithm of the user's own, in one file that a recipe names: every command works with it."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.config.user_code import UserCode
from realrl.plan.cluster import Cluster
from realrl.planner.workload.workload import Workload
from realrl.recipe.algorithm import get_spec
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.compile import compile_recipe
from realrl.runtime.profiler.points.grid import Sizes
from tests.conftest import World, read_metrics, sentence, write_jsonl
from tests.runtime.processes import end, start

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "best_of_n.py"
METRICS = ("actor.train/loss", "actor.train/best_score", "actor.train/score", "reward.inference/score")
DISJOINT = """
cluster: 1x2
calls:
  actor.generate: {mesh: 0-1, dp: 1, tp: 2}
  reward.inference: {mesh: 1, dp: 1, micro_batch_tokens: 60}
  actor.train: {mesh: 0-1, dp: 1, pp: 2, micro_batch_tokens: 90}
"""
APART = """
cluster: 1x2
calls:
  actor.generate: {mesh: 1, dp: 1, micro_batch_tokens: 60}
  reward.inference: {mesh: 0, dp: 1, micro_batch_tokens: 60}
  actor.train: {mesh: 1, dp: 1, micro_batch_tokens: 90}
"""
"""The rank that writes does not train."""


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: `algorithm.py`, and `recipe.yaml` that names it."""
    directory = tmp_path_factory.mktemp("own")
    shutil.copy(EXAMPLE, directory / "algorithm.py")
    (directory / "disjoint.yaml").write_text(DISJOINT)
    write_jsonl(directory / "eval.jsonl", [{"prompt": sentence(i, "good")} for i in range(10)])
    recipe: dict[str, Any] = {
        "algorithm": "algorithm.py",
        "run_dir": "run",
        "cluster": "1x1",
        "device": "cpu",
        "micro_batch_tokens": 128,
        "models": {
            "actor": {"path": world.actor, "optimizer": {"lr": 1e-3}},
            "reward": {"path": world.reward},
        },
        "data": {"train": f"{world.root}/ppo.jsonl", "eval": "eval.jsonl", "batch": 6},
        "best_of_n": {"samples": 3, "minibatches": 2},
        "generation": {"max_new_tokens": 8},
        "training": {"steps": 2},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    before = Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """A run in one process."""
    assert run_app(["train", "recipe.yaml"]) == 0
    return place / "run"


def test_no_file_of_the_package_knows_the_example() -> None:
    sources = (ROOT / "src").rglob("*.py")
    assert not [file for file in sources if "best_of_n" in file.read_text(encoding="utf-8")]


def test_config_documents_its_recipes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["config", "algorithm.py"]) == 0
    printed = capsys.readouterr().out
    described = yaml.safe_load(printed)
    assert described["algorithm"] == "algorithm.py"
    assert described["best_of_n"] == {"samples": 4, "minibatches": 1}
    assert "# Answers that are sampled for each prompt" in printed


def test_show_has_its_recipe_graph_and_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["show", "recipe.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"algorithm: {place / 'algorithm.py'}" in printed
    assert "actor.train  (train in 2 mini-batches, role actor)" in printed


def test_calls_may_have_any_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("actor.train", "update")
    (place / "renamed.py").write_text(text, encoding="utf-8")
    assert run_app(["show", "recipe.yaml", "algorithm=renamed.py"]) == 0
    assert re.search(r"^0 +actor\.gen d1 .* update d1 t1 p1$", capsys.readouterr().out, re.MULTILINE)


def test_plan_for_64_devices_counts_all_samples(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("path=null", "shape=llama-2-7b")
    shapes = [f"models.{role}.{field}" for role in ("actor", "reward") for field in size]
    batch = ["data.batch=64", "best_of_n.samples=8", "data.max_tokens=256", "data.max_prompt_tokens=128"]
    options = ["--cluster", "h100:8x8", "--seconds", "5", "--json"]
    assert run_app(["plan", "recipe.yaml", *shapes, *batch, *options]) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (workload["items"], workload["samples_per_prompt"]) == (512, 8)


def test_plans_count_no_preparation_that_is_not_its_own(place: Path) -> None:
    experiment = load_experiment("recipe.yaml")
    assert Workload.of(experiment).work(build_graph(experiment).call("actor.train")).episode == 0


def test_batches_count_prompts_and_devices_share_out_their_samples(place: Path) -> None:
    experiment = load_experiment("recipe.yaml")
    assert Sizes.of(experiment).rows == 18
    compile_recipe(experiment, Cluster(1, 8))  # 9 items in each mini-batch
    with pytest.raises(ValueError, match=r"data\.batch=6, each sampled 3 times, in 2 mini-batches"):
        compile_recipe(experiment, Cluster(2, 8))


@pytest.mark.parametrize("plan", ["dp", "disjoint"])
def test_it_learns_the_same_under_every_plan(place: Path, alone: Path, plan: str) -> None:
    options = ["plan=disjoint.yaml"] if plan == "disjoint" else []
    assert run_app(["train", "recipe.yaml", "cluster=1x2", f"run_dir={plan}", *options]) == 0
    for kind in ("train", "eval"):
        for ours, reference in zip(read_metrics(place / plan, kind), read_metrics(alone, kind), strict=True):
            for name in METRICS:
                assert (name in ours) == (name in reference)
                if name in reference:
                    assert ours[name] == pytest.approx(reference[name], rel=1e-4), name


def test_the_best_sample_of_each_prompt_is_learnt(alone: Path) -> None:
    for step in read_metrics(alone):
        assert step["actor.train/best_score"] > step["actor.train/score"]


def test_a_misspelt_headline_is_noted_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace('"actor.train/best_score",', '"actor.train/bets_score",')
    (place / "misspelt.py").write_text(text)
    options = ["algorithm=misspelt.py", "run_dir=misspelt", "training.steps=2"]
    assert run_app(["train", "recipe.yaml", *options]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "has given a metric" in line]
    assert notes == [
        "note: algorithm best_of_n: headlines: no call has given a metric actor.train/bets_score;"
        " did you mean actor.train/best_score?"
    ]


def test_a_saved_recipe_loads_from_anywhere(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(str(alone / "config.yaml"))
    assert experiment.algorithm == str(alone.parent / "algorithm.py")
    assert get_spec(experiment).name == "best_of_n"


@pytest.mark.parametrize("reference", ["run/inside.py", "run.inside"])
def test_an_algorithm_inside_the_run_directory_is_not_deleted(
    place: Path,
    alone: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
) -> None:
    monkeypatch.syspath_prepend(str(place))
    shutil.copy("algorithm.py", alone / "inside.py")
    assert run_app(["train", "recipe.yaml", f"algorithm={reference}", "overwrite=true"]) == 2
    assert "lies in run_dir=run, which overwrite=true would delete" in capsys.readouterr().err
    assert (alone / "inside.py").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "raise KeyError('mine')",
            "algorithm={file} raised in loss of actor.train: KeyError: 'mine' ({file}:{number})",
        ),
        (
            "return output.logprobs.sum(), Metrics()",
            "actor.train: data-parallel ranks have different metrics; each",
        ),
    ],
)
def test_a_mistake_in_a_method_on_one_rank_ends_the_run_of_all(place: Path, line: str, message: str) -> None:
    start_of_loss = '        """-log p summed over the tokens to learn."""\n'
    on_one = f"        if __import__('os').environ.get('RANK') == '1':\n            {line}\n"
    file = place / "failing.py"
    file.write_text(EXAMPLE.read_text().replace(start_of_loss, start_of_loss + on_one))
    number = file.read_text().splitlines().index(f"            {line}") + 1
    options = ["algorithm=failing.py", "cluster=1x2", "run_dir=failing", "overwrite=true", "data.eval=null"]
    status, error = end(start("train", "recipe.yaml", *options))
    assert status == 2 and error.count("realrl: ") == 1
    assert error.splitlines()[-1].startswith(f"realrl: {message.format(file=file, number=number)}")


STATEFUL = """

class Counting(StatelessAlgorithm):
    def state_dict(self):
        return {"prepared": self._methods["actor.train"].prepared}


class CountedLearning(LearnBest):
    prepared = 0

    def prepare(self, batch, dp_sum):
        self.prepared += 1
        return super().prepare(batch, dp_sum)


LearnBest, StatelessAlgorithm = CountedLearning, Counting
"""


def test_saved_state_is_that_of_the_rank_that_trains_and_samples_show_what_the_description_names(
    place: Path,
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace('sample_keys=("score",)', 'sample_keys=("length",)')
    text = text.replace('Key("score"', 'Key("length", "float32", "one"), Key("score"')
    text = text.replace('("score",), work', '("score", "length"), work')
    length = '"length": Ragged.scalars(output.values.new_tensor(output.lengths))'
    text = text.replace('{"score": Ragged', f'{{{length}, "score": Ragged')
    (place / "stateful.py").write_text(text + STATEFUL, encoding="utf-8")
    (place / "apart.yaml").write_text(APART)
    options = ["algorithm=stateful.py", "cluster=1x2", "run_dir=stateful", "plan=apart.yaml"]
    assert run_app(["train", "recipe.yaml", *options]) == 0
    assert json.loads((place / "stateful" / "final-state.json").read_text()) == {"prepared": 2}
    (first, *_) = (place / "stateful" / "samples" / "step-000002.jsonl").read_text().splitlines()
    sample = json.loads(first)
    assert list(sample) == ["prompt", "completion", "finished", "length"]
    assert sample["length"] > 1


def test_report_has_its_metrics_and_curves_without_its_file(
    place: Path, alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (alone / "code" / "algorithm.py").read_text() == EXAMPLE.read_text()
    monkeypatch.setattr(UserCode, "__init__", None)
    assert run_app(["report", "run", "--out", "report"]) == 0
    report = json.loads((place / "report" / "report.json").read_text())
    evaluations = [line["reward.inference/score"] for line in read_metrics(alone, "eval")]
    assert (report["score_before"], report["score_after"]) == (evaluations[0], evaluations[-1])
    assert set(report["seconds"]) == {"best_of_n", "total"}
    assert (place / "report" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "reward model's score, after" in capsys.readouterr().out
