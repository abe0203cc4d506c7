"""Documentation that must keep up with the code."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "realrl"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_architecture_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/`", text, flags=re.MULTILINE)
    folders = {str(init.parent.relative_to(SOURCES)) for init in SOURCES.rglob("__init__.py")} - {"."}
    assert sorted(listed) == sorted(folders)


def test_base_names_of_test_modules_are_unique() -> None:
    counts = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1], "pytest collects them together"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    missing = {name for name in named if not any((top / name).exists() for top in (ROOT, SOURCES))}
    assert not {name for name in missing if not name.endswith("/NAME.py")}


def name_anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in name_anchors(file), target


def test_the_picture_of_the_packages_shows_their_imports() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "package_picture.py"))
    picture = script["PICTURE"].read_text(encoding="utf-8")
    shown = set(re.findall(r'<path id="(\w+)-(\w+)"', picture))
    assert shown == set(script["drop_implied"](script["find_imports"]())), (
        "run python docs/package_picture.py"
    )
    assert set(re.findall(r'class="name"[^>]*>(\w+)<', picture)) == set(script["read_table"]())
