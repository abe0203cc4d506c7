"""Draw the picture of README.md: the plan of recipes/reference/ppo-70b.yaml on 16 x 8 H100.

Usage: python docs/plan_picture.py
"""

from pathlib import Path

from realrl.cli.page.plan_page import draw_timeline_svg
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.report.make import make_report
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import make_scenario

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "reference" / "ppo-70b.yaml"


def main() -> None:
    """Search for the plan, and write the picture."""
    scenario = make_scenario(load_experiment(str(RECIPE), []), ClusterSpec.parse("h100:16x8"))
    report = make_report(scenario)
    seconds = report.chosen.step_seconds
    title = f"PPO, Llama 3 70B actor and 8B critic, 16 × 8 H100: {seconds:.1f} s a step"
    (HERE / "images" / "plan.svg").write_text(draw_timeline_svg(report, title), encoding="utf-8")
    print(f"{seconds:.1f} s a step, at most {report.gap:.1%} from the best")


if __name__ == "__main__":
    main()
