"""What heartbeats say about batches under way is what their rows say."""

from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.cli.monitoring.timeline import find_last_step
from realrl.program.trace_file import read_rank_traces
from realrl.runtime.step import TrainingSteps
from realrl.runtime.supervision.batches import BatchProgress, CallProgress, merge_progress
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World
from tests.runtime.asynchrony.test_ahead_resume import SAVING
from tests.runtime.asynchrony.test_ahead_runs import part, write_recipe
from tests.runtime.checkpoints.interrupted import interrupt

TOKENS = 12
Found = dict[int, dict[int, BatchProgress]]
"""Progress by the number of finished steps and by batch."""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What heartbeats say after each step. It is compared with the rows of the batches."""
    found: Found = {}
    run, restore = TrainingSteps.run, TrainingSteps.restore_batches

    def watch_run(self: TrainingSteps, step: int, *rest: Any) -> dict[str, float]:
        metrics = run(self, step, *rest)
        batches = [BatchProgress.parse(batch) for batch in self._process.activity.batches]
        found[step + 1] = {batch.step: batch for batch in batches if batch.step > step + 1}
        assert [number - 1 for number in found[step + 1]] == [*self.under_way]
        for number, batch in self.under_way.items():
            assert found[step + 1][number + 1].calls == batch.calls
            check_rows(found[step + 1][number + 1], batch.store)
        return metrics

    def watch_restore(self: TrainingSteps, done: int, *rest: Any) -> int:
        dropped = restore(self, done, *rest)
        for number, batch in self.under_way.items():
            assert found[done][number + 1].calls == batch.calls != {}
        return dropped

    monkeypatch.setattr(TrainingSteps, "run", watch_run)
    monkeypatch.setattr(TrainingSteps, "restore_batches", watch_restore)
    return found


def check_rows(progress: BatchProgress, store: Any) -> None:
    for name, call in progress.calls.items():
        assert call.rows == progress.size == store.size
        for key in store.graph.call(name).outputs:
            assert len(store.held(key)[0]) == call.rows
    call = progress.calls["actor.generate"]
    sequences, prompts = (store.held(key)[1] for key in ("sequences", "prompt_length"))
    lengths = [n - p for n, p in zip(sequences.lengths, prompts.values.tolist(), strict=True)]
    finished = store.held("finished")[1].values.tolist()
    going_on = sum(not f and n < TOKENS for f, n in zip(finished, lengths, strict=True))
    assert call.going_on == going_on and (call.parts < call.span or not going_on)
    # A part has at most `TOKENS / span` tokens, and no answer has waited.
    assert max(lengths) <= call.parts * -(-TOKENS // call.span)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"staleness": 1}, [("actor.generate 1",)]),
        ({"staleness": 2}, [("actor.generate 1", "reward.function 1"), ("actor.generate 1",)]),
        (
            {"staleness": 3, "partial": True},
            [("actor.generate 3",), ("actor.generate 2",), ("actor.generate 1",)],
        ),
        (
            {"staleness": 2, "partial": True, "overlap": False},
            [("actor.generate 2",), ("actor.generate 1",)],
        ),
    ],
    ids=str,
)
def test_heartbeats_say_how_far_batches_are(
    world: World, tmp_path: Path, published: Found, settings: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    changes = {"asynchrony": settings, "generation__max_new_tokens": TOKENS, "training__steps": 6}
    recipe = write_recipe(world, tmp_path / "whole", "grpo", 0, **SAVING, **changes)
    assert run_app(["train", str(recipe)]) == 0
    batches = [*published[2].values()]
    assert [batch.step for batch in batches] == [*range(3, 3 + len(expected))]
    found = [tuple(f"{name} {call.parts}" for name, call in batch.calls.items()) for batch in batches]
    assert [tuple(sorted(calls)) for calls in found] == expected
    # Step s trains on tokens that are exactly as old as the settings allow, except for the first batches.
    assert [batch.weights for batch in batches] == [
        max(0, b.step - 1 - settings["staleness"]) for b in batches
    ]
    if settings.get("partial"):
        assert any(call.going_on for batch in batches for call in batch.calls.values())
    whole = dict(published)
    resumed = interrupt(tmp_path / "whole" / "run", 2, tmp_path / "resumed")
    assert run_app(["train", str(recipe), f"run_dir={resumed}"]) == 0
    assert published == whole


def test_a_synchronous_run_has_no_batches_under_way(world: World, tmp_path: Path, published: Found) -> None:
    assert run_app(["train", str(write_recipe(world, tmp_path, "grpo", 0))]) == 0
    assert set(map(len, published.values())) == {0}
    assert all("batches" not in event["args"] for event in read_rank_traces(tmp_path / "run")[0])


def test_a_trace_names_the_step_and_the_batches_of_each_call(world: World, tmp_path: Path) -> None:
    settings = {"staleness": 2, "partial": True}
    recipe = part(write_recipe(world, tmp_path, "grpo", 0, asynchrony=settings, training__steps=6))
    run_on_ranks(2, [recipe])
    traces = read_rank_traces(tmp_path / "run")

    def batches(rank: int, call: str) -> dict[int, list[int]]:
        found = (event for event in traces[rank] if event["name"].split()[:2] == ["run", call])
        return {of["args"]["step"]: of["args"]["batches"] for of in found if "batches" in of["args"]}

    # Steps and batches count from 0. Steps before the first one only sample, and the last step samples nothing.
    assert batches(0, "actor.train") == {step: [step] for step in range(6)}
    middle = {step: [step + 1, step + 2] for step in range(-1, 4)}
    assert batches(1, "actor.generate") == {-2: [0], **middle, 4: [5]}
    last = find_last_step(tmp_path / "run", {})
    assert last is not None and (last.step, last.ranks) == (6, 2)


def test_a_call_is_as_far_as_its_furthest_rank_and_counts_the_rows_there() -> None:
    def of_rank(parts: int, rows: int, going_on: int) -> BatchProgress:
        call = CallProgress(order=0, parts=parts, span=3, rows=rows, going_on=going_on)
        return BatchProgress(step=5, weights=2, size=12, calls={"actor.generate": call})

    ranks = [of_rank(1, 4, 4), of_rank(2, 5, 3), of_rank(2, 3, 1)]
    for order in (ranks, ranks[::-1]):
        (merged,) = merge_progress([batch] for batch in order)
        call = merged.calls["actor.generate"]
        assert (merged.step, call.parts, call.rows, call.going_on) == (5, 2, 8, 4)
