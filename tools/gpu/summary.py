"""Print the failures and figures of results.jsonl, one line each.

python tools/gpu/summary.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

KINDS = ("facts", "bench", "time", "operators", "profile", "run")
HIDDEN = {"kind", "name", "status", "took", "last", "trace", "kernels"}


def format_values(line: dict[str, Any]) -> str:
    """Format the figures of a result."""
    values = {key: value for key, value in line.items() if key not in HIDDEN}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())


def main() -> None:
    file = Path(sys.argv[1]) / "results.jsonl"
    every = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    # The folder may have results of earlier runs, so the last result of each name counts. A measurement may record
    # more figures under its own name. These records have no status.
    lines = list({(line["kind"], line["name"], "status" in line): line for line in every}.values())
    bad = [line for line in lines if line.get("status", "ok") != "ok"]
    print("\n## Failures\n")
    for line in bad:
        print(f"- {line['kind']} {line['name']}: {line['status']}: {format_values(line)[:300]}")
    print(f"{len(bad)} in all")
    print("\n## Figures\n")
    for kind in KINDS:
        for line in lines:
            if line["kind"] == kind and line not in bad:
                print(f"- {kind} {line['name']}: {format_values(line)}")
    passed = sum(line["kind"] == "parity" and line not in bad for line in lines)
    print(f"\nparity: {passed} checks passed")


if __name__ == "__main__":
    main()
