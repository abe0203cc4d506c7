"""Several hosts on this machine, each with a network address and a host name of its own."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

PORT = 29500
"""Where hosts meet; every host has all ports of its own."""

_SWITCH = Path(__file__).with_name("switch.py")


@cache
def why_no_hosts() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for command in ("ip", "nsenter"):
        if shutil.which(command) is None:
            return f"needs the command {command}"
    try:
        with Hosts(1):
            return ""
    except OSError as error:
        return f"namespaces cannot be made here: {error}"


class Hosts:
    """Hosts on one network. All of their processes end when the block does, or this process."""

    def __init__(self, count: int) -> None:
        """Make the hosts; OSError where that is forbidden."""
        self._switch = subprocess.Popen(
            [sys.executable, str(_SWITCH), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._holders = []
        for _ in range(count):
            line = _of(self._switch.stdout).readline()
            if not line:
                _, error = self._switch.communicate()
                raise OSError(error.strip().splitlines()[-1] if error.strip() else "no reason given")
            self._holders.append(int(line.split()[1]))

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.kill()
        self._switch.wait()
        for stream in (self._switch.stdin, self._switch.stdout, self._switch.stderr):
            _of(stream).close()

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def delay(self, seconds: float) -> None:
        """From now on, each packet takes so long."""
        self._say(f"delay {seconds}")

    def cut(self, host: int) -> None:
        """Pull the cable of a host: packets vanish, and nobody is told."""
        self._say(f"cut {host}")

    def heal(self) -> None:
        """Plug in all cables."""
        self._say("heal")

    def lose(self, host: int) -> None:
        """Switch a host off for good: its processes are killed, and nobody is told."""
        self.cut(host)
        # The system has processes of a host end with its first one.
        os.kill(self._holders[host], signal.SIGKILL)

    def start(
        self, host: int, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host, which writes its output to `log`."""
        spaces = ("--net", "--uts", "--pid", "--mount", f"--wd={os.getcwd()}")
        with log.open("ab") as output:
            return subprocess.Popen(
                ["nsenter", f"--target={self._holders[host]}", *spaces, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )

    def torchrun(
        self, host: int, hosts: int | str, log: Path, *arguments: str, restarts: int = 0
    ) -> "subprocess.Popen[bytes]":
        """Start torchrun for a process of `realrl ARGUMENTS` on one of `hosts`, which may be a range: 1:2."""
        command = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(hosts), "--nproc-per-node", "1", "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:{PORT}", "--rdzv-id", "test"),
            *(
                "--rdzv-conf",
                f"is_host={int(host == 0)},read_timeout=300",
                "--local-addr",
                self.address(host),
            ),
            *("-m", "realrl", *arguments),
        )
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return self.start(host, command, log, variables)

    def _say(self, command: str) -> None:
        stream = _of(self._switch.stdin)
        stream.write(command + "\n")
        stream.flush()


def _of(stream: "IO[str] | None") -> "IO[str]":
    assert stream is not None
    return stream
