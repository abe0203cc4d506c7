"""A user's mistake is one sentence and exit status 2, in one process and in several, and costs nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.huggingface.tokenizers import save_tokenizer, train_bpe
from realrl.testing.records import write_sentence
from tests.conftest import World
from tests.runtime.processes import end, start

Fields = dict[str, object]


def truncated(world: World, directory: Path) -> str:
    """A copy of the actor whose last bytes are lost."""
    shutil.copytree(world.actor, directory / "broken")
    file = directory / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return str(directory / "broken")


def larger_tokenizer(world: World, directory: Path) -> str:
    texts = [write_sentence(i, mood) for i in range(40) for mood in ("good", "bad")]
    save_tokenizer(train_bpe(texts, 340), directory / "larger")
    return str(directory / "larger")


def data(directory: Path, text: str) -> str:
    (directory / "data.jsonl").write_text(text)
    return str(directory / "data.jsonl")


Case = tuple[str, Callable[[World, Path], Fields], str]
"""Algorithm, fields of the recipe that are wrong, and what the sentence says; DIR is the test's directory."""

CASES: dict[str, Case] = {
    "misspelt key": (
        "sft",
        lambda w, d: {"data__btach": 3},
        "data.btach: unknown key; did you mean data.batch?",
    ),
    "wrong type": ("sft", lambda w, d: {"data__batch": True}, "data.batch: true is not a whole number"),
    "no model": (
        "ppo",
        lambda w, d: {"models__reward__path": "/nowhere/model"},
        "models.reward.path=/nowhere/model: no such directory",
    ),
    "no tokenizer": (
        "sft",
        lambda w, d: {"models__actor__tokenizer": "./nowhere"},
        "models.actor.tokenizer=./nowhere: no such directory",
    ),
    "sequences too long": (
        "sft",
        lambda w, d: {"data__max_tokens": 2049},
        "data.max_tokens=2049 is more than the 2048 positions that the model of models.actor is declared for",
    ),
    "answers too long": (
        "ppo",
        lambda w, d: {"data__max_tokens": 4096, "generation__max_new_tokens": 2000},
        "data.max_prompt_tokens + generation.max_new_tokens=2512 is more than the 2048 positions",
    ),
    "a classifier that is to write": (
        "ppo",
        lambda w, d: {"models__actor": {"path": w.reward}},
        "is a sequence classifier, not a language model",
    ),
    "truncated safetensors": (
        "ppo",
        lambda w, d: {"models__ref": {"path": truncated(w, d)}},
        "DIR/broken/model.safetensors: not a complete safetensors file",
    ),
    "vocabulary mismatch": (
        "ppo",
        lambda w, d: {"models__actor__tokenizer": larger_tokenizer(w, d)},
        "models.actor: the tokenizer DIR/larger has 340 tokens, but the model's vocabulary has 320;"
        " models.actor.vocab_size=340 grows it",
    ),
    "empty data set": (
        "reward",
        lambda w, d: {"data__train": data(d, "\n")},
        "no usable records in DIR/data.jsonl: it is empty",
    ),
    "malformed line": (
        "sft",
        lambda w, d: {"data__train": data(d, '{"prompt": "", "answer": "a"}\n' * 20 + '{"prompt": "\n')},
        "DIR/data.jsonl:21: not valid JSON",
    ),
    "prompt too long": (
        "ppo",
        lambda w, d: {"data__max_prompt_tokens": 2},
        "tokens, more than data.max_prompt_tokens=2",
    ),
    "batch not divisible": (
        "ppo",
        lambda w, d: {"data__batch": 15},
        "data.batch=15 is not divisible by the 2 mini-batches of actor.train",
    ),
    "unknown plan": (
        "ppo",
        lambda w, d: {"plan": "symetric"},
        "nor a .yaml file; did you mean symmetric?",
    ),
}


def earlier_run(directory: Path) -> None:
    """A run that the recipe says may be overwritten; for a bad recipe it must not be."""
    (directory / "run" / "programs").mkdir(parents=True)
    for name in ("config.yaml", "plan.yaml", "weights"):
        (directory / "run" / name).write_text("precious")


def recipe(world: World, directory: Path, case: str, **more: object) -> tuple[str, str]:
    """The path of a bad recipe, and the sentence it deserves."""
    algorithm, fields, words = CASES[case]
    changes = {"overwrite": True, **fields(world, directory), **more}
    return str(world.recipe(algorithm, directory, **changes)), words.replace("DIR", str(directory))


def assert_nothing_lost(directory: Path) -> None:
    files = {file.name: file.read_text() for file in (directory / "run").rglob("*") if file.is_file()}
    files.pop("lock", None)
    assert files == dict.fromkeys(("config.yaml", "plan.yaml", "weights"), "precious")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_error_message_and_keeps_an_earlier_run(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    file, words = recipe(world, tmp_path, case)
    earlier_run(tmp_path)
    assert run_app(["train", file]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1
    assert words in captured.err and captured.out == ""
    assert_nothing_lost(tmp_path)


@pytest.mark.parametrize("case", ["wrong type", "malformed line"])
def test_several_processes_print_a_mistake_once(world: World, tmp_path: Path, case: str) -> None:
    file, words = recipe(world, tmp_path, case, cluster="1x2")
    earlier_run(tmp_path)
    status, error = end(start("train", file))
    assert (status, error.count("\n")) == (2, 1) and error.startswith("realrl: ") and words in error
    assert_nothing_lost(tmp_path)


@pytest.mark.exhaustive
def test_a_mistake_found_by_one_rank_ends_all_ranks(world: World, tmp_path: Path) -> None:
    """Only rank 1 reads the reference, and only rank 0 opens the run's directory."""
    calls = {"actor.generate": 0, "reward.inference": 0, "ref.inference": 1, "critic.inference": 0}
    calls |= {"actor.train": 0, "critic.train": 0}
    meshes = "".join(f"  {name}: {{mesh: {rank}, dp: 1}}\n" for name, rank in calls.items())
    (tmp_path / "plan.yaml").write_text(f"cluster: 1x2\ncalls:\n{meshes}")
    plan = str(tmp_path / "plan.yaml")
    file, words = recipe(world, tmp_path, "truncated safetensors", cluster="1x2", plan=plan)
    earlier_run(tmp_path)
    status, error = end(start("train", file))
    assert (status, error.count("\n")) == (2, 1) and error.startswith("realrl: ") and words in error
    assert_nothing_lost(tmp_path)


@pytest.mark.parametrize("under_launcher", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("run_dir", "/proc/nowhere", "run_dir=/proc/nowhere cannot be written"),
        ("profile", "/nowhere/profile.json", "profile /nowhere/profile.json: no such file"),
    ],
)
def test_settings_are_checked_before_data_is_read(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    under_launcher: bool,
    field: str,
    value: str,
    words: str,
) -> None:
    if under_launcher:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    file = world.recipe("sft", tmp_path, data__train=str(tmp_path / "nowhere.jsonl"), **{field: value})
    assert run_app(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_run_directory_that_cannot_be_written_is_one_error_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    file = world.recipe("sft", tmp_path, run_dir=str(tmp_path / "file" / "run"))
    assert run_app(["train", str(file)]) == 2
    assert f"run_dir={tmp_path / 'file' / 'run'} cannot be written" in capsys.readouterr().err
