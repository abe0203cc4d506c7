"""Lists the lines that run on GPUs alone, and those of them that no test without a GPU executes.

python tests/gpu_branches/coverage_of_gpu_code.py
"""

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "realrl"
ROOMS = ("checkpoint", "config", "data", "engine", "model", "runtime")
WHOLE = (
    "model/gpu/",
    "model/gpu_logprobs.py",
    "engine/generation/decode_step.py",
    "runtime/prepare/gpu.py",
)
"""Files that only GPUs need."""
MARKS = ("on_gpu(", "on_gpu:", "torch.cuda.", '== "cuda"', '!= "cpu"', "is_cuda", "mirrored:")
TESTS = (
    "gpu_branches",
    "nccl",
    "config/test_processor.py",
    "engine/generation/test_generation_on_a_gpu.py",
    "engine/generation/test_sampling.py",
    "engine/test_host_copies.py",
    "model/test_gpu_attention.py",
    "model/test_gpu_exact.py",
    "runtime/doctor",
    "runtime/launching/test_process.py",
    "runtime/output/test_costs.py",
    "runtime/output/test_performance.py",
    "runtime/preparing/test_devices.py",
    "runtime/test_profiler.py",
)
"""Tests of fake devices, of interpreted kernels, and of rules that machines with GPUs follow."""


def find_gpu_lines(file: Path) -> set[int]:
    """Find the lines of statements that run on GPUs alone."""
    source = file.read_text()
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If):
            test = ast.get_source_segment(source, node.test) or ""
            if any(mark in test for mark in MARKS):
                for statement in node.orelse if test.startswith("not ") else node.body:
                    lines |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            text = ast.get_source_segment(source, node) or ""
            if "torch.cuda." in text:
                lines.add(node.lineno)
    return lines


def list_files() -> Iterator[Path]:
    """List the modules of the rooms that know of devices."""
    for room in ROOMS:
        place = SOURCES / room
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def main() -> int:
    """Run the tests of this folder, and print what is left out; the exit status is that of the tests."""
    scratch = Path(tempfile.mkdtemp())
    # Processes that tests start read the settings from a file.
    (scratch / "coveragerc").write_text(
        f"[run]\nconcurrency = thread,multiprocessing\nparallel = true\nsource = {SOURCES}\n"
        f"data_file = {scratch / 'data'}\n"
    )
    measured = coverage.Coverage(config_file=str(scratch / "coveragerc"))
    measured.start()
    tests = [str(ROOT / "tests" / test) for test in TESTS]
    status = pytest.main([*tests, "-q", "-p", "no:cacheprovider"])
    measured.stop()
    measured.save()
    measured.combine()
    found = executed = 0
    for file in list_files():
        name = file.relative_to(SOURCES).as_posix()
        _, statements, _, missing, _ = measured.analysis2(str(file))
        wanted = set(statements)
        if not name.startswith(WHOLE):
            wanted &= find_gpu_lines(file)
        left_out = wanted & set(missing)
        found += len(wanted)
        executed += len(wanted) - len(left_out)
        if left_out:
            print(f"{name}: {', '.join(map(str, sorted(left_out)))}")
    print(f"{executed} of {found} lines that run on GPUs alone were executed")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
