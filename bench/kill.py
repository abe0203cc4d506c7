"""Kill processes of runs at points chosen by a seed, and compare the final models with undisturbed runs.

    python bench/kill.py [--points 80] [--seed 1] [--out DIR] [--asynchronous | --portions] [--plans ep=2 cp=2]

With --asynchronous, generation has ranks of its own, and samples whole or partial answers ahead of training, or
hands on the answers of a step in portions. With --plans, only cases with these plans run.
Each run is killed several times, once after every restart. SIGKILL hits one rank at an instruction, or in a phase
of writing a checkpoint. The run must end by itself, with exactly the final models of an undisturbed run. It must
leave no process, temporary file, shared memory or incomplete checkpoint behind.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from realrl.plan.cluster import Cluster
from realrl.recipe.load import parse_experiment
from realrl.testing.check import make_uniform_plan
from realrl.testing.records import list_sentences, make_up_records
from realrl.testing.shrink import MIXTURE, SHAPE, save_model

STEPS = 4
KILLS = 8
"""Number of kills of a run, and of its restarts."""
PATIENCE = 3600.0
"""Seconds after which a run, with all its restarts, counts as hung."""
CASES = (
    ("ppo", 2, "symmetric"),
    ("grpo", 2, "interleave"),
    ("ppo", 4, "disjoint"),
    ("grpo", 3, "disjoint"),
    ("ppo", 3, "interleave"),
    ("grpo", 4, "symmetric"),
    ("ppo", 4, "cp=2"),
    ("grpo", 2, "ep=2"),
    ("ppo", 2, "cp=2"),
    ("ppo", 2, "ep=2"),
    ("grpo", 2, "pp=2 vpp=2"),
)
"""Algorithm, number of processes and plan of each case: a preset, or degrees that all calls have. With `ep`,
models are mixtures, and ranks divide their experts in generation, too. With `cp`, some prompts are so long that
ranks must divide them. In generation, ranks divide the KV cache."""
MICRO_BATCH_TOKENS = 256
LONG, LONG_TOKENS = 4, 160
"""With `cp`, every `LONG`-th prompt has about so many tokens. One rank of a pool of two has no room for them."""
ASYNCHRONOUS_CASES = (
    ("ppo", 4, "openrlhf", 1),
    ("grpo", 4, "openrlhf", 2),
    ("ppo", 4, "openrlhf", 2, True),
    ("grpo", 2, "symmetric", 2, True),
    ("grpo", 4, "openrlhf", 3, True),
    ("grpo", 4, "openrlhf", 0, False, 4),
)
"""The same with the staleness, whether answers are partial, and the number of portions."""
PHASES = ("begin", "copied", "written", "commit", "committed", "prune", "pruned", "final", "saved")
"""Points that a rank passes while it saves a checkpoint or the final models. Only rank 0 passes the points from
`commit` to `pruned`."""
OF_WRITER = ("commit", "committed", "prune", "pruned")

HOOK = """
import os
if os.environ.get("RANK") is not None:
    import json, signal, threading
    from pathlib import Path
    rank, start = int(os.environ["RANK"]), int(os.environ.get("REALRL_RESTART", "0"))
    points = json.loads(os.environ["KILL_POINTS"])
    point = points[start] if start < len(points) and points[start]["rank"] == rank else None
    counts = {}

    def passed(name):
        counts[name] = counts.get(name, 0) + 1
        if point is not None and point["name"] == name and counts[name] == point["count"]:
            Path(os.environ["KILL_MARKS"], f"{start}").write_text(name)
            if point["delay"]:
                threading.Timer(point["delay"], os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    if point is not None:
        from realrl.runtime import checkpoint_writer
        from realrl.runtime.supervision.heartbeat import Activity
        from realrl.runtime.worker.roles import Roles

        def between(owner, name, before, after):
            action = getattr(owner, name)
            def wrapped(*arguments, **named):
                passed(before)
                result = action(*arguments, **named)
                passed(after)
                return result
            setattr(owner, name, wrapped)

        begin = Activity.begin
        def begun(self, instruction, *more, **named):
            begin(self, instruction, *more, **named)
            passed(instruction.split()[0])
        Activity.begin = begun
        write = checkpoint_writer.write_state
        def write_state(*arguments, copied, **named):
            def told():
                copied()
                passed("copied")
            passed("begin")
            write(*arguments, copied=told, **named)
            passed("written")
        checkpoint_writer.write_state = write_state
        between(checkpoint_writer, "commit", "commit", "committed")
        between(checkpoint_writer, "prune", "prune", "pruned")
        between(Roles, "save", "final", "saved")
"""
"""Code that every Python process of a run executes at its start (sitecustomize.py)."""


@dataclass(frozen=True)
class Case:
    """An algorithm, its number of processes and its plan."""

    algorithm: str
    size: int
    plan: str
    staleness: int = 0
    partial: bool = False
    portions: int = 1

    def __str__(self) -> str:
        ahead = f"-{'partial' if self.partial else 'ahead'}-{self.staleness}" if self.staleness else ""
        ahead += f"-portions-{self.portions}" if self.portions > 1 else ""
        return f"{self.algorithm}-{self.size}-{self.plan}{ahead}"


class World:
    """Directory with tokenizer, records, models and runs."""

    def __init__(self, root: Path) -> None:
        from realrl.huggingface.tokenizers import train_bpe

        self.root = root
        tokenizer = train_bpe(list_sentences(), SHAPE["vocab_size"])
        tokenizer.save_pretrained(str(root / "tokenizer"))
        records = make_up_records("prompt")
        _write_records(root / "prompts.jsonl", records)
        for record in records[::LONG]:
            text = record["prompt"]
            while len(tokenizer.encode(record["prompt"])) < LONG_TOKENS:
                record["prompt"] += f" {text}"
        _write_records(root / "long-prompts.jsonl", records)
        for kind, sizes in {"": SHAPE, "-mixture": MIXTURE, "-deep": {**SHAPE, "layers": 4}}.items():
            save_model(root / f"actor{kind}", "lm", tokenizer, sizes)
            save_model(root / f"reward{kind}", "scalar", tokenizer, sizes)
        (root / "patches").mkdir()
        (root / "patches" / "sitecustomize.py").write_text(HOOK)

    def write_recipe(self, case: Case, run_dir: Path) -> Path:
        """Write the recipe of a case."""
        degrees = dict(part.split("=") for part in case.plan.split() if "=" in part)
        kind = "-mixture" if "ep" in degrees else "-deep" if "vpp" in degrees else ""
        models: dict[str, Any] = {
            "actor": {"path": str(self.root / f"actor{kind}"), "optimizer": {"lr": 1e-3}},
            "reward": {"path": str(self.root / f"reward{kind}")},
        }
        section: dict[str, Any] = {"minibatches": 1 if case.portions > 1 else 2}
        if case.algorithm == "ppo":
            models["critic"] = {"optimizer": {"lr": 1e-3}}
            section = {**section, "value_norm": "running"}
        recipe = {
            "algorithm": case.algorithm,
            "run_dir": str(run_dir),
            "cluster": f"1x{case.size}",
            "device": "cpu",
            "plan": case.plan,
            "asynchrony": {"staleness": case.staleness, "partial": case.partial, "portions": case.portions},
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "models": models,
            "data": {
                "train": str(self.root / ("long-prompts.jsonl" if "cp" in degrees else "prompts.jsonl")),
                "batch": 8,
            },
            "training": {"steps": STEPS},
            "generation": {"max_new_tokens": 6},
            "checkpoint": {"every": 1},
            "launch": {"max_restarts": KILLS + 1, "shrink": False},
            "ppo" if case.algorithm == "ppo" else "policy": section,
        }
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        file = run_dir.parent / "recipe.yaml"
        if degrees:
            graph = parse_experiment({**recipe, "plan": "symmetric"}).graph
            numbers = {axis: int(degree) for axis, degree in degrees.items()}
            plan = make_uniform_plan(
                graph, Cluster(1, case.size), **numbers, micro_batch_tokens=MICRO_BATCH_TOKENS
            )
            recipe["plan"] = str(file.with_name("plan.yaml"))
            plan.save(recipe["plan"], graph)
        file.write_text(yaml.safe_dump(recipe))
        return file


def _write_records(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@dataclass
class Ended:
    """End of a run: errors, digests of its final files by name, and the kill points that it reached."""

    wrong: list[str]
    final: dict[str, str]
    killed: list[str]


def run(world: World, case: Case, name: str, points: list[dict[str, Any]]) -> Ended:
    """Run a case and kill it at these points."""
    directory = world.root / name
    recipe = world.write_recipe(case, directory / "run")
    for folder in ("temporary", "marks"):
        (directory / folder).mkdir()
    shared = set(os.listdir("/dev/shm"))
    variables = {
        "TMPDIR": str(directory / "temporary"),
        "KILL_POINTS": json.dumps(points),
        "KILL_MARKS": str(directory / "marks"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(world.root / "patches"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "realrl", "train", str(recipe)]
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, error = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended(["does not end"], {}, [])
    finally:
        leftover = _find_processes(f"KILL_MARKS={directory / 'marks'}")
    (directory / "error.txt").write_text(error)
    wrong = [] if process.returncode == 0 else [f"ends with status {process.returncode}: {error[-400:]}"]
    wrong += [f"leaves process {pid}" for pid in leftover]
    wrong += [f"leaves {file}" for file in os.listdir(directory / "temporary") if file.startswith("realrl")]
    wrong += [f"leaves /dev/shm/{file}" for file in set(os.listdir("/dev/shm")) - shared if "torch" in file]
    wrong += [f"leaves {file}" for file in (directory / "run").rglob(".*")]
    killed = [file.read_text() for file in sorted((directory / "marks").iterdir())]
    files = [file for file in sorted((directory / "run").glob("final*/**/*")) if file.is_file()]
    files += sorted((directory / "run").glob("final*.json"))
    final = {
        str(file.relative_to(directory / "run")): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    return Ended(wrong, final, killed)


def _find_processes(marker: str) -> list[int]:
    """Find the processes that have this variable in their environment."""
    time.sleep(0.5)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def choose_points(case: Case, verbs: dict[int, Counter[str]], chance: random.Random) -> list[dict[str, Any]]:
    """Choose where to kill each start of a run: a rank, an instruction or phase, and which of its occurrences."""
    points = []
    for _ in range(KILLS):
        rank = chance.randrange(case.size)
        if chance.random() < 0.4:
            name = chance.choice(PHASES[:7])
            rank = 0 if name in OF_WRITER else rank
            count = 1
        else:
            name = chance.choice(sorted(verbs[rank]))
            count = chance.randint(1, verbs[rank][name])
        delay = chance.choice((0.0, 0.0, 0.002, 0.02))
        points.append({"rank": rank, "name": name, "count": count, "delay": delay})
    # Only the last start saves the final models.
    points[-1] = {"rank": 0, "name": chance.choice(PHASES[7:]), "count": 1, "delay": 0.0}
    return points


def read_verbs(run_dir: Path, size: int) -> dict[int, Counter[str]]:
    """Count the instructions of each kind in a step, by rank."""
    found = {}
    for rank in range(size):
        lines = (run_dir / "programs" / f"train-rank{rank}.txt").read_text().splitlines()[1:]
        found[rank] = Counter(line.split()[0] for line in lines)
    return found


def main() -> None:
    """Run cases until there are enough kills; print all errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=80)
    parser.add_argument("--out", type=Path, help="directory to keep all runs in")
    parser.add_argument("--asynchronous", action="store_true", help="kill asynchronous runs")
    parser.add_argument("--portions", action="store_true", help="kill only runs with portions")
    parser.add_argument("--plans", nargs="+", help="run only cases with these plans")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as scratch:
        root = Path(scratch) if given.out is None else given.out
        root.mkdir(parents=True, exist_ok=True)
        world = World(root)
        cases: tuple[tuple[Any, ...], ...] = ASYNCHRONOUS_CASES if given.asynchronous else CASES
        if given.portions:
            cases = tuple(case for case in ASYNCHRONOUS_CASES if Case(*case).portions > 1)
        if given.plans:
            cases = tuple(case for case in cases if Case(*case).plan in given.plans)
        if not cases:
            parser.error(f"no case has a plan of {', '.join(given.plans)}")
        expected: dict[Case, Ended] = {}
        killed: Counter[str] = Counter()
        unreached: Counter[str] = Counter()
        wrong = number = 0
        while sum(killed.values()) < given.points:
            case = Case(*cases[number % len(cases)])
            number += 1
            if case not in expected:
                expected[case] = run(world, case, f"{case}-undisturbed", [])
                if expected[case].wrong:
                    sys.exit(f"{case}: {expected[case].wrong}")
            verbs = read_verbs(root / f"{case}-undisturbed" / "run", case.size)
            points = choose_points(case, verbs, chance)
            started = time.monotonic()
            ended = run(world, case, f"{case}-{number}", points)
            killed.update(ended.killed)
            unreached.update(point["name"] for point in points[len(ended.killed) :][:1])
            if not ended.wrong and ended.final != expected[case].final:
                differing = dict(expected[case].final.items() ^ ended.final.items())
                ended.wrong.append(f"ends with other bytes: {', '.join(sorted(differing))}")
            wrong += bool(ended.wrong)
            seconds = time.monotonic() - started
            names = ", ".join(ended.killed)
            print(f"{case} run {number}: {len(ended.killed)} kills ({names}) in {seconds:.0f} s", flush=True)
            for text in ended.wrong:
                print(f"  WRONG: {text}; points {json.dumps(points)}", flush=True)
        print(f"seed {given.seed}: {sum(killed.values())} kills in {number} runs, {wrong} of them wrong")
        print(", ".join(f"{name} {count}" for name, count in sorted(killed.items())))
        if unreached:
            # A run that has nothing left to do may end before its next point. If always the same name is missing,
            # nothing is killed there.
            missing = ", ".join(f"{name} {count}" for name, count in sorted(unreached.items()))
            print(f"runs ended before these points: {missing}")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
