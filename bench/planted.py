"""Plant bugs in an algorithm and in rewards, one at a time, and count how many `realrl check` finds and explains.

The bugs are those that people report about training code. The algorithm is examples/online_dpo.py, the reward is
examples/verifier.py. `python examples/prepare.py` makes the data. A recipe without bugs must pass.

    python bench/planted.py [--json FILE] [--only NAME ...] [--shipped]

`--shipped` also checks every recipe in recipes/ and examples/, with made-up records and small models for those that
are not in the repository. They have no bug, so each problem is a false alarm.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from harness import ROOT, Results, make_parser

from realrl.huggingface.tokenizers import save_tokenizer, train_bpe
from realrl.recipe.registry import find_algorithm
from realrl.testing import make_up_records

EXAMPLES = ROOT / "examples"
LOSS, REWARD, DATA = "online_dpo.py", "verifier.py", "questions.jsonl"


@dataclass(frozen=True)
class Bug:
    """A change of a file, and what the finding about it must say."""

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
    "state in a global of the run": Bug(
        LOSS,
        _SIGN,
        f"{_SIGN}        import os\n"
        "        counts = vars(type(self)).get('counts', {})\n"
        "        type(self).counts, run = counts, os.environ['REALRL_STORE']\n"
        "        counts[run] = counts.get(run, 0) + 1\n"
        "        sign = sign / counts[run]\n",
        "in no checkpoint",
    ),
    "reference of the micro-batch's first pair": Bug(
        LOSS, _SUM, f"        margin = margin - ref_first[0] / 100\n{_SUM}", "micro-batch"
    ),
    "labels shifted by one": Bug(
        LOSS,
        "output.logprobs[answers.index])",
        "output.logprobs[answers.index - 1])",
        "never learns to stop",
    ),
    "loss cut off from the model": Bug(
        LOSS, _SUM, f"        margin = margin.detach() + 0 * first\n{_SUM}", "cuts the loss off"
    ),
    "beginning of sequence twice": Bug(DATA, '"prompt": "', '"prompt": "<s><s>', "twice in a row"),
    "prompt that ends its sequence": Bug(DATA, '", "accepted"', '</s>", "accepted"', "ends a sequence"),
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
    return run_check(plant(directory, bug))


def plant(directory: Path, bug: Bug | None) -> Path:
    """Write the examples with a bug into a directory. Returns the recipe."""
    recipe = yaml.safe_load((EXAMPLES / "online_dpo.yaml").read_text(encoding="utf-8"))
    for name, source in {
        LOSS: EXAMPLES / LOSS,
        REWARD: EXAMPLES / REWARD,
        DATA: Path(recipe["data"]["train"]),
    }.items():
        text = source.read_text(encoding="utf-8")
        if bug is not None and bug.file == name:
            assert bug.before in text, f"{name} has changed: {bug.before}"
            text = text.replace(bug.before, bug.after)
        (directory / name).write_text(text, encoding="utf-8")
    recipe |= {"algorithm": str(directory / LOSS), "reward": f"{directory / REWARD}:names_one"}
    recipe["data"] |= {"train": str(directory / DATA)}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return directory / "recipe.yaml"


def run_check(recipe: Path, *overrides: str) -> str:
    """Run `realrl check`. Returns the problems that it prints, with their reasons."""
    command = [sys.executable, "-m", "realrl", "check", str(recipe), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(r"^\d+ checks, ", done.stdout, re.MULTILINE), done.stdout + done.stderr
    return "\n".join(re.findall(r"^PROBLEM.*(?:\n +.*)*", done.stdout, re.MULTILINE))


def list_replacements(recipe: Path, directory: Path) -> list[str]:
    """List overrides for the models and records of a shipped recipe that are not in the repository.

    Models become sizes with a small tokenizer, and records are made up.
    """
    document = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    algorithm = document["algorithm"]
    form = find_algorithm(str(ROOT / algorithm) if algorithm.endswith(".py") else algorithm)[0].form
    theirs = {ours: name for name, ours in document["data"].get("columns", {}).items()}
    further = {"answer": "#### 7", "accepted": ["good", "bad"]} if form == "prompt" else {}
    records = [
        {theirs.get(name, name): value for name, value in (record | further).items()}
        for record in make_up_records(form)
    ]
    data, tokenizer = directory / f"{form}.jsonl", directory / "tokenizer"
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    save_tokenizer(train_bpe((json.dumps(record) for record in records), 259), tokenizer)
    models = [
        f"models.{role}.{setting}"
        for role, model in document["models"].items()
        if {"path", "shape"} & model.keys()
        for setting in ("path=null", f"tokenizer={tokenizer}")
        + (("shape=llama-2-7b",) if "path" in model else ())
    ]
    data_settings = [f"data.train={data}"] + [f"data.eval={data}"] * bool(document["data"].get("eval"))
    further_settings = ["loss.answers=3"] if form == "ranked" else []
    # The made-up records are longer than those of the demo that adds numbers, with one token per byte.
    given = document["data"]
    further_settings += [
        f"data.{name}={least}"
        for name, least in {"max_prompt_tokens": 32, "max_tokens": 96}.items()
        if given.get(name, least) < least
    ]
    return [*models, *data_settings, *further_settings, "device=cpu", "cluster=1x1"]


def check_shipped() -> dict[str, str]:
    """Run `realrl check` on every shipped recipe. Returns the problems of each."""
    found = {}
    for recipe in sorted([*(ROOT / "recipes").rglob("*.yaml"), *EXAMPLES.glob("*.yaml")]):
        name = str(recipe.relative_to(ROOT))
        if recipe.stem == "sentiment" and "SENTIMENT_MODEL" not in os.environ:
            print(f"{name}: skipped, set SENTIMENT_MODEL to the directory of its classifier", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            before = time.monotonic()
            found[name] = run_check(recipe, *list_replacements(recipe, Path(scratch)))
        print(f"{name}, {time.monotonic() - before:.0f} s: {found[name] or 'no problem'}", flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[*BUGS], choices=[*BUGS], metavar="NAME")
    parser.add_argument("--shipped", action="store_true", help="also check every shipped recipe")
    arguments = parser.parse_args()
    results, found = Results(arguments.json), {}
    if arguments.shipped:
        shipped = check_shipped()
        alarms = [name for name, problems in shipped.items() if problems]
        print(f"{len(shipped)} shipped recipes, {len(alarms)} false alarms")
        results.add("shipped", {"recipes": len(shipped), "false_alarms": alarms})
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
    results.add("planted", {"bugs": found, **counts})


if __name__ == "__main__":
    main()
