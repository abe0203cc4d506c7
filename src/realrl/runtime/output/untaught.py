"""Find training steps without effect, whose gradient was exactly 0. Does not import torch."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any


def find_untaught(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Find the train calls whose gradient was exactly 0 in a step. Returns the reason for each call.

    `metrics` has values by `call/name`. None stands for a number that is not finite.
    """
    suffix = "/learning_rate"  # every train call reports it
    calls = [name.removesuffix(suffix) for name in metrics if name.endswith(suffix)]
    return {call: _find_reason(metrics, call) for call in calls if not _teaches(metrics, call)}


def _teaches(metrics: Mapping[str, float | None], call: str) -> bool:
    # Skipped optimizer steps have their own notes.
    if metrics.get(f"{call}/skipped_steps"):
        return True
    name = f"{call}/grad_norm"
    return metrics[name] != 0 if name in metrics else not metrics.get(f"{call}/empty_steps")


def _find_reason(metrics: Mapping[str, float | None], call: str) -> str:
    def value(name: str) -> float:
        return metrics.get(f"{call}/{name}") or 0.0

    if value("empty_steps") and metrics.get(f"{call}/kept") == 0:
        return "no answer was kept"
    if value("empty_steps") and metrics.get(f"{call}/finished") == 0:
        return "all answers were cut off, and mask_truncated leaves them out"
    skipped = value("skipped")
    some = f" ({100 * skipped:.0f} % of the answers had no score)" if skipped else ""
    if value("groups_of_equal_rewards") == 1:
        return f"the answers to each prompt had equal rewards{some}"
    if value("zero_advantages") == 1:
        return f"no answer was better or worse than its baseline{some}"
    return "the gradient was 0"


class UntaughtSteps:
    """Counts of training steps without effect, by train call and reason."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def take(self, metrics: Mapping[str, float | None]) -> Iterator[str]:
        """Count a step.

        Yields a note at the first step without effect on a call, and whenever the number of such steps doubles.
        """
        for call, reason in find_untaught(metrics).items():
            before = self._counts[call].total()
            self._counts[call][reason] += 1
            if before.bit_length() < (before + 1).bit_length():
                so_far = f" ({before + 1} such steps so far)" if before else ""
                yield f"taught the {_name_role(call)} nothing: {reason}{so_far}"

    def describe(self, steps: str) -> Iterator[str]:
        """Yield a sentence for each call that had steps without effect.

        `steps`: text for the number of all steps, such as `5` or `the last 20`.
        """
        for call, reasons in self._counts.items():
            most = reasons.most_common()
            why = ", or ".join(f"{reason} ({n})" for reason, n in most) if len(most) > 1 else most[0][0]
            yield f"{reasons.total()} of {steps} steps taught the {_name_role(call)} nothing: {why}"

    @property
    def counts(self) -> dict[str, int]:
        """Number of steps without effect, for each call that has any."""
        return {call: reasons.total() for call, reasons in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {call: dict(reasons) for call, reasons in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Load what `state_dict` returned."""
        self._counts = defaultdict(Counter, {call: Counter(reasons) for call, reasons in state.items()})


def _name_role(call: str) -> str:
    return call.partition(".")[0]
