"""A run on this machine is nobody else's: its files have no other reader, and its ports are on loopback."""

import os
import stat
import sys
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.files import make_private
from tests.conftest import World
from tests.runtime.processes import end, ranks, start, until

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""Addresses as /proc/net/tcp and tcp6 write them: 127.0.0.1, ::1, and the first as an IPv6 address."""


def find_listeners(process: int) -> set[str]:
    """Find the addresses at which a process listens, in hexadecimal."""
    folder = Path("/proc") / str(process)
    sockets = {os.readlink(link) for link in (folder / "fd").iterdir() if link.is_symlink()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in (folder / "net" / table).read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets
    }


def get_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_alone_and_their_files_are_private(world: World, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    recipe = world.recipe("sft", tmp_path, cluster="1x2", training__steps=1_000_000)
    launcher = start("train", str(recipe), TMPDIR=str(temporary))
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() or launcher.poll() is not None)
        listeners = {rank: find_listeners(process) for rank, process in ranks(launcher.pid).items()}
        scratch = list(temporary.glob("realrl-*"))
        modes = [get_mode(path) for path in (tmp_path / "run", *scratch)]
        store = [path for path in scratch[0].iterdir() if path.is_socket()]
    finally:
        launcher.terminate()
        end(launcher)
    assert listeners.keys() == {0, 1} and all(listeners.values()), "gloo connects its ranks by ports"
    assert set().union(*listeners.values()) <= LOOPBACK
    assert modes == [0o700] * (1 + len(scratch)) and scratch and not store


def test_a_run_directory_that_is_there_keeps_its_mode(world: World, tmp_path: Path) -> None:
    shared = tmp_path / "run"
    shared.mkdir()
    shared.chmod(0o750)
    assert run_app(["train", str(world.recipe("sft", tmp_path, training__steps=1))]) == 0
    assert get_mode(shared) == 0o750


def test_directories_above_a_private_one_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        make_private(tmp_path / "above" / "private")
    finally:
        os.umask(before)
    assert get_mode(tmp_path / "above") == 0o755
    assert get_mode(tmp_path / "above" / "private") == 0o700
