"""Runs that Python starts: equal to those of the command, with functions and callbacks of the script."""

import json
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import realrl
from tests.conftest import EVERY_RUN, World
from tests.runtime.processes import PATIENCE, heed_interrupts, until

SHORT: dict[str, Any] = {"training__steps": 2, "data__batch": 8}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row["metrics"].items() if not k.startswith("perf/")} for row in rows]


def assert_equal_runs(first: Path, second: Path) -> None:
    assert read_metrics(first) == read_metrics(second)
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (first, second))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_finished_run_is_returned_and_an_unfinished_one_resumes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(**more: Any) -> realrl.Algorithm:
        return realrl.SFT(
            model=world.actor, data=str(world.root / "sft.jsonl"), batch=8, steps=4, run_dir=str(tmp_path / "run"),
            device="cpu", cluster="1x1", micro_batch_tokens=256, **{"checkpoint.every": 1}, **more,
        )  # fmt: skip

    run = start(callbacks=lambda step: step.stop() if step.step == 2 else None).train()
    assert run.finished and [row["step"] for row in run.metrics] == [1, 2]
    assert "training ends after step 2 of 4" in capsys.readouterr().err
    again = start().train()
    assert repr(again) == repr(run) and "already finished" in capsys.readouterr().err
    assert "<table>" in again._repr_html_() and list(again.frame["step"]) == [1, 2]


@pytest.mark.parametrize("cluster", ["1x1", "1x2"])
def test_a_callback_scales_the_learning_rate_and_checkpoints_keep_it(
    cluster: str, world: World, tmp_path: Path
) -> None:
    def halve(step: realrl.Step) -> None:
        if step.step == 1:
            step.scale_learning_rate(0.5)
        if step.step == 3 and step.steps == 5:
            step.stop()

    def start(**more: Any) -> realrl.Run:
        return realrl.SFT(
            model=world.actor, data=str(world.root / "sft.jsonl"), batch=8, lr=1e-3, schedule="constant",
            run_dir=str(tmp_path / "run"), device="cpu", cluster=cluster, **{"checkpoint.every": 1}, **more,
        ).train()  # fmt: skip

    start(steps=5, callbacks=halve)
    later = 2 if cluster == "1x1" else 3
    rates = [row["actor.train/learning_rate"] for row in start(steps=6, resume="changed").metrics]
    assert len(rates) == 6
    assert rates == pytest.approx([1e-3 if step < later else 5e-4 for step in range(1, 7)])


def test_callbacks_see_steps_and_evaluations(world: World, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Watch:
        def on_step(self, step: realrl.Step) -> None:
            seen.append(("train", step.step))
            assert "actor.train/loss" in step.metrics and step.steps == 2

        def on_evaluation(self, step: realrl.Step) -> None:
            seen.append(("eval", step.step))

    data = str(world.root / "sft.jsonl")
    realrl.SFT(
        model=world.actor, data=data, eval_data=data, batch=8, steps=2, run_dir=str(tmp_path / "run"),
        device="cpu", cluster="1x1", callbacks=Watch(),
    ).train()  # fmt: skip
    assert seen == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]


def test_objects_of_transformers_train_like_their_directory(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (cls.from_pretrained(world.actor) for cls in (AutoModelForCausalLM, AutoTokenizer))
    for name, given in (
        ("run", {"model": world.actor}),
        ("python", {"model": model, "tokenizer": tokenizer}),
    ):
        realrl.SFT(
            **given, data=str(world.root / "sft.jsonl"), batch=8, steps=2, device="cpu", cluster="1x1",
            run_dir=str(tmp_path / name),
        ).train()  # fmt: skip
    assert_equal_runs(tmp_path / "run", tmp_path / "python")


SCRIPT = """
import pathlib

import realrl

weight = 2.0

def correct(completions, **_):
    return [weight * len(text) for text in completions]

run = realrl.GRPO(
    model={actor!r},
    reward={{"correct": correct, "half": lambda completions, **_: [0.5 * len(c) for c in completions]}},
    data={data!r}, samples=4, batch=8, steps=2, max_new_tokens=8, lr=1e-3,
    device="cpu", cluster={cluster!r}, run_dir={run!r}, micro_batch_tokens=256,
).train()
print(run)
# A thread of gloo that outlives its run can abort the interpreter at its end.
names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in names), names
"""


def run_script(directory: Path, world: World, *, cluster: str, torchrun: bool = False) -> list[float]:
    """Run a script without a `__main__` guard; the scores of its steps."""
    file, run = directory / "script.py", directory / f"run-{cluster}-{torchrun}"
    data = str(world.root / "ppo.jsonl")
    code = SCRIPT.format(actor=world.actor, data=data, cluster=cluster, run=str(run))
    file.write_text(textwrap.dedent(code))
    command = [sys.executable, str(file)]
    if torchrun:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(file),
        ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=300)
    assert done.returncode == 0, done.stderr
    return [metrics["actor.train/score"] for metrics in read_metrics(run)]


def test_functions_of_a_script_reach_the_processes_of_its_run(world: World, tmp_path: Path) -> None:
    """Under our launcher and under torchrun, a function with a variable of the script and a lambda."""
    assert len(launched := run_script(tmp_path, world, cluster="1x2")) == 2
    if EVERY_RUN:
        assert run_script(tmp_path, world, cluster="1x1") == pytest.approx(launched, rel=1e-4)
        assert run_script(tmp_path, world, cluster="auto", torchrun=True) == pytest.approx(launched, rel=1e-4)


@pytest.mark.parametrize("cluster", ["1x1", pytest.param("1x2", marks=pytest.mark.exhaustive)])
def test_ctrl_c_saves_and_the_same_process_can_train_again(
    cluster: str, world: World, tmp_path: Path
) -> None:
    file, run = tmp_path / "script.py", tmp_path / "run"
    file.write_text(
        "import realrl\n"
        f"def train(steps):\n"
        f"    return realrl.SFT({world.actor!r}, data={str(world.root / 'sft.jsonl')!r}, batch=8, steps=steps,\n"
        f"        device='cpu', cluster={cluster!r}, run_dir={str(run)!r}).train()\n"
        "try:\n"
        "    train(100000)\n"
        "except KeyboardInterrupt as error:\n"
        "    print('STOPPED', error)\n"
        "    done = max(row['step'] for row in realrl.Run(" + repr(str(run)) + ").metrics)\n"
        "    print(train(done + 1))\n"
        "    raise\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    try:
        until((run / "metrics.jsonl").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT
    assert re.search(r"^STOPPED interrupted after step \d+ of 100000; saved: ", out, re.MULTILINE), err
    assert re.search(r"^Run\(.* steps, finished\)$", out, re.MULTILINE)
    assert "src/realrl" not in err and err.splitlines()[-1].startswith(
        "KeyboardInterrupt: interrupted after step"
    )


def test_a_mistake_is_one_message_under_the_line_of_the_script(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import realrl\n\nrealrl.GRPO(model='m', data='d.jsonl', reward=len, sampels=4)\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f'File "{file}", line 3' in done.stderr and "src/realrl" not in done.stderr
    assert done.stderr.endswith("realrl.UserError: grpo has no argument sampels; did you mean samples?\n")


def test_a_broken_reward_shows_the_trace_of_the_script_alone(world: World, tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        return [1 / 0 for _ in completions]

    with pytest.raises(realrl.UserError, match="ZeroDivisionError") as caught:
        realrl.GRPO(
            model=world.actor, reward=broken, data=str(world.root / "ppo.jsonl"), samples=2, batch=4, steps=1,
            max_new_tokens=4, device="cpu", cluster="1x1", run_dir=str(tmp_path / "run"),
        ).train()  # fmt: skip
    assert "broken" in str(caught.value)


LIGHT = {
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "realrl",
    "typing_extensions",
    "typing_inspection",
    "xxhash",
    "yaml",
}
LOADED = """
import sys
before = set(sys.modules)
{code}
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
# Python's build and the compiled part of PyYAML add modules of no file.
names = {{name for name in names if not name.startswith(("_", "cython"))}}
print(*sorted(names - sys.stdlib_module_names))
"""


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import realrl", {"realrl"}),
        ("import realrl; realrl.UserError", {"realrl"}),
        ("import realrl; realrl.GRPO, realrl.Session, realrl.LLM, realrl.Run, realrl.Sampling", LIGHT),
    ],
)
def test_the_package_is_imported_without_anything_heavy(code: str, modules: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code)], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == modules
