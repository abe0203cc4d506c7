"""Every command that a document names is understood; where it takes neither weights nor runs, it is executed."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from realrl.cli.app import app, run_app
from realrl.recipe.load import load_experiment
from tests.conftest import World, thin

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")),
)
PROGRAMS = ("realrl", "make", "python", "torchrun", "pip", "git", "cd")
"""What a line must begin with to be a command."""


def commands() -> Iterator[tuple[str, str]]:
    """(document, command) in fenced blocks, in code inside prose and tables, in the Makefile, in recipes."""
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        yield from _commands(name, [*lines, *re.findall(r"`([^`]+)`", prose)])
    make = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$(BIN)/", "")
    yield from _commands("Makefile", [line.strip() for line in make.splitlines() if line.startswith("\t")])
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        comments = "\n".join(re.findall(r"^# *(.*)$", file.read_text(), re.MULTILINE)).replace("\\\n", " ")
        found = [*comments.splitlines(), *re.findall(r"`([^`]+)`", comments)]
        yield from _commands(str(file.relative_to(ROOT)), found)


def _commands(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line.split()[:1] not in [[program] for program in PROGRAMS]:
            continue
        words = shlex.split(" ".join(line.split()), comments=True)
        if len(words) > 1:
            yield name, shlex.join(words)


COMMANDS = sorted(set(commands()))


def of(program: str) -> list[Any]:
    return [
        pytest.param(*found, id=f"{found[0]}: {found[1][:90]}")
        for found in COMMANDS
        if found[1].split()[0] == program
    ]


def test_documents_name_commands_of_every_program() -> None:
    counts = {program: len(of(program)) for program in PROGRAMS}
    assert counts["realrl"] >= 25 and counts["make"] >= 8 and counts["python"] >= 9 and counts["pip"] >= 3


@pytest.fixture
def here(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with the recipes, the documents, and what their placeholders stand for."""
    for name in ("recipes", "docs", "bench", "demo", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file, document in {"mine.yaml": "docs/planning.md", "mi300x.yaml": "CONTRIBUTING.md"}.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        (tmp_path / file).write_text(re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0])
    (tmp_path / "small").mkdir()
    world.recipe("ppo", tmp_path / "small")
    (tmp_path / "runs" / "plan-demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(command: str, here: Path) -> list[str]:
    """The arguments of a command, with placeholders replaced."""
    names = {
        "RECIPE": str(here / "small" / "recipe.yaml"),
        "PLAN": "symmetric",
        "DIR": "runs",
        "RUN_DIR": "run",
    }
    return [names.get(word, word) for word in shlex.split(command)[1:]]


@pytest.mark.parametrize(("document", "command"), of("realrl"))
def test_every_realrl_command_is_understood(here: Path, document: str, command: str) -> None:
    group: Any = typer.main.get_command(app)
    name, *arguments = filled(command, here)
    if name.startswith("-"):
        assert run_app([name]) == 0
        return
    assert name in group.commands, f"{document}: there is no command {name}"
    while arguments and hasattr(group.commands[name], "commands"):
        group, (name, *arguments) = group.commands[name], arguments
        assert name in group.commands, f"{document}: there is no command {name}"
    if not arguments:
        return
    if len(arguments) == 1 and arguments[0].startswith("--"):  # an option that is talked about
        assert any(arguments[0] in option.opts for option in group.commands[name].params), document
        return
    context = group.commands[name].make_context(name, list(arguments))
    recipe = context.params.get("recipe")
    if recipe is not None and recipe != "run":  # the directory of a run
        load_experiment(recipe, context.params["overrides"] or [])


def is_complete(command: str) -> bool:
    """Whether it names all that it needs, and neither weights nor runs."""
    name, *arguments = shlex.split(command)[1:]
    if name == "config":
        return bool(arguments)
    recipe = any(word == "RECIPE" or word.endswith(".yaml") for word in arguments[:1])
    return name in ("plan", "show") and recipe and "RUN_DIR" not in arguments


COMPLETE = {
    command: document
    for document, command in COMMANDS
    if document in DOCUMENTS and command.startswith("realrl ") and is_complete(command)
}
"""Command -> a document that has it."""
FAILING = ("realrl show recipes/reference/ppo.yaml plan=disjoint cluster=2x8 device_memory=79.2GiB",)
"""Those of which the document shows the error message."""


@pytest.mark.parametrize(
    "command",
    [
        *(command for command in COMPLETE if not command.startswith("realrl plan ")),
        *thin((command for command in COMPLETE if command.startswith("realrl plan ")), 2),
    ],
)
def test_a_command_that_needs_no_weights_does_what_the_document_says(
    here: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    document, arguments = COMPLETE[command], filled(command, here)
    status = run_app([*arguments, *(["--effort", "5000"] if arguments[0] == "plan" else [])])
    said = capsys.readouterr().err
    if command not in FAILING:
        assert status == 0, f"{document} does not say that this fails: {said}"
        return
    message = said.removeprefix("realrl: ").strip()
    text = " ".join((ROOT / document).read_text().split())
    assert status == 2 and message and message in text, f"{document} has another message: {said}"


def test_commands_that_fail_are_in_documents() -> None:
    assert set(FAILING) <= set(COMPLETE)


@pytest.mark.parametrize(("document", "command"), of("make"))
def test_every_make_target_exists(document: str, command: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(word in targets for word in shlex.split(command)[1:] if "=" not in word), (
        f"{document}: {command}"
    )


class Understood(Exception):
    """The arguments of a script have been parsed."""


@pytest.mark.parametrize(("document", "command"), of("python"))
def test_every_script_understands_its_arguments(
    here: Path, monkeypatch: pytest.MonkeyPatch, document: str, command: str
) -> None:
    arguments = filled(command, here)
    if arguments[0] == "-m":
        module, *rest = arguments[3:] if arguments[1] == "pdb" else arguments[1:]
        assert module in ("realrl", "pip", "pytest", "venv"), f"{document}: {command}"
        if module == "realrl":
            test_every_realrl_command_is_understood(here, document, shlex.join(["realrl", *rest]))
        return
    script = ROOT / arguments[0]
    assert script.is_file(), f"{document}: {command}"
    if "parse_args" not in script.read_text():
        assert len(arguments) == 1, f"{document}: {arguments[0]} takes no arguments"
        return

    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        parse(self, *given, **more)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments[1:]])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(Understood):
        runpy.run_path(str(script), run_name="__main__")


def test_installing_names_the_extras_there_are() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for document, command in COMMANDS:
        for found in re.findall(r"\[([a-z,]+)\]", command if command.startswith("pip") else ""):
            assert set(found.split(",")) <= set(extras), document


@pytest.mark.parametrize("algorithm", ["sft", "reward", "ppo"])
def test_the_description_of_a_recipe_lists_the_names_of_shapes(
    capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    from realrl.families.sizes import SHAPES

    assert run_app(["config", algorithm, "--all"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"{re.escape(name)}[,.]", text) for name in SHAPES)
