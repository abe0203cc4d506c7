"""Measure how long `import realrl` takes, beyond the start of the interpreter.

Each import has a process of its own. Processes with and without the import take turns. The figure is the difference
of the medians, in milliseconds. A second figure has the first use of an algorithm's class.

    python bench/import_time.py [--rounds 21] [--json FILE]
"""

import statistics
import subprocess
import sys
import time

from harness import Results, make_parser

CODES = {
    "nothing": "pass",
    "import realrl": "import realrl",
    "realrl.GRPO": "import realrl; realrl.GRPO",
}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="processes of each kind")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CODES}
    for code in CODES.values():
        subprocess.run([sys.executable, "-c", code], check=True)  # writes byte code, reads files from disk
    for _ in range(arguments.rounds):
        for name, code in CODES.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds[name].append(time.perf_counter() - start)
    median = {name: 1000 * statistics.median(times) for name, times in seconds.items()}
    results = Results(arguments.json, ())
    for name, milliseconds in median.items():
        beyond = milliseconds - median["nothing"]
        print(f"{name:15} {milliseconds:7.1f} ms, {beyond:6.1f} ms beyond the interpreter")
        results.add(name, {"milliseconds": milliseconds, "beyond_interpreter": beyond})


if __name__ == "__main__":
    main()
