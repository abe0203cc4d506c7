"""Roles with low-rank adapters, and roles that have the same frozen weights."""

from collections.abc import Iterable, Mapping

from realrl.config.paths import is_local, local_path
from realrl.dataflow.call import MovingAverage
from realrl.families.adapters import LowRank
from realrl.families.shape import Head, ModelShape
from realrl.huggingface.directory import known_adapters
from realrl.layout.sets import TrainablePart
from realrl.recipe.model import ModelConfig, trained_models


def find_adapters_of_roles(
    configs: Mapping[str, ModelConfig], averages: Iterable[MovingAverage]
) -> dict[str, LowRank]:
    """Find the settings of the adapters of each role that has some beside its model.

    These are what it trains; those of the role that it follows; and of a frozen role those in its own directory,
    if adapters are trained for the same model, whose memory it shares then. Elsewhere these are merged into it, and
    so they are into a model that is quantised, which shares no other's memory.
    """
    found = {role: of.lora for role, of in trained_models(configs).items() if of.lora is not None}
    trained_for = {_name_base(configs[role]) for role in found}
    followed = {average.role: average.source for average in averages}
    for role, config in configs.items():
        source = followed.get(role)
        if source in found:
            found[role] = found[source]
        elif _is_frozen(role, configs) and config.path is not None and is_local(config.path):
            saved = known_adapters(config.path)
            if saved is not None and saved.lora.targets and _name_base(config) in trained_for:
                found[role] = saved.lora
    return found


def adapt_shapes(
    shapes: Mapping[str, ModelShape],
    configs: Mapping[str, ModelConfig],
    averages: Iterable[MovingAverage],
) -> dict[str, ModelShape]:
    """Say in the shapes of roles which adapters these have (see `find_adapters_of_roles`)."""
    adapters = find_adapters_of_roles(configs, averages)
    return {
        role: shape.model_copy(update={"lora": adapters.get(role)})
        if shape.lora != adapters.get(role)
        else shape
        for role, shape in shapes.items()
    }


def find_shared_bases(
    configs: Mapping[str, ModelConfig],
    shapes: Mapping[str, ModelShape],
    heads: Mapping[str, Head],
    parts: Mapping[str, TrainablePart],
    averages: Iterable[MovingAverage],
) -> dict[str, str]:
    """Name the frozen weights of roles with adapters, and of language models that are not trained at all.

    Roles of one name have the same base set, in the same type, or a part of it. Quantised ones have no such name.
    """
    changing = {average.role for average in averages if not average.same_start}
    found = {}
    for role, shape in shapes.items():
        path = configs[role].path
        merged = path is not None and known_adapters(path) is not None
        frozen = _is_frozen(role, configs) and heads[role] == "lm" and not merged
        if role not in changing and (parts[role].adapters or frozen):
            sizes = shape.model_copy(update={"lora": None}).model_dump_json()
            found[role] = f"{_name_base(configs[role])} {sizes}"
    return found


def _is_frozen(role: str, configs: Mapping[str, ModelConfig]) -> bool:
    """Tell whether a role is not trained, and has its weights as they are for others, too."""
    return role not in trained_models(configs) and configs[role].quantised is None


def _name_base(config: ModelConfig) -> str:
    """Name the weights under adapters, or those of a model without them, and their type.

    Fresh ones depend on sizes and seed alone.
    """
    saved = None if config.path is None else known_adapters(config.path)
    base = saved.base if saved is not None else config.path or ""
    return f"{local_path(base).resolve() if is_local(base) else base} {config.dtype}"
