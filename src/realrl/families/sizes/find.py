"""Sizes of a model from the name of a published one, or from a `config.json`."""

import re

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.config.paths import local_path
from realrl.families.config_json import read_config
from realrl.families.shape import ModelShape
from realrl.families.sizes.published import SHAPES


def find_shape(source: str, family: str | None = None) -> ModelShape:
    """Find the sizes of a name in `SHAPES`, of a Hugging Face `config.json` or of a directory with one.

    `family` is how `find_family` finds its
    family; by default the file says it. UserError where it is neither, or describes something else.
    """
    if source in SHAPES:
        return SHAPES[source]
    path = local_path(source)
    if path.is_dir():
        return read_config(path / "config.json", family)
    if path.exists():
        return read_config(path, family)
    if path.suffix == ".json" or "/" in source:
        raise UserError(
            f"{source}: no such file; give a config.json, a directory that holds one, or the name of a"
            " published model such as llama-2-7b"
        )
    # Another generation, or another size, is another model and not a misspelling.
    hint = nearest(source, [name for name in SHAPES if _numbers(name) == _numbers(source)])
    some = ", ".join([*SHAPES][:_NAMED])
    suffix = (
        f"did you mean {hint}?" if hint else f"known models are {some}, and others (realrl models lists them)"
    )
    raise UserError(
        f"{source!r} is no model whose sizes are known, and no config.json or directory with one; {suffix}"
    )


_NAMED = 12
"""Names in an error message, of a list that is too long for one."""


def _numbers(name: str) -> list[str]:
    """The generation and the size that the name of a model holds."""
    return re.findall(r"\d+(?:\.\d+)?", name)
