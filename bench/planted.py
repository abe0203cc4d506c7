"""Plant bugs in an algorithm and in rewards, one at a time, and count how many `realrl check` finds and explains.

The bugs are those that people report about training code. The algorithm is examples/online_dpo.py, the reward is
examples/verifier.py. `python examples/prepare.py` makes the data. A recipe without bugs must pass.

    python bench/planted.py [--json FILE] [--only NAME ...]
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from harness import Results, make_parser

ROOT = Path(__file__).parents[1]
LOSS, REWARD = "online_dpo.py", "verifier.py"


@dataclass(frozen=True)
class Bug:
    """A change of one line in a file, and what the finding about it must say."""

    file: str
    before: str
    after: str
    says: str


_SUM = "        loss = -logsigmoid(margin).sum()\n"
_SIGN = "        sign = (first - other).nan_to_num().sign()\n"
_MARGIN = "        margin = self._beta * sign * ((first - ref_first) - (other - ref_other))\n"
_SCORES = "    return scores\n"
BUGS = {
    "mean over a micro-batch": Bug(LOSS, _SUM, "        loss = -logsigmoid(margin).mean()\n", "micro-batch"),
    "maximum over a micro-batch": Bug(
        LOSS, _SUM, f"        margin = margin - margin.max()\n{_SUM}", "micro-batch"
    ),
    "metric averaged over a micro-batch": Bug(
        LOSS,
        'metrics.mean("margin", margin.sum(), len(batch))',
        'metrics.mean("margin", margin.mean(), 1)',
        "margin",
    ),
    "constant weight": Bug(LOSS, "return float(len(batch))", "return 8.0", "loss"),
    "advantages per rank": Bug(
        LOSS,
        _SIGN,
        f"{_SIGN}        sign = sign * (1 + (first + other).nan_to_num().mean())\n",
        "one rank",
    ),
    "first item of the rank": Bug(
        LOSS, _SIGN, f"{_SIGN}        sign = sign * (1 + batch.ids[0])\n", "one rank"
    ),
    "noise without a seed": Bug(
        LOSS,
        _MARGIN,
        f"{_MARGIN}        import torch\n        margin = margin + torch.rand(())\n",
        "not seeded",
    ),
    "time": Bug(
        LOSS,
        _MARGIN,
        f"{_MARGIN}        import time\n        margin = margin + time.time() % 1\n",
        "not seeded",
    ),
    "state that is not saved": Bug(
        LOSS,
        _SIGN,
        f"{_SIGN}        self.steps = getattr(self, 'steps', 0) + 1\n        sign = sign / self.steps\n",
        "state_dict",
    ),
    "reference of the micro-batch's first pair": Bug(
        LOSS, _SUM, f"        margin = margin - ref_first[0] / 100\n{_SUM}", "micro-batch"
    ),
    "random reward": Bug(
        REWARD, _SCORES, "    import random\n    return [random.random() for _ in scores]\n", "not"
    ),
    "reward relative to its list": Bug(
        REWARD,
        _SCORES,
        "    return [score - sum(scores) / len(scores) for score in scores]\n",
        "other completions",
    ),
    "reward by position": Bug(
        REWARD, _SCORES, "    return [score + i for i, score in enumerate(scores)]\n", "other completions"
    ),
    "reward that counts its calls": Bug(
        REWARD,
        _SCORES,
        "    names_one.calls = getattr(names_one, 'calls', 0) + 1\n"
        "    return [score + names_one.calls for score in scores]\n",
        "deterministic",
    ),
    "reward that knows its rank": Bug(
        REWARD,
        _SCORES,
        "    import os\n    return [score + int(os.environ.get('RANK', 0)) for score in scores]\n",
        "score",
    ),
    "reward that fails on empty answers": Bug(
        REWARD,
        'said = (text.lower().split() or [""])[0]',
        "said = text.lower().split()[0]",
        "empty completions",
    ),
    "reward that fails on long answers": Bug(
        REWARD,
        _SCORES,
        "    assert all(len(text) < 1000 for text in completions)\n    return scores\n",
        "4000 tokens",
    ),
    "reward that is not finite": Bug(
        REWARD, _SCORES, "    return [float('inf') if score == 0 else score for score in scores]\n", "inf"
    ),
}


def check(directory: Path, bug: Bug | None) -> str:
    """Run `realrl check` on the examples with a bug. Returns the problems that it prints, with their reasons."""
    for name in (LOSS, REWARD):
        code = (ROOT / "examples" / name).read_text(encoding="utf-8")
        if bug is not None and bug.file == name:
            assert bug.before in code, f"{name} has changed: {bug.before}"
            code = code.replace(bug.before, bug.after)
        (directory / name).write_text(code, encoding="utf-8")
    recipe = yaml.safe_load((ROOT / "examples" / "online_dpo.yaml").read_text(encoding="utf-8"))
    recipe |= {"algorithm": str(directory / LOSS), "reward": f"{directory / REWARD}:names_one"}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "realrl", "check", str(directory / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return "\n".join(re.findall(r"^PROBLEM.*(?:\n +.*)*", done.stdout, re.MULTILINE))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[*BUGS], choices=[*BUGS], metavar="NAME")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        problems = check(Path(scratch), None)
        print(f"without a bug: {problems or 'no problem'}", flush=True)
        for name in arguments.only:
            problems = check(Path(scratch), BUGS[name])
            found[name] = "explained" if BUGS[name].says in problems else "found" if problems else "missed"
            first = problems.splitlines()[0] if problems else ""
            print(f"{found[name]:10} {name}: {first}", flush=True)
    counts = {state: [*found.values()].count(state) for state in ("explained", "found", "missed")}
    print(counts)
    Results(arguments.json).add("planted", {"bugs": found, **counts})


if __name__ == "__main__":
    main()
