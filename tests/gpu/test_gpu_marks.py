"""`make gpu-check` finds all tests that need a GPU."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"pytest\.mark\.gpu2?\b|@on_(?:one|two)_devices?\b|\b(?:ONE_GPU|TWO_GPUS)\b")
ABSENT = re.compile(r"^(?:from|import) (?:hypothesis|matplotlib|peft|scipy)\b", re.M)


def list_gpu_paths() -> list[Path]:
    """List what `make gpu-check` gives to pytest."""
    named = re.search(r"^GPU_TESTS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert named is not None
    return [ROOT / path for path in named[1].replace("\\\n", " ").split()]


def test_every_test_that_needs_a_gpu_lies_in_the_paths_of_gpu_check() -> None:
    paths = list_gpu_paths()
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if MARKED.search(file.read_text())]
    assert all(path.exists() for path in paths)
    assert [str(file) for file in marked if not any(file.is_relative_to(path) for path in paths)] == []


def test_gpu_check_imports_nothing_that_only_developers_install() -> None:
    """Machines with GPUs often have torch, transformers and pytest, and little else."""
    files = [file for path in list_gpu_paths() for file in ([path] if path.is_file() else path.glob("*.py"))]
    assert [str(file) for file in files if ABSENT.search(file.read_text())] == []
