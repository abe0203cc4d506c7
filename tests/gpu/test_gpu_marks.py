"""`make gpu-check` finds all tests that need a GPU."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"pytest\.mark\.gpu2?\b|@on_(?:one|two)_devices?\b|\b(?:ONE_GPU|TWO_GPUS)\b")


def test_every_test_that_needs_a_gpu_lies_in_the_paths_of_gpu_check() -> None:
    named = re.search(r"^GPU_TESTS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert named is not None
    paths = [ROOT / path for path in named[1].replace("\\\n", " ").split()]
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if MARKED.search(file.read_text())]
    assert all(path.exists() for path in paths)
    assert [str(file) for file in marked if not any(file.is_relative_to(path) for path in paths)] == []
