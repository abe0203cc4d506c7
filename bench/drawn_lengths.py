"""Compare predicted steps with the mean of simulated steps whose lengths are drawn, one answer at a time.

The planner predicts a step from 64 quantiles of the lengths of answers, and from the expected length of the
longest one. Here, each step draws the length of every answer, each data-parallel rank generates its own rows, and
the call ends with the slowest rank. Answers that several steps continue keep their lengths. The rest of the step is
simulated as the planner does. The plans are those that a search finds for GRPO of a 7B model on 4 nodes of 8 H100.
The lengths are log-normal with a median of 640 tokens, and at most 8,192.

    python bench/drawn_lengths.py [--steps 24] [--effort 0.2] [--deviation 0.9] [--json FILE]
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness import ROOT, Results, make_parser

from realrl.dataflow.call import Call, Kind
from realrl.plan.placement import Mesh, Placement
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.search.plan_search import find_plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimator import estimate_plan, list_steps
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import simulate
from realrl.planner.workload.workload import Workload, quantiles
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import Measured, make_scenario

RECIPE = ROOT / "recipes/grpo.yaml"
SETTINGS = [
    "models.actor.path=null", "models.actor.shape=qwen2.5-7b", "models.reward=null",
    "reward={verifier: {kind: numeric}}", "data.batch=128", "data.max_prompt_tokens=512", "data.max_tokens=8704",
    "generation.max_new_tokens=8192", "policy.samples=8", "cluster=4x8",
]  # fmt: skip
CASES = {
    "synchronous": [],
    "1 step ahead": ["staleness=1"],
    "partial, 1 step": ["staleness=1", "partial=true", "overlap=false"],
    "partial, 2 steps": ["staleness=2", "partial=true"],
    "partial, 3 steps": ["staleness=3", "partial=true"],
    "partial, 3 steps, in turn": ["staleness=3", "partial=true", "overlap=false"],
}
"""Settings of asynchrony by the name of the case."""
MEDIAN, LONGEST = 640, 8192


@dataclass(frozen=True)
class RankWorkload(Workload):
    """Workload of one rank that knows the part of each answer."""

    parts: tuple[tuple[int, int], ...] = ()
    """Tokens that are known before, and tokens that are sampled, of each answer."""

    def _list_parts(self, call: Call) -> Sequence[tuple[int, int]]:
        return self.parts


class DrawnDurations(Durations):
    """Durations of a step's instructions under drawn lengths of answers."""

    def __init__(self, scenario: Scenario, plan: Plan, batches: Sequence[Sequence[int]]) -> None:
        """`batches`: lengths of answers by age: those of the batch that begins in this step come first."""
        drawn = replace(scenario.workload, answers=quantiles(batches[-1]), longest=max(batches[-1]))
        super().__init__(replace(scenario, workload=drawn), plan)
        self._all = scenario
        self._whole = plan
        self._batches = batches

    def terms(self, call: str) -> Mapping[str, float]:
        """Return the seconds of a call by term: for a generate call, those of the slowest rank."""
        called = self._all.graph.call(call)
        if called.kind is not Kind.GENERATE:
            return super().terms(call)
        placement = self._whole[call]
        dp = placement.strategy.dp
        alone = Placement(Mesh(0, placement.mesh.size // dp), placement.strategy.with_degrees(dp=1))
        model, workload = self._all.models[called.model_role], self._all.workload
        prompt, most = round(statistics.mean(workload.prompts)), called.count_part(workload.max_new_tokens)
        found = []
        for rank in range(dp):
            parts = [
                (prompt + age * most, min(most, answer - age * most))
                for age, answers in enumerate(self._batches[: called.span])
                for answer in answers[rank::dp]
                if answer > age * most
            ]
            begun = tuple(sorted(self._batches[0][rank::dp]))
            changed = {"items": len(begun), "prompts": (prompt,), "answers": begun, "longest": 0}
            own = {name: getattr(workload, name) for name in workload.__dataclass_fields__}
            rows = RankWorkload(**own | changed, parts=tuple(sorted(parts)))
            found.append(self._all.cost.call(called, model, alone, rows).terms)
        return max(found, key=lambda terms: sum(terms.values()))


def simulate_drawn(scenario: Scenario, plan: Plan, steps: int, draw: "Draw") -> list[float]:
    """Simulate steps with drawn lengths; return the seconds of each."""
    programs = list_steps(scenario, plan)[0].programs
    ages = scenario.graph.ahead + 1
    batches = [draw(scenario.workload.items) for _ in range(ages + steps)]
    found = []
    for step in range(steps):
        of_step = batches[step : step + ages][::-1]
        durations = DrawnDurations(scenario, plan, of_step)
        found.append(simulate(programs, durations, reporting=durations.reporting).repeated_seconds)
    return found


class Draw:
    """Draws lengths of answers."""

    def __init__(self, deviation: float) -> None:
        self._deviation = deviation
        self._chance = random.Random(1)

    def __call__(self, count: int) -> list[int]:
        lengths = (self._chance.gauss(math.log(MEDIAN), self._deviation) for _ in range(count))
        return [min(LONGEST, max(1, round(math.exp(length)))) for length in lengths]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--effort", type=float, default=0.2)
    parser.add_argument("--deviation", type=float, default=0.9, help="of the logarithm of the lengths")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    draw, spec = Draw(arguments.deviation), ClusterSpec.parse("h100:4x8")
    measured = Measured(answers=tuple(draw(1 << 13)))
    for case, settings in CASES.items():
        changed = [f"asynchrony.{one}" for one in settings]
        experiment = load_experiment(str(RECIPE), [*SETTINGS, *changed])
        scenario = make_scenario(experiment, spec, measured)
        plan = find_plan(scenario, effort=arguments.effort, seed=0).plan
        predicted = estimate_plan(scenario, plan).repeated_seconds
        steps = sorted(simulate_drawn(scenario, plan, arguments.steps, draw))
        mean = statistics.mean(steps)
        result = {"predicted": predicted, "drawn": mean, "shortest": steps[0], "longest": steps[-1]}
        results.add(f"{case}, deviation {arguments.deviation:g}", result)
        print(
            f"{case:<26} predicted {predicted:6.2f} s, drawn {mean:6.2f} s ({steps[0]:.2f} to {steps[-1]:.2f}),"
            f" error {predicted / mean - 1:+.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
