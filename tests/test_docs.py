"""Documentation that must keep up with the code."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "realrl"


def test_architecture_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/`", text, flags=re.MULTILINE)
    folders = {str(init.parent.relative_to(SOURCES)) for init in SOURCES.rglob("__init__.py")} - {"."}
    assert sorted(listed) == sorted(folders)


def test_no_folder_has_more_than_15_modules() -> None:
    for init in [SOURCES / "__init__.py", *SOURCES.rglob("__init__.py")]:
        modules = [file for file in init.parent.glob("*.py") if file.stat().st_size]
        assert len(modules) <= 15, init.parent


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
