"""Steps that hand on their samples in portions learn what other steps learn."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.testing.ranks import run_on_ranks
from tests.conftest import World
from tests.runtime.asynchrony.test_ahead_runs import learnt, part, write_recipe


def place(
    file: Path, generate: tuple[str, int, int, int], others: tuple[str, int, int, int], size: int
) -> Path:
    """Give generation one mesh, and all other calls of models another: mesh, dp, tp, pp."""

    def of(placed: tuple[str, int, int, int]) -> dict[str, Any]:
        return dict(zip(("mesh", "dp", "tp", "pp"), placed, strict=True))

    part(file, size)
    plan = file.with_name("plan.yaml")
    document = yaml.safe_load(plan.read_text())
    for call in document["calls"]:
        if call != "reward.function":
            document["calls"][call] = of(generate if call == "actor.generate" else others)
    plan.write_text(yaml.safe_dump(document))
    return file


CASES = {
    "grpo": {},
    "dr_grpo": {},
    "gspo": {"policy__recompute_logprobs": True},
    "rloo": {},
    "dapo": {"policy__sampling_rounds": 1},
}


@pytest.mark.parametrize("algorithm", CASES)
def test_portions_teach_what_the_whole_batch_teaches(world: World, tmp_path: Path, algorithm: str) -> None:
    changes = {"policy__minibatches": 1, **CASES[algorithm]}
    whole = write_recipe(world, tmp_path / "whole", algorithm, 0, **changes)
    portions = part(
        write_recipe(world, tmp_path / "portions", algorithm, 0, asynchrony={"portions": 3}, **changes)
    )
    run_on_ranks(1, [whole])
    run_on_ranks(2, [portions])
    assert len(learnt(whole)) == 5
    for expected, found in zip(learnt(whole), learnt(portions), strict=True):
        assert expected and found == pytest.approx(expected, rel=1e-4, abs=1e-5)
