"""A public class or type alias has a name that means one thing in the whole package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "realrl"
HOMONYMS: dict[str, set[str]] = {
    "Item": {"data/forms", "program/memory"},
    "Message": {"data/conversation", "layout/routing/chunks"},
    "RewardInference": {"algorithms/ppo/inference", "algorithms/reward/method"},
}
"""Names that are defined more than once, with their modules. It may only shrink."""


def defined_names(path: Path) -> Iterator[str]:
    """Public classes and type aliases at the top of a module. An alias is an assignment to a name in CamelCase."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names: list[ast.expr] = []
        if isinstance(node, ast.ClassDef):
            names = [ast.Name(node.name)]
        elif isinstance(node, ast.Assign) and not is_type_variable(node.value):
            names = node.targets
        elif isinstance(node, ast.AnnAssign):
            names = [node.target]
        for name in names:
            if isinstance(name, ast.Name) and name.id[0].isupper() and not name.id.isupper():
                yield name.id


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "TypeVar"


def test_no_name_of_a_class_is_defined_twice() -> None:
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES.rglob("*.py"):
        for name in defined_names(path):
            modules[name].add(str(path.relative_to(SOURCES).with_suffix("")))
    found = {name: where for name, where in modules.items() if len(where) > 1}
    new = {name: sorted(where) for name, where in found.items() if not where <= HOMONYMS.get(name, set())}
    assert not new, f"these names are taken: {new}"
    gone = {name for name, where in HOMONYMS.items() if where != found.get(name)}
    assert not gone, f"take these, or some of their modules, out of HOMONYMS: {gone}"
