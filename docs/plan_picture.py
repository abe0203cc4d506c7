"""Plan PPO for a Llama 3 70B actor and an 8B critic on 16 x 8 H100, and draw the picture of README.md.

Usage: python docs/plan_picture.py [PAGE.html]
"""

import sys
from pathlib import Path

from realrl.cli.plan_page import timeline_svg, write_page
from realrl.config.load import load_experiment
from realrl.planner.cluster import ClusterSpec
from realrl.planner.report import make_report
from realrl.runtime.scenario import make_scenario

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "reference" / "ppo.yaml"
OVERRIDES = [
    "models.actor.shape=llama-3-70b",
    "models.reward.shape=llama-3-8b",
    "data.batch=512",
    "data.max_prompt_tokens=1024",
    "data.max_tokens=2048",
    "generation.max_new_tokens=1024",
    "generation.min_new_tokens=1024",
]
TITLE = "PPO, Llama 3 70B actor and 8B critic, 16 × 8 H100"


def main() -> None:
    """Write the picture, and the page where a file is given."""
    scenario = make_scenario(load_experiment(str(RECIPE), OVERRIDES), ClusterSpec.parse("h100:16x8"))
    report = make_report(scenario)
    seconds = report.chosen.step_seconds
    picture = HERE / "images" / "plan.svg"
    picture.write_text(timeline_svg(report, f"{TITLE}: {seconds:.1f} s a step"), encoding="utf-8")
    if len(sys.argv) > 1:
        write_page(report, Path(sys.argv[1]), TITLE)
    print(f"{seconds:.1f} s a step, at most {report.gap:.1%} from the best")


if __name__ == "__main__":
    main()
