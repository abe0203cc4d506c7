"""Words on a plan that is simpler than the fastest one found."""

from realrl.planner.report.report import CHOSEN, FASTEST, PlanReport


def describe_preference(report: PlanReport) -> str:
    """Say what the chosen plan is preferred to, and why; the report must have given up a faster plan."""
    fastest, chosen = report.given_up, report.contenders[CHOSEN]
    assert fastest is not None, "a faster plan was given up"
    longer = chosen.estimate.step_seconds / fastest.estimate.step_seconds - 1
    text = (
        f"{CHOSEN} is simpler than the {FASTEST}, and may well be as fast: {chosen.parts} instead of"
        f" {fastest.parts} layouts, reallocations, kept copies and offloaded states, for a step that is predicted"
        f" to be {longer:.1%} longer."
    )
    return text.replace("%", " %").capitalize()
