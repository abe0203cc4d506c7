"""Numbers that are not finite are said, counted, kept, and end a run that no longer learns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realrl.algorithms.rewards.reward_methods import RewardInference
from realrl.algorithms.sft_loss import SFTMethod
from realrl.cli.app import run_app
from realrl.config.errors import RunError
from realrl.data.batch import Ragged
from realrl.recipe.load import load_experiment
from realrl.runtime.train import train
from realrl.testing.ranks import Silent
from tests.conftest import PPO_CALLS, World, read_metrics
from tests.runtime.conftest import Command


class Listener(Silent):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(recipe: Path) -> list[str]:
    """What a run in this process has to say."""
    listener = Listener()
    train(load_experiment(str(recipe)), listener)
    return [note for note in listener.notes if "skipped" in note]


def spoil(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[[Any, int], Any]) -> None:
    """Let `change(result, number of the call)` replace what a method gives."""
    whole, calls = getattr(owner, name), []

    def spoiled(*args: Any) -> Any:
        calls.append(None)
        return change(whole(*args), len(calls))

    monkeypatch.setattr(owner, name, spoiled)


def test_a_single_bad_score_skips_only_its_mini_batch(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_score(outputs: dict[str, Ragged], call: int) -> dict[str, Ragged]:
        if call == 2:
            outputs["score"].values[0] = torch.nan
        return outputs

    spoil(monkeypatch, RewardInference, "outputs", one_score)
    recipe = world.recipe(
        "ppo",
        tmp_path,
        micro_batch_tokens=8192,
        ppo={"minibatches": 2, "value_norm": "running", "truncated": "score", "kl": {"adaptive": True}},
    )
    notes = run(recipe)
    assert notes == [
        f"step 2: {call} has skipped 1 optimizer step; not finite: score"
        for call in ("actor.train", "critic.train")
    ]
    lines = read_metrics(tmp_path / "run")
    for call in ("actor.train", "critic.train"):
        assert [line[f"{call}/skipped_steps"] for line in lines] == [0, 1, 0, 0, 0]
        assert lines[1][f"{call}/skipped_for/score"] == 1
        assert all(line[f"{call}/grad_norm"] > 0 for line in lines), "of the steps that were made"
    assert [line["actor.train/score"] is None for line in lines] == [False, True, False, False, False]
    state = json.loads((tmp_path / "run" / "final-state.json").read_text())["state"]
    assert all(value is not None and value == value for value in state.values())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["skipped_steps"] == {"actor.train": 1, "critic.train": 1}


def endless(result: tuple[torch.Tensor, Any], _: int) -> tuple[torch.Tensor, Any]:
    """A loss whose gradient is not finite, though it is itself."""
    loss, metrics = result
    return loss + (loss * 0).sqrt(), metrics


def test_a_run_that_no_longer_learns_stops_and_keeps_the_mini_batch(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, SFTMethod, "loss", endless)
    recipe = world.recipe("sft", tmp_path, training={"steps": 50, "max_skipped": 3})
    with pytest.raises(RunError) as error:
        run(recipe)
    directory = tmp_path / "run"
    assert str(error.value) == (
        "actor.train, step 3: 3 optimizer steps in a row were skipped because numbers are not finite, first of all"
        f" the gradient of model.embed_tokens.weight; the last mini-batch is kept in {directory / 'minibatches'}"
    )
    assert len(read_metrics(directory)) == 2, "the steps before it"
    assert not (directory / "final").exists() and not (directory / "summary.json").exists()
    kept = load_file(directory / "minibatches" / "step-000003-actor.train-rank-0.safetensors")
    assert len(kept["ids"]) == 16 and kept["tokens.lengths"].sum() == len(kept["tokens"])


def test_a_finite_step_resets_the_count_of_skipped_steps(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_of_three(result: Any, call: int) -> Any:
        return result if call % 3 == 0 else endless(result, call)

    spoil(monkeypatch, SFTMethod, "loss", two_of_three)
    recipe = world.recipe("sft", tmp_path, micro_batch_tokens=8192, training={"steps": 6, "max_skipped": 3})
    causes = "not finite: the gradient of model.embed_tokens.weight"
    assert run(recipe) == [
        f"step 1: actor.train has skipped 1 optimizer step; {causes}",
        f"step 2: actor.train has skipped 2 optimizer steps so far; {causes}",
        f"step 5: actor.train has skipped 4 optimizer steps so far; {causes}",
    ], "fewer lines the more there are"
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_skips_part_of_every_step_stops(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are never all skipped, since one mini-batch of each step can be learned from."""

    def every_other_score(outputs: dict[str, Ragged], _: int) -> dict[str, Ragged]:
        outputs["score"].values[0] = torch.nan
        return outputs

    spoil(monkeypatch, RewardInference, "outputs", every_other_score)
    ppo = {"minibatches": 2, "truncated": "score"}
    for steps, words in ((20, "skipped in 3 training steps in a row"), (2, "skipped in every training step")):
        directory = tmp_path / str(steps)
        directory.mkdir()
        training = {"steps": steps, "max_skipped": 3}
        recipe = world.recipe("ppo", directory, ppo=ppo, micro_batch_tokens=8192, training=training)
        with pytest.raises(RunError, match=words):
            run(recipe)
        assert not (directory / "run" / "final").exists()


def test_a_run_whose_last_step_cannot_be_learned_from_is_not_done(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, SFTMethod, "loss", lambda result, call: endless(result, call) if call == 2 else result)
    recipe = world.recipe("sft", tmp_path, micro_batch_tokens=8192, training={"steps": 2})
    with pytest.raises(
        RunError, match=r"actor.train, step 2: all optimizer steps of the last training step were skipped"
    ):
        run(recipe)
    assert not (tmp_path / "run" / "final").exists() and not (tmp_path / "run" / "summary.json").exists()


def test_the_first_quantity_in_the_order_of_computation_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score spoils advantages, losses and gradients."""

    def all_scores(outputs: dict[str, Ragged], _: int) -> dict[str, Ragged]:
        outputs["score"].values.fill_(torch.inf)
        return outputs

    spoil(monkeypatch, RewardInference, "outputs", all_scores)
    ppo = {"minibatches": 2, "truncated": "score", "reward_clip": None}
    with pytest.raises(RunError, match=r"-?\.train, step 1: 2 optimizer .* first of all score;"):
        run(world.recipe("ppo", tmp_path, ppo=ppo, training={"steps": 3, "max_skipped": 2}))


@pytest.mark.parametrize("strategy", ["dp: 2", "dp: 1, pp: 2", "dp: 2, zero: 2", "dp: 2, zero: 3"])
def test_several_processes_that_stop_learning_print_one_message(
    realrl: Command, world: World, tmp_path: Path, strategy: str
) -> None:
    """Rewards beyond the range of float32."""
    unsharded = strategy.partition(", zero")[0]
    places = dict.fromkeys(PPO_CALLS, unsharded) | dict.fromkeys(("actor.train", "critic.train"), strategy)
    calls = "".join(f"  {call}: {{mesh: 0-1, {place}}}\n" for call, place in places.items())
    plan = f"cluster: 1x2\ncalls:\n{calls}"
    (tmp_path / "plan.yaml").write_text(plan)
    ppo = {
        "minibatches": 2,
        "truncated": "score",
        "reward_clip": None,
        "reward_scale": 1e30,
        "reward_bias": 1e30,
    }
    training = {"steps": 3, "max_skipped": 2}
    recipe = world.recipe(
        "ppo", tmp_path, ppo=ppo, cluster="1x2", plan=str(tmp_path / "plan.yaml"), training=training
    )
    status, screen = realrl("train", str(recipe))
    assert status == 1
    messages = [line for line in screen.splitlines() if line.startswith("realrl:")]
    assert len(messages) == 1 and screen.rstrip().endswith(messages[0])
    assert "step 1: 2 optimizer steps in a row were skipped" in messages[0]
    assert "Traceback" not in screen
    assert list((tmp_path / "run" / "minibatches").iterdir())
    assert not (tmp_path / "run" / "summary.json").exists()


def test_weights_that_are_not_finite_are_refused_when_they_are_loaded(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world.actor)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(world.actor).save_pretrained(tmp_path / "broken")
    recipe = world.recipe("sft", tmp_path, models={"actor": {"path": str(tmp_path / "broken")}})
    assert run_app(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "model.safetensors" in error and "model.layers.1.mlp.up_proj.weight" in error
    assert not (tmp_path / "run").exists()
