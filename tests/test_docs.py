"""Documentation that must keep up with the code."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_architecture_lists_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for room in text.split("### `")[1:]:
        name = room.split("/`")[0]
        folder = ROOT / "src" / "realrl" / name
        modules = {str(f.relative_to(folder)) for f in folder.rglob("*.py") if f.name != "__init__.py"}
        listed = {line.split("`")[1] for line in room.splitlines() if line.startswith("| `")}
        assert listed == modules, name
    rooms = {f.parent.name for f in (ROOT / "src" / "realrl").glob("*/__init__.py")}
    assert {room.split("/`")[0] for room in text.split("### `")[1:]} == rooms
