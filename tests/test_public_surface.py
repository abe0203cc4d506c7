"""The public surface is `realrl` and five modules. Examples, and code in the documents, import nothing else."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SURFACE = (
    "realrl",
    "realrl.algorithms",
    "realrl.rewards",
    "realrl.environments",
    "realrl.families",
    "realrl.testing",
)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def list_imports(code: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "realrl")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "realrl":
            yield from ((str(node.module), alias.name) for alias in node.names)


def check(code: str, where: Path) -> None:
    for module, name in list_imports(code):
        assert module in SURFACE, f"{where.name} imports {module}"
        assert not name or name in dir(import_module(module)), f"{where.name} imports {name} from {module}"


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_the_public_surface_alone(file: Path) -> None:
    check(file.read_text(encoding="utf-8"), file)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_in_documents_imports_the_public_surface_alone(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(from realrl[^`]*)`", text)
    for code in (*blocks, *inline):
        check(code, document)


@pytest.mark.parametrize("module", SURFACE)
def test_every_name_of_the_surface_is_there(module: str) -> None:
    surface = import_module(module)
    assert all(hasattr(surface, name) for name in dir(surface))
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'absent'"):
        _ = surface.absent


def test_the_surface_of_descriptions_loads_no_torch() -> None:
    code = (
        "import sys, realrl.rewards\n"
        "from realrl.algorithms import AlgorithmSpec, Call, Experiment, RewardSetting, score_sequences\n"
        "from realrl.families import Family, LayerOptions\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
