"""The stub that editors read lists the arguments of today."""

from pathlib import Path

from tools.python_stubs import STUB, write_stub


def test_the_stub_is_what_the_settings_say() -> None:
    assert Path(STUB).read_text(encoding="utf-8") == write_stub(), "run python tools/python_stubs.py"
