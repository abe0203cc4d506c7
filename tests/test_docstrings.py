"""Form of public docstrings: their first lines can be read alone, in a list of names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

SOURCES = Path(__file__).parent.parent / "src" / "realrl"
CHECKED = ("planner", "checkpoint", "model", "families")
"""Top-level folders whose docstrings have the form; add each folder once it passes."""
LONGEST = 116
# fmt: off
BANNED = frozenset((
    "Of", "By", "What", "Whatever", "Which", "Who", "Whoever", "Whose", "That", "Those", "These", "This",
    "How", "When", "Where", "Why", "From", "To", "In", "On", "At", "As", "For", "With",
    "And", "But", "Or", "So", "If", "Because", "Than", "Then", "Such", "Also", "It", "Its",
    "They", "Their", "Them", "He", "She", "Here", "There",
))
# fmt: on
"""First words that refer to something said before, or that begin a clause without its subject."""
NOT_VERBS = frozenset(("A", "An", "The", "All", "Whether", "Number", "Seconds", "Bytes", "Tokens"))
"""First words that no function has, since functions are described by an imperative; properties may have them."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Documented = ast.Module | Definition


def find_fault(first_line: str, *, complete: bool, verb: bool) -> str | None:
    """Say what is wrong with a first line.

    `complete`: nothing or an empty line follows. `verb`: it describes a function or a method.
    """
    opening = re.match(r"[\w-]+", first_line)
    if not re.match(r"[A-Z0-9`]", first_line):
        return "begins with a capital"
    if first_line.startswith("The same ") or (opening and opening[0] in BANNED):
        return "can be read without what stands before it"
    if verb and opening and opening[0] in NOT_VERBS:
        return "says what the function does, as an imperative"
    if not complete and not re.search(r"[.:;](\s|$)", first_line):
        return "holds a whole phrase; details go into a paragraph of their own"
    if len(first_line) > LONGEST:
        return f"has at most {LONGEST} characters"
    return None


def find_faults(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and rule for everything public in a module whose docstring breaks one."""
    tree = ast.parse(source)
    if not tree.body:
        return
    for name, node in [("module", tree), *walk_public(tree, "")]:
        line = getattr(node, "lineno", 1)
        docstring = ast.get_docstring(node)
        if not docstring:
            yield line, name, "exists"
            continue
        first_line, *others = docstring.splitlines()
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        rule = find_fault(
            first_line,
            complete=not others or not others[0].strip(),
            verb=is_function and not is_property(node),
        )
        if rule is not None:
            yield line, name, f"{rule}: {first_line}"


def walk_public(parent: Documented, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Classes and functions of a module, and methods of its classes, whose names are public."""
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_") and not is_overload(node):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from walk_public(node, f"{prefix}{node.name}.")


def decorator_names(node: Documented) -> set[str]:
    if not isinstance(node, Definition):
        return set()
    return {ast.unparse(d).split("(")[0].rpartition(".")[2] for d in node.decorator_list}


def is_property(node: Documented) -> bool:
    return bool(decorator_names(node) & {"property", "cached_property"})


def is_overload(node: Documented) -> bool:
    return bool(decorator_names(node) & {"overload", "setter"})


@pytest.mark.parametrize("folder", CHECKED)
def test_first_lines_of_docstrings_can_be_read_alone(folder: str) -> None:
    files = sorted((SOURCES / folder).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(SOURCES)}:{line} {name}: the first line {rule}"
        for file in files
        for line, name, rule in find_faults(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "rule"),
    [
        ('"""Cost every candidate of a call."""', None),
        ('"""Return whether a plan fits.\n\n    Never raises.\n    """', None),
        ('"""Parse text. Raises UserError for\n    anything else."""', None),
        ('"""In-place update of a buffer."""', None),
        ("pass", "exists"),
        ('"""Of each call."""', "stands before"),
        ('"""The same for gradients."""', "stands before"),
        ('"""What a plan costs."""', "stands before"),
        ('"""Whether a plan fits."""', "imperative"),
        ('"""costs every candidate."""', "capital"),
        ('"""Cost every candidate of a call and of\n    others."""', "whole phrase"),
        (f'"""Cost {"every " * 30}candidate."""', "characters"),
    ],
)
def test_the_rule_knows_first_lines_that_stand_alone(docstring: str, rule: str | None) -> None:
    found = [text for _, _, text in find_faults(f'"""Costs."""\n\n\ndef cost():\n    {docstring}\n')]
    if rule is None:
        assert not found
    else:
        assert len(found) == 1 and rule in found[0]


def test_properties_are_nouns_and_private_names_are_free() -> None:
    source = '''
        """Plans."""

        class Plan:
            """Placement of every call."""

            @property
            def fits(self):
                """Whether every device has enough memory."""

            def _peak(self):
                """Of the peak device."""

        def _helper():
            """By rank."""
    '''
    assert not list(find_faults(dedent(source)))
