"""Compare predicted steps with the mean of simulated steps whose lengths are drawn, one answer at a time.

The planner predicts a step from 64 quantiles of the lengths of answers, and from the expected length of the
longest one. Here, each step draws the length of every answer, each data-parallel rank generates its own rows, and
the call ends with the slowest rank. Answers that several steps continue keep their lengths. A portion ends when the
last rank has completed its share of prompts, and has exactly these answers. The rest of the step is simulated as
the planner does.

The plans are those that a search finds for GRPO of a 7B model on 4 nodes of 8 H100. The lengths are log-normal with
a median of 640 tokens, and at most 8,192. The cases with portions have four times as many prompts, a reference, and
recomputed log-probabilities, because portions only hide the work that follows sampling.

    python bench/drawn_lengths.py [--steps 24] [--effort 100000] [--deviation 0.9] [--cases CASE ...] [--json FILE]
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
from realrl.planner.search.plan_search import estimate_found, find_plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimator import list_steps
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
    "more work": ["portions=1"],
    "more work, 4 portions": ["portions=4"],
    "more work, 8 portions": ["portions=8"],
    "more work, 16 portions": ["portions=16"],
}
"""Settings of asynchrony by the name of the case."""
MORE_WORK = [
    "data.batch=512",
    "policy.kl.coef=0.05",
    "policy.recompute_logprobs=true",
    "policy.minibatches=1",
]
"""Settings of cases whose names begin with `more work`."""
MEDIAN, LONGEST = 640, 8192


@dataclass(frozen=True)
class RankWorkload(Workload):
    """Workload of one rank that knows the part of each answer."""

    parts: tuple[tuple[int, int], ...] = ()
    """Tokens that are known before, and tokens that are sampled, of each answer."""

    def _list_parts(self, call: Call) -> Sequence[tuple[int, int]]:
        return self.parts


@dataclass(frozen=True)
class DrawnWorkload(Workload):
    """Workload of a step that knows the answers of each portion."""

    drawn: tuple[tuple[int, ...], ...] = ()

    def portion(self, number: int, portions: int) -> "DrawnWorkload":
        answers = self.drawn[number - 1]
        return replace(self, items=len(answers), answers=quantiles(answers), longest=0)


class DrawnDurations(Durations):
    """Durations of a step's instructions under drawn lengths of answers."""

    def __init__(self, scenario: Scenario, plan: Plan, batches: Sequence[Sequence[int]]) -> None:
        """`batches`: lengths of answers by age: those of the batch that begins in this step come first."""
        self._all = scenario
        self._whole = plan
        self._batches = batches
        fields = {name: getattr(scenario.workload, name) for name in Workload.__dataclass_fields__}
        fields |= {"answers": quantiles(batches[-1]), "longest": max(batches[-1])}
        ranked = self._rank_prompts() if scenario.graph.streaming is not None else []
        portions = scenario.graph.streaming.portions if ranked else 0
        drawn = tuple(
            tuple(n for prompts in ranked for prompt in _cut(prompts, number, portions) for n in prompt)
            for number in range(1, portions + 1)
        )
        super().__init__(replace(scenario, workload=DrawnWorkload(**fields, drawn=drawn)), plan)

    def _rank_prompts(self) -> list[list[list[int]]]:
        """List the lengths of each prompt's answers by data-parallel rank, in the order in which prompts end."""
        samples, answers = self._all.workload.samples, self._batches[-1]
        prompts = [[*answers[i : i + samples]] for i in range(0, len(answers), samples)]
        dp = self._whole[self._all.graph.order[0].name].strategy.dp
        return [sorted(prompts[rank::dp], key=max) for rank in range(dp)]

    def terms(self, call: str, portion: int = 0) -> Mapping[str, float]:
        """Return the seconds of a call by term: for a generate call, those of the slowest rank."""
        called = self._all.graph.call(call)
        if called.kind is not Kind.GENERATE:
            return super().terms(call, portion)
        if portion:
            return {"decode": self._end_portion(called, portion) - self._end_portion(called, portion - 1)}
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

    def _end_portion(self, call: Call, portion: int) -> float:
        """Return the seconds until all ranks have sampled their first portions. A rank then has sampled the tokens
        that precede the end of its last prompt in these portions, of all answers."""
        if not portion:
            return 0.0
        placement = self._whole[call.name]
        dp = placement.strategy.dp
        alone = Placement(Mesh(0, placement.mesh.size // dp), placement.strategy.with_degrees(dp=1))
        ends = []
        for prompts in self._rank_prompts():
            longest = max(prompts[-(-len(prompts) * portion // call.portions) - 1])
            answers = tuple(sorted(min(n, longest) for prompt in prompts for n in prompt))
            rows = replace(self._all.workload, items=len(answers), answers=answers, longest=0)
            ends.append(
                self._all.cost.call(replace(call, portions=1), self._all.models["actor"], alone, rows).seconds
            )
        return max(ends)


def _cut(prompts: list[list[int]], number: int, portions: int) -> list[list[int]]:
    """Select one portion of a rank's prompts."""
    ends = [-(-len(prompts) * part // portions) for part in (number - 1, number)]
    return prompts[slice(*ends)]


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
    parser.add_argument("--effort", type=float, default=100_000, help="of each search, in scored plans")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--deviation", type=float, default=0.9, help="of the logarithm of the lengths")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    draw, spec = Draw(arguments.deviation), ClusterSpec.parse("h100:4x8")
    measured = Measured(answers=tuple(draw(1 << 13)))
    for case in arguments.cases:
        changed = [f"asynchrony.{one}" for one in CASES[case]]
        work = MORE_WORK if case.startswith("more work") else []
        experiment = load_experiment(str(RECIPE), [*SETTINGS, *work, *changed])
        scenario = make_scenario(experiment, spec, measured)
        estimate, _ = estimate_found(scenario, find_plan(scenario, effort=arguments.effort, seed=0))
        plan, predicted = estimate.plan, estimate.repeated_seconds
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
