"""A public class, type alias or function has a name that means one thing in the whole package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "realrl"


def defined_names(path: Path) -> Iterator[str]:
    """Public classes, type aliases and functions at the top of a module.

    An alias is an assignment to a name in CamelCase.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_exempt(path, node):
            yield node.name
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


def is_exempt(path: Path, function: ast.FunctionDef) -> bool:
    """Whether a function's name is given from outside: a command is named after what it runs, and the graphs of an
    algorithm after the field of its description."""
    folder, module = path.relative_to(SOURCES).parent.as_posix(), path.stem
    is_command = folder == "cli" and function.name == module
    is_graph = folder.startswith("algorithms/") and module == "graph"
    return is_command or (is_graph and function.name in ("train_graph", "eval_graph"))


def test_no_name_of_a_class_or_function_is_defined_twice() -> None:
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES.rglob("*.py"):
        for name in defined_names(path):
            modules[name].add(str(path.relative_to(SOURCES).with_suffix("")))
    twice = {name: sorted(where) for name, where in modules.items() if len(where) > 1}
    assert not twice, f"these names are taken: {twice}"
