"""Choice of matrix products: kept per processor, measured once, and harmless where neither works."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.config import hardware
from realrl.config.hardware import ProductChoice, choose_products, computes_on_gpus, keep_choice


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measurements so far, each of which finds both ways faster, in a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = []

    def run(command, **_):
        commands.append(command)
        answer = "a warning\n" + json.dumps({"onednn": True, "bfloat16": True, "packed": True}) + "\n"
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(hardware.subprocess, "run", run)
    return commands


def test_a_measurement_is_kept_for_the_next_process(measured: list[list[str]]) -> None:
    assert choose_products() == ProductChoice(onednn=True, bfloat16=True, packed=True) == choose_products()
    assert len(measured) == 1 and measured[0][0] == sys.executable


def test_another_processor_is_measured_again(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_products()
    monkeypatch.setattr(hardware, "find_processor_name", lambda: "another one")
    choose_products()
    assert len(measured) == 2


def test_a_file_that_is_damaged_is_measured_again(measured: list[list[str]], tmp_path: Path) -> None:
    keep_choice(ProductChoice())
    (file,) = tmp_path.rglob("*.json")
    file.write_text('{"onednn": ')
    assert choose_products().bfloat16 and len(measured) == 1


def test_a_cache_that_cannot_be_written_is_no_error(
    measured: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_products().onednn


def test_a_failed_measurement_says_so_and_leaves_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "No module named torch")
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: failed)
    assert choose_products() == ProductChoice()
    assert "No module named torch" in capsys.readouterr().err and not list(tmp_path.rglob("*.json"))


def test_the_measurement_prints_a_choice() -> None:
    command = [sys.executable, "-m", "realrl.runtime.profiler.products"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == {"onednn", "bfloat16", "packed"}


@pytest.mark.parametrize(
    ("device", "cluster", "gpus"),
    [
        ("cpu", "h100:1x8", False),
        ("cuda", "1x1", True),
        ("auto", "h100:2x8", True),
        ("auto", "cpu:1x2", False),
    ],
)
def test_devices_of_a_recipe(device: str, cluster: str, gpus: bool) -> None:
    assert computes_on_gpus(device, cluster) is gpus
