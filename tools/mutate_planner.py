"""Break formulas of the planner, one at a time, and list the changes that no test notices.

    python tools/mutate_planner.py
    python tools/mutate_planner.py --mutants 60 --seed 4 --under cost memory
    python tools/mutate_planner.py --list

A mutant is the planner with one change: `*` for `/`, `+` for `-`, `min` for `max`, a term or a factor left out, a
constant doubled, zeroed or off by one, a ceiling turned into a floor, one branch of a condition for both, a
result replaced by 0. A seed draws mutants evenly from all formulas. Each mutant is tried on a copy of `src` with
the planner's tests, the fastest files first, until a test fails. The exit status is 1 if a mutant survives.
"""

import argparse
import ast
import compileall
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SOURCES = "src/realrl/planner"
PLACES = (
    *("cluster", "cost", "memory", "moves", "operators", "simulate", "workload"),
    *("search/many_plans.py", "search/tables.py"),
)
TESTS = "tests/planner"
SHORTEST_ROUND_S = 5.0
"""Seconds of the first round of test files that a mutant is tried with."""
STRANGE = 16 << 30
"""Limit of address space in bytes, which no test reaches. A mutant that exceeds the limit fails."""
LONGEST_S = 1200
"""Seconds after which a mutant's tests count as failed, because some mutants never end."""

UNTESTED: dict[tuple[str, str], str] = {
    ("moves/links.py", "_AT_ONCE"): "size of blocks, which results do not depend on",
    ("moves/links.py", "_parts"): "size of blocks, which results do not depend on",
}
"""Functions and constants that are not mutated, by (file, name), and why no test can notice a change."""

SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
EXTREMES = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}
MOST_COUNTED = 16
"""Largest integer that may be a count, and is therefore also changed by one."""
NUMBERS = ("int", "float", "Real", "Ints", "Floats")
"""Return types of functions whose result a mutant replaces by 0."""
NO_NUMBERS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.JoinedStr)
NO_FORMULAS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of a file of the planner: `text[begin:end]`, which is `before`, becomes `after`."""

    file: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the file with the change."""
        return text[: self.begin] + self.after + text[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"{self.file}:{self.line}: {before}  ->  {after}"


def list_mutants(places: Sequence[str]) -> list[Mutant]:
    """List all mutants of the formulas in these files and folders, in the order of files and lines."""
    found = [ROOT / SOURCES / place for place in places]
    for place in found:
        if not place.exists():
            sys.exit(f"{place} does not exist")
    files = (file for place in found for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place]))
    return [mutant for file in files for mutant in _list_in_file(file)]


def _list_in_file(file: Path) -> Iterator[Mutant]:
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT / SOURCES).as_posix()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen = set()
    for node in _walk_formulas(ast.parse(text), name):
        begin, end = (
            starts[line - 1] + _count_characters(text, starts[line - 1], column)
            for line, column in (
                (node.lineno, node.col_offset),
                (node.end_lineno or 0, node.end_col_offset or 0),
            )
        )
        for changed in _change(node):
            mutant = Mutant(name, node.lineno, begin, end, text[begin:end], changed)
            # Two changes of a constant may give the same number: 2 * 1 is 1 + 1.
            if (begin, end, changed) not in seen and mutant.before != changed:
                seen.add((begin, end, changed))
                yield mutant


def _count_characters(text: str, start: int, column: int) -> int:
    """Count the characters in the first `column` bytes of the line that begins at `start`."""
    return len(text[start : start + column].encode()[:column].decode())


def _walk_formulas(node: ast.AST, name: str, *, inside: str = "") -> Iterator[ast.expr | ast.Return]:
    """Walk through the expressions that results depend on, without messages, types, decorators and texts."""
    if isinstance(node, NO_FORMULAS):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = node.name
        if (name, inside) in UNTESTED or inside == "__str__":
            return
        children: Iterator[ast.AST] = iter(node.body)
        if isinstance(node, ast.FunctionDef):
            returns = ast.unparse(node.returns) if node.returns else ""
            for child in ast.walk(node) if returns in NUMBERS else ():
                if isinstance(child, ast.Return) and not isinstance(child.value, ast.Constant):
                    yield child
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any((name, ast.unparse(target)) in UNTESTED for target in targets):
            return
        children = iter([node.value] if node.value else [])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.expr):
        yield node
    for child in children:
        yield from _walk_formulas(child, name, inside=inside)


def _change(node: ast.expr | ast.Return) -> Iterator[str]:
    """List the source texts that replace an expression."""
    match node:
        case ast.Return():
            yield "return 0"
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not _is_no_number(left, right):
            yield f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"
            yield f"({ast.unparse(left)})"
            if isinstance(op, ast.Add | ast.Mult):
                yield f"({ast.unparse(right)})"
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            others = [2 * value, 0] if value else [1]
            yield from map(str, others + [value + 1] * (isinstance(value, int) and 0 < value <= MOST_COUNTED))
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)):
            yield f"({ast.unparse(left)} // {ast.unparse(right)})"
        case ast.Call(ast.Name("ceil") | ast.Attribute(ast.Name("math"), "ceil"), [argument]):
            yield f"int({ast.unparse(argument)})"
        case ast.Call(ast.Attribute(ast.Name("np"), "ceil"), [argument]):
            yield f"np.floor({ast.unparse(argument)})"
        case ast.Call(ast.Attribute(ast.Name("np"), "where"), [_, body, orelse]):
            yield from (f"({ast.unparse(branch)})" for branch in (body, orelse))
        case ast.Call(ast.Name(name), [_, _, *_], _) if name in EXTREMES:
            yield f"{EXTREMES[name]}({', '.join(map(ast.unparse, [*node.args, *node.keywords]))})"
        case ast.Call(ast.Attribute(of, name), _, _) if name in EXTREMES:
            arguments = ", ".join(map(ast.unparse, [*node.args, *node.keywords]))
            yield f"{ast.unparse(of)}.{EXTREMES[name]}({arguments})"
        case ast.IfExp(_, body, orelse):
            yield from (f"({ast.unparse(branch)})" for branch in (body, orelse))


def _is_no_number(*operands: ast.expr) -> bool:
    """Return whether an operand is evidently a text or a collection."""
    return any(
        isinstance(one, NO_NUMBERS) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in operands
    )


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw mutants by a seed, one from each of `count` equal parts of the list."""
    generator = random.Random(seed)
    bounds = [i * len(mutants) // count for i in range(count + 1)]
    return [generator.choice(mutants[a:b]) for a, b in pairwise(bounds) if a < b]


class Copies:
    """Copies of the sources. Each copy tries one mutant at a time."""

    def __init__(self, directory: Path, number: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for i in range(number):
            copy = directory / str(i)
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            # Compile once, not in every run. Python compiles a mutant's file again, because it is newer.
            compileall.compile_dir(copy, quiet=2)
            self._free.put(copy)

    def time_files(self, files: Sequence[str]) -> dict[str, float]:
        """Run tests of the unchanged sources, and return the seconds by file. Exits if a test fails."""
        copy = self._free.get()
        report = copy / "report.xml"
        failed = _run_tests(copy, files, f"--junitxml={report}")
        if failed:
            sys.exit(f"tests fail without any mutant: python -m pytest -x {' '.join(files)}")
        seconds = dict.fromkeys(files, 0.0)
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[f"{case.attrib['classname'].replace('.', '/')}.py"] += float(case.attrib["time"])
        self._free.put(copy)
        return seconds

    def kills(self, mutant: Mutant, rounds: Sequence[Sequence[str]]) -> bool:
        """Return whether a test notices a mutant."""
        copy = self._free.get()
        file = copy / Path(SOURCES).relative_to("src") / mutant.file
        text = file.read_text(encoding="utf-8")
        file.write_text(mutant.apply(text), encoding="utf-8")
        try:
            return any(_run_tests(copy, files) for files in rounds)
        finally:
            file.write_text(text, encoding="utf-8")
            self._free.put(copy)


def _run_tests(copy: Path, files: Sequence[str], *options: str) -> bool:
    """Run tests on a copy of the sources until a test fails. Returns whether a test has failed."""
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *files]
    limited = ["sh", "-c", f'ulimit -v {STRANGE >> 10}; exec "$@"', "sh", *command]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        limited, cwd=ROOT, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as tests:
        try:
            return tests.wait(LONGEST_S) != 0
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            return True


def order_rounds(seconds: Mapping[str, float]) -> list[list[str]]:
    """Divide test files into rounds, fast files first. Each round takes several times as long as the one before."""
    rounds: list[list[str]] = [[]]
    spent, limit = 0.0, SHORTEST_ROUND_S
    for file in sorted(seconds, key=lambda file: seconds[file]):
        if rounds[-1] and spent + seconds[file] > limit:
            rounds.append([])
            spent, limit = 0.0, 4 * limit
        rounds[-1].append(file)
        spent += seconds[file]
    return rounds


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=30, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--under", nargs="+", default=PLACES, help=f"files and folders of {SOURCES}")
    parser.add_argument("--parallel", type=int, default=2, help="how many are tried at a time")
    parser.add_argument("--tests", nargs="+", default=[TESTS], help="files or folders of tests")
    parser.add_argument("--list", action="store_true", help="print the mutants that are drawn, and try none")
    return parser.parse_args()


def main() -> int:
    """Try mutants and print what happens to them; return the exit status."""
    arguments = parse_arguments()
    everything = list_mutants(arguments.under)
    drawn = draw(everything, arguments.mutants, arguments.seed)
    print(f"{len(drawn)} of {len(everything):,} mutants, seed {arguments.seed}", flush=True)
    if arguments.list:
        print(*drawn, sep="\n")
        return 0
    paths = [ROOT / path for path in arguments.tests]
    found = [
        file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]
    files = [str(file.relative_to(ROOT)) for file in found]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.parallel) as pool:
        copies = Copies(Path(directory), arguments.parallel)
        shares = [files[i :: arguments.parallel] for i in range(arguments.parallel)]
        seconds: dict[str, float] = {}
        for share in pool.map(copies.time_files, filter(None, shares)):
            seconds |= share
        rounds = order_rounds(seconds)
        alive = []
        results = pool.map(lambda mutant: copies.kills(mutant, rounds), drawn)
        for mutant, killed in zip(drawn, results, strict=True):
            print(f"{'killed' if killed else 'ALIVE '}  {mutant}", flush=True)
            alive += [] if killed else [mutant]
    print(f"{len(alive)} of {len(drawn)} mutants live; {time.perf_counter() - began:.0f} s")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
