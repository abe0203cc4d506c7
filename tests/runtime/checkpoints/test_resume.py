"""Runs that go on from a checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer

from realrl.cli.app import run_app
from realrl.runtime.output import lock
from realrl.runtime.processes.environment import RESTART_VARIABLE
from realrl.testing.compare import read_metrics
from tests.conftest import FORMS, PPO_CALLS, World
from tests.runtime.checkpoints.interrupted import interrupt

Weights = dict[str, Any]


def read_models(run_dir: Path) -> Weights:
    """All tensors of the models that a run has saved at its end."""
    tensors = {}
    for directory in sorted(run_dir.glob("final*")):
        for file in directory.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                tensors |= {f"{directory.name}/{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without how fast steps were."""
    read = read_metrics(run_dir)
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read]


def write_recipe(world: World, algorithm: str, directory: Path, **changes: Any) -> Path:
    """A recipe of 5 steps with evaluations and a checkpoint after every step."""
    directory.mkdir(exist_ok=True)
    records = world.root / f"{FORMS.get(algorithm, 'ppo')}.jsonl"
    more = {
        "data__eval": str(records),
        "evaluation__every": 2,
        "checkpoint__every": 1,
        "checkpoint__keep": 10,
    }
    return world.recipe(algorithm, directory, **{**more, **changes})


PPO = {
    "ppo__value_norm": "running",
    "ppo__kl": {"adaptive": True, "target": 0.01, "horizon": 100},
    "ppo__ref_ema": 0.5,
}


def write_sharded_plan(directory: Path, actor: int, critic: int) -> str:
    """A plan of 3 devices, which cut matrices into uneven rows, for PPO under stages of ZeRO; all is offloaded."""
    calls = {name: {"mesh": "0-2", "dp": 3, "zero": 3} for name in PPO_CALLS}
    calls |= {"actor.generate": {"mesh": "0-1", "dp": 1, "tp": 2}}
    for call, stage in (("actor.train", actor), ("critic.train", critic)):
        calls[call] = {"mesh": "0-2", "dp": 3, "zero": stage}
    trained = ["actor", "critic"]
    document = {"cluster": "1x3", "calls": calls, "offload": [*trained, "ref"], "offload_optimizer": trained}
    file = directory / "sharded.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.mark.parametrize(
    ("algorithm", "changes", "zero"),
    [
        ("sft", {"models__actor__dtype": "bfloat16"}, None),
        ("reward", {"models__reward__trainable_layers": 1}, None),
        ("ppo", PPO, None),
        ("dapo", {"policy__ref_every": 2, "policy__kl": {"coef": 0.05}}, None),
        ("ppo", {**PPO, "models__critic__dtype": "bfloat16"}, (2, 3)),
        pytest.param(
            "ppo", {**PPO, "models__critic__dtype": "bfloat16"}, (3, 2), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["sft", "reward", "ppo", "dapo", "ppo, zero 2 and 3", "ppo, zero 3 and 2"],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any], zero: tuple[int, int] | None
) -> None:
    """`zero`: stages of the training of actor and critic on several processes; None for one process."""
    if zero is not None:
        changes = {**changes, "cluster": "1x3", "plan": write_sharded_plan(tmp_path, *zero)}
    recipe = write_recipe(world, algorithm, tmp_path / "whole", **changes)
    assert run_app(["train", str(recipe)]) == 0
    whole = tmp_path / "whole" / "run"
    resumed = interrupt(whole, 2, tmp_path)
    assert run_app(["train", str(recipe), f"run_dir={resumed}"]) == 0
    expected, found = read_models(whole), read_models(resumed)
    assert expected.keys() == found.keys() and all(expected[name].equal(found[name]) for name in expected)
    assert lines(resumed) == lines(whole)
    assert (resumed / "summary.json").is_file()


def test_a_run_of_another_recipe_is_not_continued(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(world, "sft", tmp_path / "whole", data__eval=None, evaluation__every=None)
    assert run_app(["train", str(recipe), "training.steps=2"]) == 0
    run_dir = tmp_path / "whole" / "run"
    before = lines(run_dir)
    for changes, status, message in (
        (["training.steps=2"], 0, "run: this run is already finished"),
        (["training.steps=2", "resume=never"], 2, "holds an earlier run, and resume=never"),
        (["training.steps=2", "seed=2"], 2, "holds a run of another recipe (seed: 1, now 2)"),
        (["training.steps=1"], 2, "is at step 2, and this recipe has 1; raise training.steps"),
    ):
        assert run_app(["train", str(recipe), *changes]) == status
        assert message in capsys.readouterr().err
        assert lines(run_dir) == before
    longer = ["training.steps=3", "models.actor.optimizer.lr=0.002", "resume=changed"]
    assert run_app(["train", str(run_dir), *longer]) == 0
    said = capsys.readouterr().err
    assert "changed since: models.actor.optimizer.lr: 0.001, now 0.002" in said
    schedule = "models.actor: the learning rate now follows the cosine schedule of the new length"
    assert schedule in said
    assert run_app(["train", str(run_dir), "training.epochs=3"]) == 0
    said = capsys.readouterr().err
    assert "training.epochs=3 has no effect beside training.steps=3" in said and schedule not in said
    assert [line["step"] for line in lines(run_dir)] == [1, 2, 3] and lines(run_dir)[:2] == before
    # Leave to change settings is not a setting of the run, which the next start would inherit.
    assert run_app(["train", str(run_dir), "training.steps=4", "seed=2"]) == 2
    assert "another recipe (seed: 1, now 2)" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_continued(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe has relative paths, and lacks the settings that have come since."""
    recipe = write_recipe(world, "sft", tmp_path, data__eval=None, evaluation__every=None)
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    written = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(written.read_text())
    settings["data"]["train"] = os.path.relpath(settings["data"]["train"], tmp_path)
    del settings["data"]["train_on"]
    written.write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    assert run_app(["train", str(recipe), "training.steps=2"]) == 0
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]


def test_training_data_that_have_changed_are_noticed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    records = (world.root / "sft.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(records))
    recipe = write_recipe(
        world, "sft", tmp_path, data__train=str(data), data__eval=None, evaluation__every=None
    )
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    for changed, how in (
        ([*records, records[0]], f"{len(records)} items, now {len(records) + 1}"),
        (records[::-1], "with other contents"),
    ):
        data.write_text("".join(changed))
        assert run_app(["train", str(recipe), "training.steps=2"]) == 2
        error = capsys.readouterr().err
        assert f"data.train has changed since {tmp_path / 'run'} was trained ({how})" in error
        assert "set resume=changed" in error
    assert run_app(["train", str(recipe), "training.steps=2", "resume=changed"]) == 0
    assert "note: data.train has changed" in capsys.readouterr().err
    # Nobody is there to be asked when a run is started again by itself.
    data.write_text("".join(records[1:]))
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    assert run_app(["train", str(recipe), "training.steps=3"]) == 0
    assert "note: data.train has changed" in capsys.readouterr().err


def test_a_directory_in_use_is_left_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)
    recipe = write_recipe(world, "sft", tmp_path, data__eval=None, evaluation__every=None)
    run_dir = tmp_path / "run"
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    capsys.readouterr()
    with lock.RunLock(str(run_dir)) as held:
        held.take()
        files = {file: file.stat().st_mtime_ns for file in run_dir.rglob("*")}
        for changes in (["training.steps=2"], ["overwrite=true"], ["overwrite=true", "cluster=1x2"]):
            assert run_app(["train", str(recipe), *changes]) == 2
            error = capsys.readouterr().err
            assert f"run_dir={run_dir} is in use: process {os.getpid()} on " in error
        assert {file: file.stat().st_mtime_ns for file in run_dir.rglob("*")} == files
    assert run_app(["train", str(recipe), "training.steps=2"]) == 0


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_used(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(world, "sft", tmp_path / "whole", data__eval=None, evaluation__every=None)
    assert run_app(["train", str(recipe)]) == 0
    resumed = interrupt(tmp_path / "whole" / "run", 3, tmp_path)
    file = resumed / "checkpoints" / "step-000003" / "rank-00000.bin"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert run_app(["train", str(recipe), f"run_dir={resumed}"]) == 0
    error = capsys.readouterr().err
    assert f"put aside: {file} is damaged: the checksum of " in error and "continues after step 2" in error
    aside = resumed / "checkpoints" / "unused-step-000003"
    assert (aside / file.name).read_bytes() == damaged
    expected, found = read_models(tmp_path / "whole" / "run"), read_models(resumed)
    assert all(expected[name].equal(found[name]) for name in expected)


def test_a_run_goes_on_from_any_directory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the recipe names everything relative to the directory where the run began."""
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir()
    elsewhere.mkdir()
    shutil.copytree(world.actor, begun / "model")
    shutil.copy(world.root / "ppo.jsonl", begun / "q.jsonl")
    (begun / "code.py").write_text(
        "def score(completions):\n    return [len(text) for text in completions]\n"
    )
    plan = {
        "cluster": "1x1",
        "calls": {
            "reward.function": {"mesh": "0", "dp": 1},
            **{call: {"mesh": "0", "dp": 1} for call in ("actor.generate", "actor.train")},
        },
    }
    (begun / "plan.yaml").write_text(yaml.safe_dump(plan))
    (begun / "cluster.yaml").write_text("groups: [{device: cpu, nodes: 1, devices_per_node: 1}]\n")
    changes: dict[str, Any] = {
        "models": {"actor": {"path": "model", "tokenizer": "./model", "optimizer": {"lr": 1e-3}}},
        "reward": "code.py:score",
        "evaluation__judge": "code.py:score",
        "evaluation__against": "model",
        "data__train": ["q.jsonl"],
        "data__eval": {"*.jsonl": 1},
        "plan": "plan.yaml",
        "cluster": "cluster.yaml",
        "policy__kl": {"coef": 0.0},
        "training": {"steps": 1},
        "run_dir": "run",
    }
    world.recipe("grpo", begun, **changes)
    monkeypatch.chdir(begun)
    assert run_app(["train", "recipe.yaml"]) == 0
    monkeypatch.chdir(elsewhere)
    assert run_app(["train", str(begun / "run"), "training.steps=2"]) == 0
    assert [line["step"] for line in lines(begun / "run") if line["kind"] == "train"] == [1, 2]
    assert not list(elsewhere.iterdir())


def test_a_change_of_what_scores_is_noticed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = tmp_path / "rewards.py", tmp_path / "data.jsonl"
    function = "def score(completions, answer): return [float(a in t) for t, a in zip(completions, answer)]\n"
    code.write_text(function)
    prompts = [json.loads(line)["prompt"] for line in (world.root / "ppo.jsonl").read_text().splitlines()]

    def write(answer: str) -> None:
        data.write_text("".join(json.dumps({"prompt": p, "answer": answer}) + "\n" for p in prompts))

    write("a")
    recipe = write_recipe(
        world,
        "grpo",
        tmp_path,
        reward=f"{code}:score",
        models__reward=None,
        data__train=str(data),
        data__eval=None,
        evaluation__every=None,
    )
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    run = tmp_path / "run"
    code.write_text(function + "# another version\n")
    for changed in (f"reward.function, {code}", "field 'answer' of data.train"):
        assert run_app(["train", str(recipe), "training.steps=2"]) == 2
        error = capsys.readouterr().err
        assert f"scoring has changed since {run} was trained ({changed}), so the run would continue" in error
        assert "set resume=changed" in error
        code.write_text(function)
        write("b")
    assert run_app(["train", str(recipe), "training.steps=2", "resume=changed"]) == 0
    assert "note: scoring has changed" in capsys.readouterr().err
    assert run_app(["train", str(recipe), "training.steps=3"]) == 0
    assert "scoring has" not in capsys.readouterr().err


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_chat_template_that_has_changed_is_named_and_that_of_the_recipe_is_saved(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(world.tokenizer, tokenizer)
    turns = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "is great"}]
    data, template = tmp_path / "data.jsonl", tmp_path / "template.jinja"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 16)
    template.write_text(TEMPLATE)
    more = {"data__train": str(data), "data__eval": None, "evaluation__every": None}
    recipe = write_recipe(world, "sft", tmp_path, models__actor__tokenizer=str(tokenizer), **more)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE.replace(": ", " says "))
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE.replace(": ", " writes "))
    assert run_app(["train", str(recipe), "training.steps=2"]) == 2
    error = capsys.readouterr().err
    assert "the chat template (the tokenizer's, data.chat_template or its kwargs) has changed since" in error
    assert (
        run_app(["train", str(recipe), f"data.chat_template={template}", f"run_dir={tmp_path / 'own'}"]) == 0
    )
    template.unlink()  # a run keeps the text
    assert run_app(["train", str(tmp_path / "own"), "training.steps=6"]) == 0
    saved = AutoTokenizer.from_pretrained(str(tmp_path / "own" / "final"))
    assert saved.chat_template == TEMPLATE
    assert run_app(["train", str(recipe), f"data.chat_template={template}"]) == 2
    assert f"{template} cannot be read as a chat template" in capsys.readouterr().err
