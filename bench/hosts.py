"""Run the demo's PPO stage on several hosts, and compare it with a run on one host.

Hosts are network namespaces of this machine. The cases are two hosts, two hosts with latency, a cut cable, a lost
host, and a Ray cluster of two local nodes. For each case, the output shows the seconds of a step, and whether
metrics and final weights equal those of the run on one host.

    python bench/hosts.py --steps 4

Needs root on Linux, ray, and a finished `make demo`.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from harness import ROOT, list_demo_overrides, read_lines, read_steps

sys.path.insert(0, str(ROOT))

from tests.hosts.network import Hosts, why_no_hosts
from tests.hosts.ray_nodes import make_ray_nodes

LIMIT = 3600.0
SMALL = 1e-3
"""A smaller metric is rounding noise, such as the KL divergence before the first update."""
CASES = ("hosts", "latency", "cut", "lost", "ray")
"""`cut`: the cable is cut during a step and restored 30 s later. `lost`: one of two hosts is switched off for
good, and another one joins later."""


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--demo", type=Path, default=ROOT, help="directory in which `make demo` was run")
    parser.add_argument("--delay", type=float, default=0.05, help="latency in each direction, in seconds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="all by default")
    given = parser.parse_args()
    reason = why_no_hosts() or ("" if find_spec("ray") else "needs ray: pip install 'realrl[ray]'")
    if reason:
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="realrl-hosts-") as scratch:
        top = Path(scratch)
        expected = run_locally(top / "one", given, "cluster=1x2")
        report("one host, two processes", expected, expected)
        for case in given.cases:
            report(case, run_case(case, top / case, given), expected)


def run_case(case: str, directory: Path, given: argparse.Namespace) -> Path:
    """Run a case in a new directory; return the run's directory."""
    if case == "ray":
        with make_ray_nodes(1, 1):
            return run_locally(directory, given, "cluster=2x1", "launch.by=ray")
    directory.mkdir()
    if case == "lost":
        return run_on_changing_hosts(directory, given)
    return run_on_two_hosts(directory, given, delay=given.delay * (case == "latency"), cut=case == "cut")


def list_overrides(run: Path, given: argparse.Namespace) -> list[str]:
    """List the overrides of the demo's recipe."""
    own = [f"run_dir={run}", "overwrite=false", f"training.steps={given.steps}", "checkpoint.every=1"]
    return [*own, *list_demo_overrides(given.demo)]


def run_locally(directory: Path, given: argparse.Namespace, *overrides: str) -> Path:
    """Run with the built-in launcher or Ray; return the run's directory."""
    directory.mkdir()
    command = [sys.executable, "-m", "realrl", "train", str(ROOT / "recipes/demo/ppo.yaml"), *overrides]
    subprocess.run([*command, *list_overrides(directory / "run", given)], check=True, cwd=ROOT)
    return directory / "run"


def run_on_two_hosts(directory: Path, given: argparse.Namespace, *, delay: float, cut: bool) -> Path:
    """Run on two hosts with torchrun; return the run's directory."""
    arguments = list_arguments(directory, given, "cluster=2x1")
    logs = [directory / f"host{host}.log" for host in range(2)]
    with Hosts(2) as hosts:
        hosts.delay(delay)
        processes = [hosts.torchrun(host, 2, logs[host], *arguments, restarts=3) for host in range(2)]
        if cut:
            wait_for_step(directory / "run", given.steps // 2, processes[0])
            hosts.cut(1)
            time.sleep(30)
            hosts.heal()
        said = await_end(processes, logs)
    if cut and "continues after step" not in said:
        sys.exit("the run was over before the cable was cut; give more --steps")
    return directory / "run"


def run_on_changing_hosts(directory: Path, given: argparse.Namespace) -> Path:
    """Run with torchrun on two hosts, then on one of these, then on this host and a new one.

    Returns the run's directory.
    """
    arguments = list_arguments(directory, given, "cluster=auto")
    logs = [directory / f"host{host}.log" for host in range(3)]
    with Hosts(3) as hosts:

        def start(host: int) -> "subprocess.Popen[bytes]":
            return hosts.torchrun(host, "1:2", logs[host], *arguments, restarts=3)

        first, _ = start(0), start(1)
        wait_for_step(directory / "run", given.steps // 3, first)
        hosts.lose(1)
        while "continues after step" not in logs[0].read_text() and first.poll() is None:
            time.sleep(0.5)
        hosts.heal()
        await_end([first, start(2)], logs)
    starts = read_lines(directory / "run" / "history.jsonl")
    print("started on", ", ".join(f"{line['cluster']} after step {line['step']}" for line in starts))
    return directory / "run"


def list_arguments(directory: Path, given: argparse.Namespace, cluster: str) -> list[str]:
    """List the arguments of `realrl` for the demo's PPO stage on a cluster."""
    recipe = str(ROOT / "recipes/demo/ppo.yaml")
    return ["train", recipe, cluster, *list_overrides(directory / "run", given)]


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait for the checkpoint after a step, or for the end of the process."""
    name = f"step-{step:06}"
    while max((file.name for file in (run / "checkpoints").glob("step-*")), default="") < name:
        if process.poll() is not None:
            break
        time.sleep(0.05)


def await_end(processes: Sequence["subprocess.Popen[bytes]"], logs: Sequence[Path]) -> str:
    """Wait for processes to succeed; print how they resumed after failures, and return their output."""
    statuses = [process.wait(LIMIT) for process in processes]
    said = "".join(log.read_text() for log in logs)
    if any(statuses):
        sys.exit(f"torchrun ended with {statuses}:\n{said}")
    for note in re.findall(r"^(?:note: continues after step \d+|realrl: rank \d+: .*)", said, re.MULTILINE):
        print(note)
    return said


def report(name: str, run: Path, expected: Path) -> None:
    """Print how a run compares with the expected one.

    A run that resumed on other devices differs by rounding, and later samples other tokens. Its steps are therefore
    compared only up to the third step after the change.
    """
    ours, theirs = read_steps(run), read_steps(expected)
    starts = read_lines(run / "history.jsonl")
    moved = next((line["step"] for line in starts if line["cluster"] != starts[0]["cluster"]), None)
    last = len(theirs) if moved is None else moved + 3
    worst, where = max(
        (abs(line["metrics"][key] - value) / max(abs(value), SMALL), f"{key} in step {line['step']}")
        for line, other in zip(ours[:last], theirs[:last], strict=True)
        for key, value in other["metrics"].items()
    )
    files = [file.relative_to(expected) for file in expected.glob("final*/*.safetensors")]
    same = all((run / file).read_bytes() == (expected / file).read_bytes() for file in files)
    seconds = statistics.median(line["seconds"] for line in ours[1:])
    weights = f"final weights {'bit-identical' if same else 'DIFFERENT'} ({len(files)} files)"
    print(
        f"{name}: {seconds:.2f} s a step; largest relative difference of a metric {worst:.1e} ({where});",
        weights if moved is None else f"compared up to step {last}",
        flush=True,
    )


if __name__ == "__main__":
    main()
