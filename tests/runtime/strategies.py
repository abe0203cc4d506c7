"""Plan files in which all calls of models have one strategy."""

from pathlib import Path

import yaml

from realrl.plan.placement import Placement
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment


def use_strategy(file: Path, plan: str, size: int) -> None:
    """Let a recipe run under a preset of plans, or under a strategy for all calls, such as `d1 t2 p1`."""
    document = yaml.safe_load(file.read_text())
    if " " in plan:
        place = Placement.parse(f"{plan} @0-{size - 1} mb=1")
        entry = {"mesh": str(place.mesh), **place.strategy.all_degrees.named()}
        on_host = {"mesh": entry["mesh"], "dp": size}
        graph = build_graph(load_experiment(str(file)))
        calls = {call.name: on_host if call.is_function else entry for call in graph.calls}
        plan = str(file.with_name("plan.yaml"))
        Path(plan).write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": calls}))
    file.write_text(yaml.safe_dump(document | {"plan": plan}))
