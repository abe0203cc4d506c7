"""Findings of checks, and their isolation: one that fails or hangs does not end the others. No torch."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from realrl.config.errors import UserError
from realrl.config.redaction import redact

Status = Literal["ok", "warning", "problem", "unknown"]
"""`problem`: a run will fail or lose something; `warning`: it may, or be slow; `unknown`: the check failed."""


@dataclass(frozen=True)
class Finding:
    """Result of a check: what was found or, unless it is ok, what is wrong and what to do."""

    subject: str
    status: Status
    text: str
    node: str = ""
    """Host that it is about, where there are several."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        return asdict(self)


Examination = Callable[[], Iterable[Finding]]


def ok(subject: str, text: str) -> Finding:
    """Make a finding that nothing is wrong."""
    return Finding(subject, "ok", text)


def warning(subject: str, text: str) -> Finding:
    """Make a finding about what may go wrong, or be slow."""
    return Finding(subject, "warning", text)


def problem(subject: str, text: str) -> Finding:
    """Make a finding about what will go wrong."""
    return Finding(subject, "problem", text)


def run_checks(checks: Sequence[tuple[str, Examination]], seconds: float) -> list[Finding]:
    """Run named checks side by side, all within so many seconds: their findings, in the order of the checks."""
    found: dict[int, list[Finding]] = {}

    def run(place: int, subject: str, check: Examination) -> None:
        try:
            found[place] = [_clean(finding) for finding in check()]
        except UserError as error:
            found[place] = [_clean(problem(subject, str(error)))]
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {' '.join(str(error).split())}"
            found[place] = [_clean(Finding(subject, "unknown", text))]

    threads = [
        threading.Thread(target=run, args=(place, *check), daemon=True) for place, check in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    findings: list[Finding] = []
    for place, (subject, _) in enumerate(checks):
        late = Finding(
            subject, "unknown", f"this check had not ended after {seconds:g} s, and was left alone"
        )
        findings += found.get(place, [late])
    return findings


def _clean(finding: Finding) -> Finding:
    return Finding(finding.subject, finding.status, redact(finding.text), finding.node)
