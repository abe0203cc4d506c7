import subprocess
import sys
from pathlib import Path

import pytest

from realrl.cli.app import run_app

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes" / "demo" / "ppo.yaml")


def realrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "realrl", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "show", "generate", "tokenizer", "report", "config"))


def test_config_alone_lists_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"grpo", "ppo", "reward", "sft"} <= {line.partition(":")[0] for line in lines}
    assert "reward: Reward modelling on preference pairs (Bradley-Terry)" in lines


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from realrl import __version__

    assert run_app(["--version"]) == 0
    assert capsys.readouterr().out == f"realrl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", DEMO, "data.btach=3"], "data.btach: unknown key; did you mean data.batch?"),
        (
            ["train", DEMO, "data.batch=63", "ppo.minibatches=2"],
            "data.batch=63 is not divisible by the 2 mini-batches of actor.train",
        ),
        (["show", DEMO, "cluster=1x2", "plan=disjoint"], "plan disjoint needs at least 4 devices"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run_app(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_users_mistake_ends_the_process_with_status_2_and_no_traceback() -> None:
    done = realrl("train", "nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "realrl: nowhere.yaml does not exist\n"


def test_an_interrupt_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: str, overrides: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("realrl.recipe.load.load_experiment", interrupt)
    assert run_app(["train", DEMO]) == 130


def test_show_prints_recipe_graph_and_plan_and_programs_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["show", DEMO, "data.batch=32"]) == 0
    brief = capsys.readouterr().out
    assert "batch: 32" in brief and "1. actor.generate" in brief and "# rank 1" not in brief
    assert run_app(["show", DEMO, "data.batch=32", "cluster=1x2", "--programs"]) == 0
    assert "# rank 1" in capsys.readouterr().out


def test_showing_a_recipe_loads_no_torch() -> None:
    script = (
        "import sys; from realrl.cli.app import run_app; "
        f"status = run_app(['show', {DEMO!r}, '--programs']); "
        "sys.exit(status or ('torch' in sys.modules and 3))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_prompts_come_from_the_lines_of_a_text_file(tmp_path: Path) -> None:
    from realrl.cli.generate import _read_lines

    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert _read_lines(str(tmp_path / "a.txt")) == [
        (f"{tmp_path / 'a.txt'}:{line}", {"prompt": prompt}) for line, prompt in ((1, "one"), (3, "two"))
    ]
