"""Where no plan fits: what would have to be different, each change found by a search."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.errors import UserError
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.space.build import SearchSpace
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.fit.changes import (
    Attempts,
    Change,
    Draft,
    in_order,
    list_search_changes,
    set_fields,
)
from realrl.runtime.prepare.fit.search import (
    Outcome,
    Trials,
    describe_remedies,
    explain_no_plan,
    find_remedies,
)
from realrl.runtime.prepare.scenarios import Measured

PPO = str(Path(__file__).parents[3] / "recipes" / "reference" / "ppo.yaml")
LEAN = UserConstraints(search_space=SearchSpace(offload=False))
"""Offloading would make most things fit."""


def draft(
    cluster: str, *overrides: str, model: str = "llama-2-7b", dtype: str = "bfloat16", tokens: int = 128
) -> Draft:
    """PPO with one model for all roles, and sequences of one length."""
    models = [f"models.{role}.shape={model}" for role in ("actor", "reward")]
    types = [f"models.{role}.dtype={dtype}" for role in ("actor", "critic", "ref", "reward")]
    lengths = [
        f"data.max_tokens={2 * tokens}",
        f"data.max_prompt_tokens={tokens}",
        f"generation.max_new_tokens={tokens}",
        "generation.min_new_tokens=0",
    ]
    experiment = load_experiment(PPO, ["data.batch=64", *models, *types, *lengths, *overrides])
    return Draft(experiment, ClusterSpec.parse(cluster))


def refusal(of: Draft, wanted: UserConstraints) -> str:
    """What the user is told."""
    with pytest.raises(DoesNotFit) as caught:
        find_plan(of.scenario(), effort=200_000, constraints=wanted)
    error = explain_no_plan(of, of.scenario(), caught.value.shortage, wanted, seconds=60.0)
    assert isinstance(error, UserError)
    return str(error)


def texts(source: Attempts) -> list[str]:
    """The changes that a source proposes while none of them helps."""
    found = []
    change = next(source, None)
    while change is not None:
        found.append(change.text)
        try:
            change = source.send(False)
        except StopIteration:
            break
    return found


def test_the_fewest_nodes_that_suffice_are_found() -> None:
    of = draft("a100-40g:1x4")
    message = refusal(of, LEAN)
    assert message.startswith("no plan fits llama-2-7b (actor, critic, ref, reward) on a100-40g:1x4: ")
    found = re.search(r"on (\d+) nodes \(step [\d.]+ s\)", message)
    assert found is not None
    nodes = int(found[1])
    assert nodes > 1
    scenario = of.scenario()
    find_plan(scenario.on(of.spec.with_nodes(nodes)), effort=200_000, constraints=LEAN)
    with pytest.raises(DoesNotFit):
        find_plan(scenario.on(of.spec.with_nodes(nodes - 1)), effort=200_000, constraints=LEAN)


@pytest.mark.parametrize(("batch", "wanted"), [(8, (4, 2, 1)), (6, (3,)), (5, ())])
def test_a_smaller_batch_is_one_that_mini_batches_share_out(batch: int, wanted: tuple[int, ...]) -> None:
    of = draft("a100-80g:1x1", f"data.batch={4 * batch}")
    tried: list[str] = []

    def assess(changed: Draft, seconds: float) -> Outcome:
        tried.append(f"data.batch={changed.experiment.data.batch}")
        return Outcome(1.0, "")

    *_, batches = list_search_changes(of)
    assert Trials(assess, 60.0).find_remedies(of, [batches], 1) == []
    assert tried == [f"data.batch={4 * n}" for n in wanted]


@pytest.mark.parametrize(("rate", "frozen"), [("null", {"reward", "ref"}), ("0.01", {"reward"})])
def test_a_moving_average_stays_in_float32(rate: str, frozen: set[str]) -> None:
    types, *_ = list_search_changes(draft("a100-80g:1x1", f"ppo.ref_ema={rate}", dtype="float32"))
    roles = [set(re.findall(r"models\.(\w+)\.", text)) for text in texts(types)]
    assert roles == [frozen, frozen | {"actor", "critic"}]


def test_shorter_answers_are_ones_that_the_recipe_allows() -> None:
    of = draft("a100-80g:1x1", "generation.min_new_tokens=100")
    assert texts(list(list_search_changes(of))[4]) == [
        "generation.max_new_tokens=64 generation.min_new_tokens=64"
    ]


def test_measured_prompts_are_cut_off_as_the_recipe_says() -> None:
    of = draft("a100-80g:1x1", "data.max_tokens=2000", "data.max_prompt_tokens=800")
    of = replace(of, measured=Measured(prompts=(10, 500), answers=(3, 4)))
    change = next(list(list_search_changes(of))[4])
    assert change.text == "data.max_prompt_tokens=250"
    assert change.apply(of).scenario().workload.prompts == (10, 250)


def test_a_search_that_ran_out_of_time_proves_nothing() -> None:
    of = draft("a100-40g:1x1", model="llama-2-70b")
    with pytest.raises(DoesNotFit) as caught:
        find_plan(of.scenario(), effort=200_000, constraints=LEAN)
    shortage = caught.value.shortage
    for proven, words in ((True, "no plan fits llama"), (False, "no plan was found that fits llama")):
        error = explain_no_plan(of, of.scenario(), replace(shortage, proven=proven), LEAN, seconds=0.0)
        assert str(error).startswith(words)


def test_an_error_names_what_is_needed_with_figures() -> None:
    message = refusal(draft("a100-40g:1x1", model="llama-2-70b"), UserConstraints())
    assert "on a100-40g:1x1, even with recomputation and offloading: at best device 0 needs" in message
    assert re.search(
        r"device 0 needs \d+ GiB of 38\.\d GiB during actor\.\w+, \d+ GiB of it [\w ]+: 3\.\d+ times what it has",
        message,
    )
    assert re.search(r"; it fits on \d+ nodes \(step \d", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("of", "wanted", "change"),
    [
        (
            draft("a100-40g:1x8", dtype="float32"),
            LEAN,
            "with models.ref.dtype=bfloat16 models.reward.dtype=bfloat16",
        ),
        (draft("a100-40g:1x4"), LEAN, "on a100-80g:1x4"),
        (draft("a100-40g:1x8", tokens=1 << 18), UserConstraints(), "with generation.max_new_tokens=32768"),
    ],
)
def test_remedies_are_among_those_that_a_search_confirms(
    of: Draft, wanted: UserConstraints, change: str
) -> None:
    found = [str(remedy).partition(" (")[0] for remedy in find_remedies(of, wanted, seconds=60.0)]
    assert change in found


def bytes_missing(batch: int, rows: int) -> float:
    """Of a made-up device, which holds 10 of a batch's records and 3 units of each mini-batch's."""
    return batch + 3 * rows - 100.0


def assess(changed: Draft, seconds: float) -> Outcome:
    """A draft that needs less with a smaller batch and with smaller micro-batches."""
    experiment = changed.experiment
    return Outcome(bytes_missing(experiment.data.batch, experiment.micro_batch_tokens), "needs less")


def sources(*groups: list[str]) -> Iterator[Attempts]:
    return (in_order(set_fields(text) for text in group) for group in groups)


def test_the_first_change_that_is_enough_is_the_remedy() -> None:
    of = draft("a100-80g:1x1", "data.batch=64", "micro_batch_tokens=16")
    groups = (
        ["data.batch=63", "data.batch=60"],  # not divisible by the mini-batches; not enough
        ["micro_batch_tokens=14", "micro_batch_tokens=12", "micro_batch_tokens=10"],
        ["data.batch=32"],
    )
    found = Trials(assess, 60.0).find_remedies(of, sources(*groups), 2)
    assert describe_remedies(found) == (
        "it fits with micro_batch_tokens=12 (needs less), or with data.batch=32 (needs less)"
    )
    assert Trials(assess, 0.0).find_remedies(of, sources(*groups), 2) == []


def test_changes_that_help_only_together_are_combined() -> None:
    of = draft("a100-80g:1x1", "data.batch=64", "micro_batch_tokens=40")
    groups = (
        ["seed=3"],  # changes nothing
        ["micro_batch_tokens=32", "micro_batch_tokens=28"],
        ["data.batch=32", "data.batch=16", "data.batch=8"],
    )
    found = Trials(assess, 60.0).find_combination(of, assess(of, 0.0), lambda *_: sources(*groups))
    assert found is not None
    assert [change.text for change in found.changes] == ["micro_batch_tokens=28", "data.batch=16"]
    assert Trials(assess, 60.0).find_combination(of, assess(of, 0.0), lambda *_: sources(*groups[:2])) is None


def test_a_source_may_look_for_something_milder() -> None:
    def bisected() -> Attempts:
        for number in (8, 16, 12, 10):
            yield Change(f"{number} nodes", lambda of, n=number: set_fields(f"seed={n}").apply(of), "on")

    def enough(changed: Draft, seconds: float) -> Outcome:
        return Outcome(11.0 - changed.experiment.seed, "needs less")

    (found,) = Trials(enough, 60.0).find_remedies(draft("a100-80g:1x1"), [bisected()], 1)
    assert str(found) == "on 12 nodes (needs less)"
