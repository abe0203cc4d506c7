"""Model families by name, or from a user's own file."""

from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points

from realrl.config.errors import UserError
from realrl.config.explain import brief, nearest
from realrl.config.user_code import UserCode
from realrl.families.decoder import LayerOptions
from realrl.families.family import Family, check_family
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec

GROUP = "realrl.families"
"""Entry points `MODEL_TYPE = "package.module:FAMILY"` that packages declare."""


def family_names(*, trainable: bool = False) -> tuple[str, ...]:
    """Names of the registered families, or of those that can be trained."""
    names = sorted(_registered())
    return tuple(name for name in names if not trainable or find_family(name).trainable)


def find_family(reference: str) -> Family:
    """The family of a registered name, or the `FAMILY` of a user's FILE.py.

    UserError, naming the registered ones, where there is none; UserCodeError where the user's file cannot be run.
    """
    return _from_file(reference) if reference.endswith(".py") else _from_package(reference)


def model_tensors(shape: ModelShape, head: Head) -> tuple[TensorSpec, ...]:
    """All tensors of a model in storage order, under their Hugging Face names."""
    return _tensors(shape, head)


def layer_options(shape: ModelShape) -> LayerOptions:
    """The options of a model's layers."""
    return find_family(shape.family).layer


@lru_cache(maxsize=256)
def _tensors(shape: ModelShape, head: Head) -> tuple[TensorSpec, ...]:
    family = find_family(shape.family)
    return tuple(family.tensors(shape, head, family.layer))


@cache
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def _from_package(name: str) -> Family:
    registered = _registered()
    if name not in registered:
        hint = nearest(name, registered)
        suffix = f"did you mean {hint}?" if hint else f"there are {', '.join(sorted(registered))}"
        raise UserError(f"{brief(name)} is no model family; {suffix} One of your own is written FILE.py")
    family = registered[name].load()
    assert isinstance(family, Family), f"{registered[name].value} is a model family"
    check_family(family)
    return family


def _from_file(file: str) -> Family:
    code = UserCode("family", file)
    family = code.attribute("FAMILY")
    if not isinstance(family, Family):
        raise UserError(f"family={file}: FAMILY must be a realrl.families.family.Family")
    with code.errors("cannot be used:"):
        check_family(family)
    return family
