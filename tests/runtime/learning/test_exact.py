"""`exact: true`: sampler and trainer agree bit for bit, and tokens are the same under every plan and split."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import World, read_metrics

OTHERS = "  reward.inference: {mesh: 0, dp: 1}\n  ref.inference: {mesh: 0, dp: 1}\n"
PLANS = {
    "one": f"""cluster: 1x1
calls:
  actor.generate: {{mesh: 0, dp: 1}}
  actor.train: {{mesh: 0, dp: 1}}
{OTHERS}""",
    "dp": f"""cluster: 1x2
calls:
  actor.generate: {{mesh: 0-1, dp: 2, micro_batch_tokens: 90}}
  actor.train: {{mesh: 0-1, dp: 1, pp: 2, micro_batch_tokens: 60}}
{OTHERS}""",
    "pp": f"""cluster: 1x2
calls:
  actor.generate: {{mesh: 0-1, dp: 1, pp: 2, micro_batch_tokens: 150}}
  actor.train: {{mesh: 0-1, dp: 2, micro_batch_tokens: 200}}
{OTHERS}""",
    "cp": f"""cluster: 1x2
calls:
  actor.generate: {{mesh: 0-1, dp: 2, micro_batch_tokens: 90}}
  actor.train: {{mesh: 0-1, dp: 1, cp: 2, micro_batch_tokens: 60}}
{OTHERS}""",
}
"""Plans in which generation and training see batches of other sizes, and the cache holds a few rows."""
SETTINGS = {
    "exact": True,
    "plan": "",
    "data__batch": 4,
    "training__steps": 2,
    "generation__max_new_tokens": 24,
    "generation__temperature": 0.8,
    "policy__minibatches": 1,
}
CHECKED = "actor.train/sampler_trainer_mismatch"


def write(world: World, directory: Path, plan: str, **changes: object) -> Path:
    directory.mkdir()
    (directory / "plan.yaml").write_text(PLANS[plan])
    cluster = PLANS[plan].split()[1]
    settings = {**SETTINGS, "plan": str(directory / "plan.yaml"), "cluster": cluster, **changes}
    return world.recipe("grpo", directory, **settings)


@pytest.fixture(scope="module")
def recipes(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Runs of GRPO on one and on two ranks, from the same seed."""
    root = tmp_path_factory.mktemp("exact")
    found = {plan: write(world, root / plan, plan) for plan in PLANS}
    run_on_ranks(1, [found["one"]])
    run_on_ranks(2, [found["dp"], found["pp"], found["cp"]])
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_log_probabilities_of_sampler_and_trainer_are_the_same_bits(
    recipes: Mapping[str, Path], plan: str
) -> None:
    steps = read_metrics(recipes[plan].parent / "run")
    assert [step[CHECKED] for step in steps] == [0.0] * 2


@pytest.mark.parametrize("plan", ["dp", "pp"])
def test_tokens_of_the_first_step_are_the_same_under_every_plan(
    recipes: Mapping[str, Path], plan: str
) -> None:
    """Later steps start from weights whose gradients were summed in another order."""
    one, other = (
        {name: tokens for name, tokens in sampled(recipes[key]).items() if name.startswith("0/")}
        for key in ("one", plan)
    )
    assert len(one) > 8
    assert one == other


@pytest.mark.parametrize("dtype", ["mixed", "bfloat16"])
def test_other_types_on_a_cpu_agree_bit_for_bit_too(world: World, tmp_path: Path, dtype: str) -> None:
    recipe = write(
        world, tmp_path / dtype, "one", models__actor__dtype=dtype, training__steps=1, micro_batch_tokens=200
    )
    assert run_app(["train", str(recipe)]) == 0
    steps = read_metrics(tmp_path / dtype / "run")
    assert [step[CHECKED] for step in steps] == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("actor.generate: {mesh: 0-1, dp: 1, tp: 2}", "actor.generate: tp=2: exact=true needs tp=1"),
        (
            "actor.generate: {mesh: 0-1, dp: 1, cp: 2}",
            "actor.generate: cp=2: exact=true needs cp=1 in calls that",
        ),
        (
            "actor.generate: {mesh: 0-1, dp: 2, dtype: bfloat16}",
            "exact=true needs one data type for all calls",
        ),
    ],
)
def test_plans_that_cannot_be_exact_are_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, message: str
) -> None:
    recipe = write(world, tmp_path / "refused", "dp")
    plan = recipe.parent / "plan.yaml"
    first = next(line for line in PLANS["dp"].splitlines() if "generate" in line)
    plan.write_text(PLANS["dp"].replace(first, f"  {call}"))
    assert run_app(["train", str(recipe)]) == 2
    assert message in capsys.readouterr().err
