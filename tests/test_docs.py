"""Documentation that must keep up with the code."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "realrl"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = re.compile(r"__pycache__|\.egg-info|(^|/)\.")
"""Parts of the paths of files that are not sources."""


def test_architecture_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/`", text, flags=re.MULTILINE)
    folders = {str(init.parent.relative_to(SOURCES)) for init in SOURCES.rglob("__init__.py")} - {"."}
    assert sorted(listed) == sorted(folders)


@pytest.mark.parametrize("top", ["src", "tests"])
def test_no_folder_has_more_than_15_files(top: str) -> None:
    files = [file for file in (ROOT / top).rglob("*") if file.is_file()]
    kept = [file.parent for file in files if not GENERATED.search(str(file.relative_to(ROOT)))]
    assert not {str(folder): count for folder, count in Counter(kept).items() if count > 15}


def test_base_names_of_test_modules_are_unique() -> None:
    counts = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1], "pytest collects them together"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    missing = {name for name in named if not any((top / name).exists() for top in (ROOT, SOURCES))}
    assert not {name for name in missing if not name.endswith("/NAME.py")}


def test_the_picture_of_the_packages_shows_their_imports() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "package_picture.py"))
    picture = script["PICTURE"].read_text(encoding="utf-8")
    shown = set(re.findall(r'<path id="(\w+)-(\w+)"', picture))
    assert shown == set(script["drop_implied"](script["find_imports"]())), (
        "run python docs/package_picture.py"
    )
    assert set(re.findall(r'class="name"[^>]*>(\w+)<', picture)) == set(script["read_table"]())


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
