"""`~` is the home wherever a recipe, or a command line, names a file or a directory."""

import shutil
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from realrl.cli.app import run_app
from realrl.config.files import write_whole
from realrl.config.paths import make_absolute
from realrl.config.user_code import UserFunction
from realrl.config.yaml_file import dump_yaml
from realrl.recipe.load import load_experiment
from realrl.recipe.sources import SourceList, make_source_absolute
from tests.config.minimal import least
from tests.conftest import World

CLUSTER = "groups: [{device: cpu, nodes: 1, devices_per_node: 1}]\n"


@pytest.fixture
def home(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a recipe and all that it may read; the working directory is another one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    world.recipe("sft", home)
    shutil.copy(world.root / "sft.jsonl", home / "records.jsonl")
    write_whole(home / "cluster.yaml", CLUSTER)
    write_whole(home / "judge.py", "def rate(texts):\n    return [1.0] * len(texts)\n")
    write_whole(home / "prompts.txt", "the film\n")
    write_whole(home / "lengths.json", '{"prompts": [3]}')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    return home


def test_a_recipe_may_name_files_of_the_home(home: Path) -> None:
    fields = [
        "data.train=~/records.jsonl",
        "data.eval=~/rec*.jsonl",
        "training.steps=1",
        "run_dir=~/runs/new",
    ]
    assert run_app(["train", "~/recipe.yaml", *fields]) == 0
    assert (home / "runs" / "new" / "summary.json").is_file()


def test_a_judge_may_be_a_file_of_the_home(home: Path) -> None:
    assert UserFunction("evaluation.judge", "~/judge.py:rate").numbers(1, ["a"]) == [1.0]


def test_plans_clusters_lengths_and_profiles_may_be_files_of_the_home(home: Path) -> None:
    plan = [
        "plan",
        "~/recipe.yaml",
        "cluster=~/cluster.yaml",
        "--effort",
        "50000",
        "--lengths",
        "~/lengths.json",
    ]
    assert run_app([*plan, "--out", "~/plan.yaml", "--html", "~/page.html", "--trace", "~/trace.json"]) == 0
    assert all((home / name).is_file() for name in ("plan.yaml", "page.html", "trace.json"))
    assert run_app(["show", "~/recipe.yaml", "plan=~/plan.yaml"]) == 0


@pytest.mark.parametrize("fields", [["--profile", "~/file.json"], ["profile=~/file.json"]])
def test_a_profile_may_be_a_file_of_the_home(
    home: Path, capsys: pytest.CaptureFixture[str], fields: list[str]
) -> None:
    write_whole(home / "file.json", "{}")
    assert run_app(["plan", "~/recipe.yaml", *fields]) == 2
    assert "this is no file that `realrl profile` has written" in capsys.readouterr().err


def test_commands_read_and_write_files_of_the_home(home: Path, world: World) -> None:
    assert run_app(["tokenizer", "~/records.jsonl", "--out", "~/tokens", "--vocab-size", "300"]) == 0
    assert (home / "tokens").is_dir()
    options = ["--max-new-tokens", "2", "--prompts", "~/prompts.txt", "--out", "~/said.jsonl"]
    assert run_app(["generate", world.actor, *options]) == 0
    assert (home / "said.jsonl").is_file()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["report", "~/folder", "--out", "~/report"], "algorithm.json is missing"),
        (["plan", "--calibrate", "~/folder"], "costs.json has version"),
        (["profile", "~/recipe.yaml", "--out", "~/folder"], "this is a directory; name a file in it"),
    ],
)
def test_commands_look_for_runs_and_files_in_the_home(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    (home / "folder").mkdir()
    write_whole(home / "folder" / "config.yaml", "algorithm: sft\n")
    write_whole(home / "folder" / "costs.json", "{}")
    assert run_app(command) == 2
    assert words in capsys.readouterr().err


def test_paths_that_exist_become_absolute_and_other_names_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "saved").mkdir()
    for given, expected in (
        ("records.jsonl", f"{home}/records.jsonl"),
        ("../home/*.jsonl", f"{home}/*.jsonl"),
        ("saved:train", f"{home}/saved:train"),
        ("saved:train[:2]", f"{home}/saved:train[:2]"),
        ("~/saved", f"{home}/saved"),
        ("openai/gsm8k/main:train", "openai/gsm8k/main:train"),
        ("openai/gsm8k:train[:10%]", "openai/gsm8k:train[:10%]"),
        ("missing.jsonl", "missing.jsonl"),
    ):
        assert make_source_absolute(given) == expected
    assert make_absolute("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_one_file_written_in_two_ways_is_one_source(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(ValueError, match=r"records\.jsonl.* is listed twice"):
        TypeAdapter(SourceList).validate_python({"records.jsonl": 1, "./records.jsonl": 2})


def test_code_is_found_in_the_folder_of_the_recipe_unless_the_current_directory_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    for folder in (recipes, here):
        folder.mkdir()
    (recipes / "reward.py").write_text("def score(completions): return [1.0] * len(completions)\n")
    settings = least("grpo") | {"reward": "reward.py:score"}
    (recipes / "recipe.yaml").write_text(dump_yaml(settings))
    monkeypatch.chdir(here)

    def found() -> str | None:
        experiment = load_experiment(str(recipes / "recipe.yaml"))
        return experiment.reward["reward"].function

    assert found() == f"{recipes}/reward.py:score"
    (here / "reward.py").write_text((recipes / "reward.py").read_text())
    assert found() == f"{here}/reward.py:score"
