"""The packages of docs/architecture.md import downwards only, and those that promise it do not load torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "realrl"
PACKAGES = (
    "api",
    "cli",
    "testing",
    "runtime",
    "serving",
    "checkpoint",
    "huggingface",
    "engine",
    "model",
    "data",
    "algorithms",
    "environments",
    "planner",
    "program",
    "layout",
    "plan",
    "recipe",
    "dataflow",
    "families",
    "config",
)
TORCH_FREE_PACKAGES = {
    "cli",
    "environments",
    "planner",
    "program",
    "layout",
    "plan",
    "recipe",
    "dataflow",
    "families",
    "config",
}
WITH_TORCH = re.compile(
    r"realrl\.algorithms\.(build|guard|base\.(method|rows)|kl|\w+_loss|ppo_experience"
    r"|rewards\.(reward_methods|scorers))"
)
"""Modules of algorithms that compute. All others describe, and import no torch."""
LEAF = "realrl.data.batch"
"""Algorithms speak of batches; the module that defines them depends on nothing of ours."""
HEAVY = ("torch", "transformers", "datasets", "tokenizers", "numpy", "matplotlib")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCES.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file names in an import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "realrl")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "realrl":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def package(module: str) -> str | None:
    """The top-level package of a module; None for realrl itself and realrl.__main__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else None


def is_torch_free(module: str) -> bool:
    if package(module) == "algorithms":
        return not WITH_TORCH.fullmatch(module)
    return package(module) in TORCH_FREE_PACKAGES


def test_every_folder_is_a_known_package() -> None:
    folders = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert folders <= set(PACKAGES)


@pytest.mark.parametrize("module", [module for module in MODULES if package(module)])
def test_imports_go_downwards_only(module: str) -> None:
    here = PACKAGES.index(str(package(module)))
    for imported in imports(MODULES[module]):
        there = package(imported)
        if there is None or (package(module) == "algorithms" and imported == LEAF):
            continue
        assert PACKAGES.index(there) >= here, f"{module} imports {imported}, which is in a higher package"


def folder(module: str) -> str:
    """The folder that a module lies in; modules directly in the package count as one each."""
    if module.count(".") < 2:
        return module
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_imports() -> dict[str, dict[str, str]]:
    """Per folder, the others that it imports from, each with an import that does."""
    found: dict[str, dict[str, str]] = {}
    for module, path in MODULES.items():
        if module == "realrl":
            continue  # imports its names when they are used
        here = found.setdefault(folder(module), {})
        for imported in imports(path):
            there = folder(imported)
            if there != folder(module):
                here.setdefault(there, f"{module} imports {imported}")
    return found


def test_imports_of_folders_go_down_the_rows_of_the_table() -> None:
    table = (SOURCES.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/`", table, flags=re.MULTILINE)
    rows = {f"realrl.{name.replace('/', '.')}": row for row, name in enumerate(listed)}
    upwards = [
        example
        for here, found in folder_imports().items()
        for there, example in found.items()
        if here in rows and there in rows and rows[there] < rows[here] and not example.endswith(f" {LEAF}")
    ]
    assert not upwards


def find_circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes of a circle in order, the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for following in edges.get(node, ()):
            if circle := visit(following, [*path, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in edges if (circle := visit(node, []))), [])


def test_folders_at_every_depth_import_in_no_circle() -> None:
    edges = folder_imports()
    circle = find_circle(edges)
    assert not circle, "; ".join(edges[here][there] for here, there in pairwise(circle))


def test_a_circle_is_found_wherever_it_begins() -> None:
    assert find_circle({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]
    assert find_circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_the_leaf_that_algorithms_may_import_is_one() -> None:
    assert not [imported for imported in imports(MODULES[LEAF]) if package(imported)]


def import_closure(start: str) -> set[str]:
    """Modules with any content that `start` imports, directly or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        module = left.pop()
        if module in MODULES and module not in found:
            found.add(module)
            left += imports(MODULES[module])
    return {module for module in found if MODULES[module].stat().st_size}


def test_the_worker_imports_little_and_almost_nothing_of_the_planner() -> None:
    closure = import_closure("realrl.runtime.worker.worker")
    planner = sorted(module for module in closure if package(module) == "planner")
    assert len(planner) <= 6, planner
    assert len(closure) <= 240, len(closure)


def test_nothing_imports_relatively() -> None:
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} imports relatively"


def loaded_by(modules: list[str]) -> set[str]:
    """Which of HEAVY a fresh interpreter has loaded after importing `modules`."""
    script = f"import sys, {', '.join(modules)}; print(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_starts_without_anything_heavy() -> None:
    assert loaded_by(["realrl.__main__"]) == set()


def test_packages_that_promise_it_load_nothing_heavier_than_numpy() -> None:
    assert loaded_by([module for module in MODULES if is_torch_free(module)]) <= {"numpy"}


PROMISE = re.compile(r"(?i)\b(no|without|not\s+import)\s+torch\b(?!\.\w)")
"""What the docstring of a module says if the module does not load torch."""


def test_modules_that_promise_it_load_no_torch() -> None:
    promise = [
        name
        for name, path in MODULES.items()
        if PROMISE.search(ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert "realrl.runtime.prepare.job" in promise and "realrl.huggingface.directory" in promise
    assert loaded_by(promise) <= {"numpy"}


ASKS = {"realrl.recipe.algorithm"}
"""May ask of what class a recipe is: whether it is one at all."""
SHARED = ("base", "build", "guard", "kl", "policy", "clipped_policy", "rewards")
"""Parts that any algorithm may use."""
STANDS_IN = "realrl.runtime.profiler.passes"
"""Measures any model with the methods of PPO."""


def asks_which_algorithm(node: ast.AST) -> bool:
    """Whether code looks at the class of a recipe, or compares the name of its algorithm."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("isinstance", "issubclass") and "Experiment" in ast.unparse(node.args[-1])
    if isinstance(node, ast.MatchClass):
        return ast.unparse(node.cls).endswith("Experiment")
    if isinstance(node, ast.Compare | ast.Subscript):
        return any(isinstance(inner, ast.Attribute) and inner.attr == "algorithm" for inner in ast.walk(node))
    return False


def test_nothing_asks_which_algorithm_a_recipe_is_of() -> None:
    asking = {
        name
        for name, path in MODULES.items()
        if any(asks_which_algorithm(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert asking <= ASKS


def algorithm_of(module: str) -> str | None:
    """The algorithm that a module belongs to: `ppo` for `realrl.algorithms.ppo_loss`."""
    parts = module.split(".")
    if package(module) != "algorithms" or len(parts) < 3:
        return None
    name = re.sub("_(loss|experience)$", "", parts[2])
    return None if name in SHARED else name


def test_only_an_algorithm_imports_its_own_modules() -> None:
    for name, path in MODULES.items():
        for imported in imports(path):
            owner = algorithm_of(imported)
            assert owner in (None, algorithm_of(name)) or name == STANDS_IN, f"{name}: {imported}"


@pytest.mark.parametrize(
    "module", ["realrl.algorithms.ppo", "realrl.recipe.load", "realrl.plan.presets", "realrl.cli.app"]
)
def test_an_entry_point_alone_loads_nothing_heavy(module: str) -> None:
    assert loaded_by([module]) == set()


SCRIPTS = sorted(
    file for folder in ("bench", "tools") for file in (SOURCES.parents[1] / folder).rglob("*.py")
)


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_imports_of_scripts_exist(file: Path) -> None:
    """Benches and tools also write code as text, which no type checker reads."""
    text = file.read_text(encoding="utf-8")
    for module, names in re.findall(r"^ *from (realrl[\w.]*) import (\w+(?:, \w+)*)", text, re.MULTILINE):
        found = import_module(module)
        for name in names.split(", "):
            assert hasattr(found, name) or find_spec(f"{module}.{name}"), f"{module} has no {name}"
