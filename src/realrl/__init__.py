"""ReaL-RL: RLHF training that plans itself.

`realrl.GRPO(model=..., reward=..., data=...).train()` trains a model. There is a class for each algorithm; see
docs/python.md. Importing the package loads no torch.
"""

from typing import Any

__version__ = "0.1.0"

NAMES = {
    "Algorithm": "realrl.api.algorithm:Algorithm",
    "Batch": "realrl.api.batch:Batch",
    "LLM": "realrl.api.llm:LLM",
    "Run": "realrl.api.run_results:Run",
    "Sampling": "realrl.api.sampling:Sampling",
    "Session": "realrl.api.session:Session",
    "Step": "realrl.runtime.callbacks:Step",
    "RunError": "realrl.config.errors:RunError",
    "UserError": "realrl.config.errors:UserError",
    "algorithm": "realrl.api.algorithm:make_class",
}
"""Place of each class and function of the API, except the classes of algorithms."""


def __getattr__(name: str) -> Any:
    """Find a class or function of the API at its first use."""
    from importlib import import_module

    if name.startswith("_"):  # Python itself asks for names such as __path__
        raise AttributeError(f"module 'realrl' has no attribute {name!r}")
    from realrl.api.errors import install_hooks

    install_hooks()
    if name in NAMES:
        module, _, attribute = NAMES[name].partition(":")
        return getattr(import_module(module), attribute)
    found = None
    if name[:1].isupper():
        from realrl.api.algorithm import find_class

        found = find_class(name)
    if found is None:
        raise AttributeError(f"module 'realrl' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    """List the names of the API."""
    from realrl.api.algorithm import name_class
    from realrl.recipe.registry import list_algorithms

    return sorted({*globals(), *NAMES, *map(name_class, list_algorithms())})
