"""An algorithm of the user's own, in one file that a recipe names: every command works with it."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.preference import PreferenceConfig
from realrl.algorithms.preference_loss import compute_preference_loss
from realrl.cli.app import run_app
from realrl.config.user_code import UserCode
from realrl.data.batch import Batch, Ragged
from realrl.plan.cluster import Cluster
from realrl.planner.workload.workload import Workload
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.job import make_job
from realrl.runtime.profiler.sizes import Sizes
from realrl.testing.records import write_sentence
from tests.conftest import World, read_metrics, write_jsonl
from tests.runtime.conftest import Command

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "online_dpo.py"
METRICS = ("loss", "better_score", "score", "margin", "ties", "grad_norm", "response_tokens")
DISJOINT = """
cluster: 1x2
calls:
  actor.generate: {mesh: 0-1, dp: 1, tp: 2}
  actor.generate_other: {mesh: 1, dp: 1}
  reward.inference: {mesh: 1, dp: 1, micro_batch_tokens: 60}
  reward.inference_other: {mesh: 0, dp: 1}
  ref.inference: {mesh: 0-1, dp: 2}
  actor.train: {mesh: 0-1, dp: 1, pp: 2, micro_batch_tokens: 90}
"""
APART = """
cluster: 1x2
calls:
  actor.generate: {mesh: 1, dp: 1, micro_batch_tokens: 60}
  actor.generate_other: {mesh: 1, dp: 1, micro_batch_tokens: 60}
  reward.inference: {mesh: 0, dp: 1, micro_batch_tokens: 60}
  reward.inference_other: {mesh: 0, dp: 1, micro_batch_tokens: 60}
  ref.inference: {mesh: 0, dp: 1, micro_batch_tokens: 60}
  actor.train: {mesh: 1, dp: 1, micro_batch_tokens: 90}
"""
"""The rank that writes does not train."""


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: `algorithm.py`, and `recipe.yaml` that names it."""
    directory = tmp_path_factory.mktemp("own")
    shutil.copy(EXAMPLE, directory / "algorithm.py")
    (directory / "disjoint.yaml").write_text(DISJOINT)
    write_jsonl(directory / "eval.jsonl", [{"prompt": write_sentence(i, "good")} for i in range(10)])
    recipe: dict[str, Any] = {
        "algorithm": "algorithm.py",
        "run_dir": "run",
        "cluster": "1x1",
        "device": "cpu",
        "micro_batch_tokens": 128,
        "models": {
            "actor": {"path": world.actor, "optimizer": {"lr": 1e-3, "eps": 1e-5}},
            "reward": {"path": world.reward},
        },
        "data": {"train": f"{world.root}/ppo.jsonl", "eval": "eval.jsonl", "batch": 6},
        "online_dpo": {"beta": 0.5, "minibatches": 2},
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
    assert not [file for file in sources if "online_dpo" in file.read_text(encoding="utf-8")]


def test_config_documents_its_recipes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["config", "algorithm.py"]) == 0
    printed = capsys.readouterr().out
    described = yaml.safe_load(printed)
    assert described["algorithm"] == "algorithm.py"
    assert described["online_dpo"] == {"beta": 0.1, "minibatches": 1}
    assert "# Scale of implicit rewards" in printed


def test_show_has_its_recipe_graph_and_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["show", "recipe.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"algorithm: {place / 'algorithm.py'}" in printed
    assert "actor.train  (train in 2 mini-batches, role actor)" in printed


def test_calls_may_have_any_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("actor.train", "update")
    (place / "renamed.py").write_text(text, encoding="utf-8")
    assert run_app(["show", "recipe.yaml", "algorithm=renamed.py"]) == 0
    printed = capsys.readouterr().out
    assert "update  (train in 2 mini-batches" in printed
    assert re.search(r"^0 .* update d1 t1 p1$", printed, re.MULTILINE)


def test_plan_for_64_devices_has_both_generate_calls(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("path=null", "shape=llama-2-7b")
    shapes = [f"models.{role}.{field}" for role in ("actor", "reward") for field in size]
    batch = ["data.batch=64", "data.max_tokens=256", "data.max_prompt_tokens=128"]
    options = ["--cluster", "h100:8x8", "--effort", "20000", "--json"]
    assert run_app(["plan", "recipe.yaml", *shapes, *batch, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["workload"]["items"], found["workload"]["samples_per_prompt"]) == (64, 1)
    assert {"actor.generate", "actor.generate_other"} <= set(found["calls"]) and found["fits"]


def test_plans_count_no_preparation_that_is_not_its_own(place: Path) -> None:
    experiment = load_experiment("recipe.yaml")
    assert Workload.of(experiment).work(build_graph(experiment).call("actor.train")).episode == 0


def test_batches_count_prompts_and_devices_share_out_their_samples(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("grpo", tmp_path, data__batch=6, policy__samples=3)
    experiment = load_experiment(str(recipe))
    assert Sizes.of(experiment).rows == 18
    make_job(experiment, Cluster(1, 8))  # 9 items in each mini-batch
    with pytest.raises(ValueError, match=r"data\.batch=6, each sampled 3 times, in 2 mini-batches"):
        make_job(experiment, Cluster(2, 8))


def test_it_learns_the_same_where_every_call_has_a_mesh_of_its_own(place: Path, alone: Path) -> None:
    options = ["plan=disjoint.yaml", "run_dir=disjoint"]
    assert run_app(["train", "recipe.yaml", "cluster=1x2", *options]) == 0
    for kind in ("train", "eval"):
        for ours, reference in zip(
            read_metrics(place / "disjoint", kind), read_metrics(alone, kind), strict=True
        ):
            names = [name for name in reference if name.endswith(METRICS)]
            assert ours.keys() == reference.keys() and names
            found, expected = ({name: of[name] for name in names} for of in (ours, reference))
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_two_generate_calls_draw_different_answers(alone: Path) -> None:
    for step in read_metrics(alone):
        assert step["actor.train/better_score"] > step["actor.train/score"] and step["actor.train/ties"] < 1


def test_pairs_have_the_loss_of_dpo() -> None:
    first, other = torch.tensor([-5.0, -3.0]), torch.tensor([-6.0, -7.0])
    scores = {"score": torch.tensor([1.0, 0.0]), "other_score": torch.tensor([0.0, 2.0])}
    rows = {"sequences": Ragged.of([[1, 2], [3, 4]]), "prompt_length": Ragged.of([[1], [1]])}
    fields = {f"{side}{key}": of for side in ("", "other_") for key, of in rows.items()}
    fields |= {key: Ragged.scalars(of) for key, of in scores.items()}
    fields |= {key: Ragged.scalars(torch.full((2,), -4.0)) for key in ("ref_logps", "other_ref_logps")}
    method = UserCode("algorithm", str(EXAMPLE)).module.LearnPairs(beta=0.3)
    batch, _ = method.prepare(Batch((0, 1), fields), lambda total: total)
    tokens = torch.stack((torch.zeros(2), first, torch.zeros(2), other), 1).flatten()
    loss, _ = method.loss(batch, ModelOutput((2,) * 4, logprobs=tokens))
    expected = compute_preference_loss(
        PreferenceConfig(beta=0.3),
        chosen=torch.stack((first[0], other[1])) + 4,
        rejected=torch.stack((other[0], first[1])) + 4,
    )
    assert float(loss) == pytest.approx(float(expected.sum()))


def test_a_misspelt_headline_is_noted_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace('"actor.train/better_score",', '"actor.train/bettor_score",')
    (place / "misspelt.py").write_text(text)
    options = ["algorithm=misspelt.py", "run_dir=misspelt", "training.steps=2"]
    assert run_app(["train", "recipe.yaml", *options]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "has given a metric" in line]
    assert notes == [
        "note: algorithm online_dpo: headlines: no call has given a metric actor.train/bettor_score;"
        " did you mean actor.train/better_score?"
    ]


def test_a_saved_recipe_loads_from_anywhere(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(str(alone / "config.yaml"))
    assert experiment.algorithm == str(alone.parent / "algorithm.py")
    assert experiment.spec.name == "online_dpo"


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
            "actor.train: ranks with different items have different metrics; each",
        ),
    ],
)
def test_a_mistake_in_a_method_on_one_rank_ends_the_run_of_all(
    realrl: Command, place: Path, line: str, message: str
) -> None:
    start_of_loss = "        ref_first, ref_other = (batch[key].values"
    on_one = f"        if __import__('os').environ.get('RANK') == '1':\n            {line}\n"
    file = place / "failing.py"
    file.write_text(EXAMPLE.read_text().replace(start_of_loss, on_one + start_of_loss))
    number = file.read_text().splitlines().index(f"            {line}") + 1
    options = ["algorithm=failing.py", "cluster=1x2", "run_dir=failing", "overwrite=true", "data.eval=null"]
    status, error = realrl("train", "recipe.yaml", *options)
    assert status == 2 and error.count("realrl: ") == 1
    assert error.splitlines()[-1].startswith(f"realrl: {message.format(file=file, number=number)}")


STATEFUL = """

class Counting(StatelessAlgorithm):
    def state_dict(self):
        return {"prepared": self._methods["actor.train"].prepared}


class CountedLearning(LearnPairs):
    prepared = 0

    def prepare(self, batch, dp_sum):
        self.prepared += 1
        return super().prepare(batch, dp_sum)


LearnPairs, StatelessAlgorithm = CountedLearning, Counting
"""


def test_saved_state_is_that_of_the_rank_that_trains_and_samples_show_what_the_description_names(
    place: Path,
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace(
        'sample_keys=("score",)', 'sample_keys=("prompt_length",)'
    )
    (place / "stateful.py").write_text(text + STATEFUL, encoding="utf-8")
    (place / "apart.yaml").write_text(APART)
    options = ["algorithm=stateful.py", "cluster=1x2", "run_dir=stateful", "plan=apart.yaml"]
    assert run_app(["train", "recipe.yaml", *options]) == 0
    saved = json.loads((place / "stateful" / "final-state.json").read_text())
    assert saved["state"] == {"prepared": 2}
    (first, *_) = (place / "stateful" / "samples" / "step-000002.jsonl").read_text().splitlines()
    sample = json.loads(first)
    assert list(sample) == ["prompt", "completion", "finished", "prompt_length"]
    assert sample["prompt_length"] >= 1


def test_report_has_its_metrics_and_curves_without_its_file(
    place: Path, alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (alone / "code" / "algorithm.py").read_text() == EXAMPLE.read_text()
    monkeypatch.setattr(UserCode, "__init__", None)
    assert run_app(["report", "run", "--out", "report"]) == 0
    report = json.loads((place / "report" / "report.json").read_text())
    evaluations = [line["reward.inference/score"] for line in read_metrics(alone, "eval")]
    assert (report["score_before"], report["score_after"]) == (evaluations[0], evaluations[-1])
    assert set(report["seconds"]) == {"online_dpo", "total"}
    assert (place / "report" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "reward's score, after" in capsys.readouterr().out
