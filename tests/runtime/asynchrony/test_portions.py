"""Steps that hand on their samples in portions learn what other steps learn."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from realrl.algorithms.base.method import Metrics
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call
from realrl.plan.cluster import Cluster
from realrl.program.instructions import Run
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.job import make_job
from realrl.runtime.worker.worker import Worker
from realrl.testing.ranks import run_on_ranks
from tests.conftest import SHAPE, World, read_metrics
from tests.runtime.asynchrony.test_ahead_runs import (
    REWARD,
    TEMPLATE,
    learnt,
    part,
    write_game,
)

ENDS = list(range(0, SHAPE["vocab_size"], 12))
"""Tokens that end an answer, so that answers have different lengths."""


def write(world: World, directory: Path, algorithm: str, portions: int, **changes: Any) -> Path:
    """Write a recipe whose answers have different lengths, and whose steps have one optimizer step."""
    directory.mkdir(parents=True)
    (directory / "reward.py").write_text(REWARD)
    section = algorithm if algorithm in ("distillation", "expert_iteration") else "policy"
    usual = {f"{section}__minibatches": 1, "generation__stop_token_ids": ENDS, "training__steps": 3}
    if algorithm != "distillation":
        usual |= {"reward": f"{directory / 'reward.py'}:score", "models__reward": None}
    return world.recipe(algorithm, directory, asynchrony={"portions": portions}, **usual | changes)


def place(file: Path, size: int, generation: dict[str, Any], others: dict[str, Any]) -> Path:
    """Let a recipe generate in one placement, and run all other calls of models in another one."""
    part(file, size)
    plan = file.with_name("plan.yaml")
    document = yaml.safe_load(plan.read_text())
    for name, placed in document["calls"].items():
        if name == "reward.function":
            placed["mesh"], placed["dp"] = others["mesh"][0], 1
        else:
            of = generation if name == "actor.generate" else others
            # Only calls that train have ZeRO-2.
            document["calls"][name] = (
                of if name == "actor.train" else {**of, "zero": of.get("zero", 1) // 3 * 3 or 1}
            )
    plan.write_text(yaml.safe_dump(document))
    return file


def apart(file: Path) -> Path:
    """Let a recipe generate on its second rank, and do everything else on its first rank."""
    one = {"dp": 1, "tp": 1, "pp": 1}
    return place(file, 2, {"mesh": "1", **one}, {"mesh": "0", **one})


def compare(whole: Path, portions: Path) -> None:
    assert len(learnt(whole)) == len(learnt(portions)) == 3
    for expected, found in zip(learnt(whole), learnt(portions), strict=True):
        assert expected and found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {}),
        ("dr_grpo", {}),
        ("gspo", {"policy__recompute_logprobs": True}),
        ("rloo", {}),
        ("dapo", {"policy__sampling_rounds": 1}),
        ("grpo", {"policy__mask_truncated": True, "policy__ref_ema": 0.5}),
        ("expert_iteration", {}),
        ("distillation", {}),
        ("distillation", {"distillation__top_k": 4}),
    ],
    ids=str,
)
def test_portions_teach_what_the_whole_batch_teaches(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any]
) -> None:
    whole = write(world, tmp_path / "whole", algorithm, 1, **changes)
    portions = apart(write(world, tmp_path / "portions", algorithm, 3, **changes))
    run_on_ranks(1, [whole])
    run_on_ranks(2, [portions])
    compare(whole, portions)


@pytest.mark.parametrize(
    ("generation", "others"),
    [
        ({"mesh": "2-3", "dp": 2, "tp": 1, "pp": 1}, {"mesh": "0-1", "dp": 2, "tp": 1, "pp": 1}),
        ({"mesh": "2-3", "dp": 1, "tp": 2, "pp": 1}, {"mesh": "0-1", "dp": 1, "tp": 2, "pp": 1}),
        ({"mesh": "2-3", "dp": 1, "tp": 1, "pp": 2}, {"mesh": "0-1", "dp": 1, "tp": 1, "pp": 2}),
        ({"mesh": "2-3", "dp": 1, "tp": 1, "pp": 2}, {"mesh": "0-1", "dp": 2, "tp": 1, "pp": 1, "zero": 3}),
        ({"mesh": "2-3", "dp": 2, "tp": 1, "pp": 1}, {"mesh": "0-1", "dp": 2, "tp": 1, "pp": 1, "zero": 2}),
        ({"mesh": "0", "dp": 1, "tp": 1, "pp": 1}, {"mesh": "1-3", "dp": 3, "tp": 1, "pp": 1}),
    ],
    ids=str,
)
def test_portions_work_in_every_layout(
    world: World, tmp_path: Path, generation: dict[str, Any], others: dict[str, Any]
) -> None:
    whole = write(world, tmp_path / "whole", "grpo", 1)
    portions = place(write(world, tmp_path / "portions", "grpo", 8), 4, generation, others)
    run_on_ranks(1, [whole])
    run_on_ranks(4, [portions])
    compare(whole, portions)


@pytest.mark.parametrize("algorithm", ["grpo", "expert_iteration", "distillation"])
def test_ranks_without_items_in_a_portion_do_their_part(world: World, tmp_path: Path, algorithm: str) -> None:
    section = "policy" if algorithm == "grpo" else algorithm
    samples = {f"{section}__samples": 2 if algorithm != "distillation" else 1}
    whole = write(world, tmp_path / "whole", algorithm, 1, **samples)
    # Each portion has one prompt, for three data-parallel ranks, or two with ZeRO-3.
    others: list[dict[str, Any]] = [
        {"mesh": "0-2", "dp": 3, "tp": 1, "pp": 1},
        {"mesh": "0-1", "dp": 2, "tp": 1, "pp": 1, "zero": 3},
        {"mesh": "0-3", "dp": 2, "tp": 1, "pp": 2},
    ]
    run_on_ranks(1, [whole])
    for number, placed in enumerate(others):
        size = placed["dp"] * placed["pp"] + 1
        generation = {"mesh": str(size - 1), "dp": 1, "tp": 1, "pp": 1}
        portions = write(world, tmp_path / f"portions-{number}", algorithm, 16, **samples)
        run_on_ranks(size, [place(portions, size, generation, placed)])
        compare(whole, portions)


def test_more_portions_than_prompts_of_a_rank_are_refused(world: World, tmp_path: Path) -> None:
    sampling, others = ({"mesh": mesh, "dp": 2, "tp": 1, "pp": 1} for mesh in ("2-3", "0-1"))
    file = place(write(world, tmp_path / "portions", "grpo", 16), 4, sampling, others)
    experiment = load_experiment(str(file))
    with pytest.raises(UserError, match="gives 8 whole prompts to each of the 2 data-parallel ranks"):
        make_job(experiment, Cluster(1, 4))


def test_kept_copies_and_offloaded_parameters_work_in_portions(world: World, tmp_path: Path) -> None:
    whole = write(world, tmp_path / "whole", "grpo", 1)
    portions = apart(write(world, tmp_path / "portions", "grpo", 4))
    plan = portions.with_name("plan.yaml")
    plan.write_text(plan.read_text() + "keep: [actor]\noffload: [ref]\n")
    run_on_ranks(1, [whole])
    run_on_ranks(2, [portions])
    compare(whole, portions)


@pytest.mark.parametrize("turns", [1, 2])
def test_trajectories_are_handed_on_when_they_end(world: World, tmp_path: Path, turns: int) -> None:
    def recipe(name: str, portions: int) -> Path:
        directory = tmp_path / name
        game = write_game(directory)
        (directory / "game.py").write_text(
            (directory / "game.py").read_text().replace("== 2", f"> len(text) % {turns + 1}")
        )
        changes = {
            "environment": {"factory": game, "max_turn_tokens": 5},
            "data__chat_template": TEMPLATE,
            "models__reward": None,
            "generation__max_new_tokens": 40,
            "reward": None,
            "policy__minibatches": 1,
            "training__steps": 3,
            "asynchrony": {"portions": portions},
        }
        return world.recipe("grpo", directory, **changes)

    whole, portions = recipe("whole", 1), apart(recipe("portions", 4))
    run_on_ranks(1, [whole])
    run_on_ranks(2, [portions])
    compare(whole, portions)
    for expected, found in zip(
        *(read_metrics(file.parent / "run") for file in (whole, portions)), strict=True
    ):
        for name in ("turns", "environment_reward", "failed"):
            name = f"actor.generate/{name}"
            assert found[name] == pytest.approx(expected[name])


def note_training(seen: Path) -> None:
    """Let a rank note which items each train call works on."""
    train = Worker._train

    def note(self: Worker, run: Run, call: Call, batch: Batch, now: Any) -> Metrics:
        prompts = batch["prompt_length"].values.tolist()
        answers = [whole - cut for whole, cut in zip(batch["sequences"].lengths, prompts, strict=True)]
        with seen.open("a") as file:
            file.write(json.dumps([run.portion, now.number, now.last, *answers]) + "\n")
        return train(self, run, call, batch, now)

    Worker._train = note  # type: ignore[method-assign]


def test_answers_are_handed_on_in_the_order_in_which_they_end(world: World, tmp_path: Path) -> None:
    seen = tmp_path / "seen.jsonl"
    file = apart(write(world, tmp_path / "portions", "grpo", 4))
    run_on_ranks(2, [file], prepare=partial(note_training, seen))
    rows = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [(step, portion, last) for portion, step, last, *_ in rows] == [
        (step, portion, portion == 4) for step in range(3) for portion in (1, 2, 3, 4)
    ]
    for step in range(3):
        lengths = [row[3:] for row in rows if row[1] == step]
        assert sum(map(len, lengths)) == 16 * 8
        # Each portion has a quarter of the prompts, with all their answers.
        assert [len(portion) for portion in lengths] == [4 * 8] * 4
        # Answers of the first portion ended before those of the last.
        assert max(lengths[0]) <= max(lengths[-1])


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("ppo", {}, "asynchrony.portions=4: advantages are normalised over the whole batch; set portions=1"),
        ("reinforce_pp", {}, "policy.scale=batch_norm compares the rewards of the whole batch"),
        ("grpo", {"policy__minibatches": 2}, "actor.train makes 2 optimizer steps"),
        ("grpo", {"policy__epochs": 2}, "2 passes over a batch begin when it is complete"),
        ("grpo", {"policy__kl": {"coef": 0.1, "adaptive": True}}, "policy.kl.adaptive=true compares"),
        (
            "remax",
            {},
            "actor.generate and actor.generate_greedy sample, and only one call can hand on portions",
        ),
        ("grpo", {"data__batch": 2}, "a batch has only 2 prompts (data.batch); set fewer portions"),
        ("sft", {}, "asynchrony.portions=4: steps of sft do not sample; leave it out"),
        ("dapo", {}, "training cannot overlap with sampling if a step samples in up to 4 rounds"),
        ("grpo", {"asynchrony": {"portions": 4, "staleness": 1}}, "already overlaps with sampling"),
        ("grpo", {"debug": {"record": {"steps": [2]}}}, "cannot be replayed; leave debug.record out"),
    ],
    ids=str,
)
def test_what_needs_the_whole_batch_is_refused(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any], message: str
) -> None:
    one = {"policy__minibatches": 1} if algorithm not in ("ppo", "sft") else {}
    file = world.recipe(algorithm, tmp_path, **{"asynchrony": {"portions": 4}, **one, **changes})
    with pytest.raises(UserError) as error:
        load_experiment(str(file))
    assert message in str(error.value)


def break_first_portion() -> None:
    """Let the first portion of the first step have scores that are not finite."""
    train = Worker._train

    def spoil(self: Worker, run: Run, call: Call, batch: Batch, now: Any) -> Metrics:
        if run.portion == 1 and now.number == 0:
            scores = batch["score"].values
            batch = batch.with_fields(score=Ragged.scalars(torch.full_like(scores, torch.inf)))
        return train(self, run, call, batch, now)

    Worker._train = spoil  # type: ignore[method-assign]


def test_a_step_is_skipped_for_the_portion_that_is_not_finite(world: World, tmp_path: Path) -> None:
    file = apart(write(world, tmp_path / "portions", "grpo", 4))
    run_on_ranks(2, [file], prepare=break_first_portion)
    first, *others = read_metrics(tmp_path / "portions" / "run")
    # The last portion is sound, so it would be reported with a gradient.
    assert first["actor.train/skipped_steps"] == first["actor.train/skipped_for/score"] == 1
    assert all(step["actor.train/skipped_steps"] == 0 for step in others)
