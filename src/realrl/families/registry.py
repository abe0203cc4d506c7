"""Find model families by name or in a user's own file, and the tensors of a model by its shape."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ParamSpec, TypeVar

from realrl.config.errors import UserError
from realrl.config.explain import brief, nearest
from realrl.config.paths import local_path
from realrl.config.registered import find_registered, load_registered, name_package
from realrl.config.user_code import UserCode
from realrl.families.adapters import add_adapters
from realrl.families.family import Family, check_family
from realrl.families.quantisation import quantise_tensors
from realrl.families.shape import Head, LayerOptions, ModelShape
from realrl.families.tensors import Place, TensorSpec

GROUP = "realrl.families"
"""Group of entry points through which other packages register families: `MODEL_TYPE = "package.module:FAMILY"`."""
BUILT_IN = {
    "gemma": "realrl.families.built_in.gemma:GEMMA",
    "gemma2": "realrl.families.built_in.gemma:GEMMA2",
    "gemma3_text": "realrl.families.built_in.gemma:GEMMA3",
    "glm4": "realrl.families.built_in.glm:GLM4",
    "glm4_moe": "realrl.families.built_in.glm:GLM4_MOE",
    "gpt2": "realrl.families.built_in.gpt:GPT2",
    "gpt_neox": "realrl.families.built_in.gpt:GPT_NEOX",
    "gpt_oss": "realrl.families.built_in.gpt:GPT_OSS",
    "granite": "realrl.families.built_in.others:GRANITE",
    "llama": "realrl.families.built_in.llama:LLAMA",
    "llama4_text": "realrl.families.built_in.llama:LLAMA4",
    "ministral": "realrl.families.built_in.mistral:MINISTRAL",
    "mistral": "realrl.families.built_in.mistral:MISTRAL",
    "mixtral": "realrl.families.built_in.mistral:MIXTRAL",
    "olmo2": "realrl.families.built_in.others:OLMO2",
    "olmo3": "realrl.families.built_in.others:OLMO3",
    "phi3": "realrl.families.built_in.others:PHI3",
    "qwen2": "realrl.families.built_in.qwen:QWEN2",
    "qwen3": "realrl.families.built_in.qwen:QWEN3",
    "qwen3_moe": "realrl.families.built_in.qwen:QWEN3_MOE",
    "smollm3": "realrl.families.built_in.others:SMOLLM3",
    "starcoder2": "realrl.families.built_in.gpt:STARCODER2",
}
"""Families of this package by `model_type`."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def list_families() -> tuple[str, ...]:
    return tuple(sorted(_registered()))


def find_family(reference: str) -> Family:
    """Find a registered family by name, or load `FAMILY` from a user's FILE.py. Raises UserError, with the
    registered names, for an unknown name, and UserCodeError if the file fails to run."""
    if reference.endswith(".py"):
        return _from_file(reference, local_path(reference).resolve())
    return _from_package(reference)


@lru_cache(maxsize=256)
def model_tensors(shape: ModelShape, head: Head) -> tuple[TensorSpec, ...]:
    """List all tensors of a model, adapters and scales included, in storage order and named as in Hugging Face
    files."""
    family = find_family(shape.family)
    tensors = tuple(family.tensors(shape, head, find_layer_options(shape)))
    if shape.lora is not None:
        tensors = add_adapters(tensors, shape.lora)
    return tensors if shape.quantised is None else quantise_tensors(tensors, shape.quantised)


@lru_cache(maxsize=256)
def ties_embeddings(shape: ModelShape, head: Head) -> bool:
    """Return whether the embedding table is also the head, so that both ends of a pipeline hold it."""
    return any(spec.place is Place.BOTH_ENDS for spec in model_tensors(shape, head))


def find_layer_options(shape: ModelShape) -> LayerOptions:
    """Find the options of a model's layers: the shape's own options or, if it has none, its family's options."""
    return find_family(shape.family).layer if shape.layer is None else shape.layer


@cache
def _registered() -> dict[str, EntryPoint]:
    return find_registered("family", GROUP, BUILT_IN)


@cache
def _from_package(name: str) -> Family:
    registered = _registered()
    if name not in registered:
        hint = nearest(name, registered)
        known = f"known are {', '.join(sorted(registered))}; you can also name a file of your own, FILE.py"
        raise UserError(f"{brief(name)} is not a model family; {f'did you mean {hint}?' if hint else known}")
    point = registered[name]
    family = load_registered("family", point)
    if not isinstance(family, Family):
        raise UserError(f"family {name} of package {name_package(point)}: {point.value} is not a Family")
    check_family(family)
    return family


@cache
def _from_file(file: str, resolved: Path) -> Family:
    """Load the family in a user's file, and wrap its functions so that they raise only UserError.

    `file` is the name in error messages. `resolved` is part of the cache key: the same name can mean another file
    in another working directory.
    """
    code = UserCode("family", file)
    family = code.attribute("FAMILY")
    if not isinstance(family, Family):
        raise UserError(f"family={file}: FAMILY must be a realrl.families.family.Family")
    with code.errors("cannot be used:"):
        check_family(family)
    return replace(
        family,
        read_config=_guarded(code, family.read_config),
        write_config=_guarded(code, family.write_config),
        tensors=_guarded(code, family.tensors),
    )


def _guarded(code: UserCode, function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a user's function, so that every exception other than UserError becomes a UserCodeError."""

    def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
        with code.errors("raised"):
            try:
                return function(*arguments, **options)
            except UserError as error:
                refused = error
        # Raised here, because inside `code.errors` it would become a UserCodeError.
        raise refused

    return call
