"""The smallest recipe of each algorithm."""

from typing import Any

from realrl.recipe.registry import find_algorithm


def least(algorithm: str) -> dict[str, Any]:
    """Write the settings that an algorithm cannot do without."""
    spec = find_algorithm(algorithm)[0]
    roles = [role for role, of in spec.roles.items() if of.weights_from is None and not of.optional]
    rewarded = "reward" in spec.recipe.model_fields
    return {
        "algorithm": algorithm,
        "run_dir": "runs/x",
        "data": {"train": "a.jsonl"},
        "models": {role: {"path": role} for role in roles},
        **({"reward": {"verifier": {"kind": "exact_match"}}} if rewarded else {}),
    }
