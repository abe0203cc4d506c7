"""Mutants that `tools/mutate_planner.py` tries of the planner: valid Python, all different, drawn by a seed."""

import ast
import random
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/mutate_planner.py"))
SOURCES = ROOT / TOOL["SOURCES"]


def test_every_mutant_is_another_valid_program() -> None:
    mutants = TOOL["list_mutants"](("cost", "memory"))
    assert len(mutants) > 1000 and len(set(mutants)) == len(mutants)
    for mutant in random.Random(3).sample(mutants, 40):
        text = (SOURCES / mutant.file).read_text(encoding="utf-8")
        changed = mutant.apply(text)
        assert text[mutant.begin : mutant.end] == mutant.before
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutant


def test_a_formula_has_the_mutants_that_a_mistake_would_make(tmp_path: Path) -> None:
    file = SOURCES / "memory/kv_cache.py"
    found = {mutant.after for mutant in TOOL["_list_in_file"](file)}
    assert {"return 0", "(2 * layers * tokens * sizes.cache_dim)", "4", "0", "3"} <= found
    assert "(2 * layers * tokens * sizes.cache_dim / element_bytes)" in found


def test_a_seed_draws_the_same_mutants_from_all_over_the_planner() -> None:
    mutants = TOOL["list_mutants"](TOOL["FOLDERS"])
    first, again, other = (TOOL["draw"](mutants, 30, seed) for seed in (0, 0, 1))
    assert first == again and first != other and len(first) == 30
    assert len({mutant.file for mutant in first}) > 12


def test_what_is_not_mutated_exists() -> None:
    for name, inside in TOOL["UNTESTED"]:
        assert inside in (SOURCES / name).read_text(encoding="utf-8")
