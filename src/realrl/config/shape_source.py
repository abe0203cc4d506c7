"""What may stand for the sizes of a model: the name of a published one, or a `config.json`."""

from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.config.llama import ALIKE, SUPPORTED, read_config
from realrl.config.shape import ModelShape
from realrl.config.shapes import SHAPES

_FAMILIES = (*SUPPORTED, *ALIKE)


def find_shape(source: str) -> ModelShape:
    """The sizes that a name in `SHAPES`, a Hugging Face `config.json` or a directory with one stands for.

    The file may be of a model that we cannot load but that has the same sizes (`llama.ALIKE`). UserError where it
    is neither, or describes something else.
    """
    if source in SHAPES:
        return SHAPES[source]
    path = Path(source).expanduser()
    if path.is_dir():
        return read_config(path / "config.json", _FAMILIES)
    if path.exists():
        return read_config(path, _FAMILIES)
    if path.suffix == ".json" or "/" in source:
        raise UserError(
            f"{source}: no such file; give a config.json, a directory that holds one, or the name of a"
            " published model such as llama-2-7b"
        )
    hint = nearest(source, SHAPES)
    suffix = f"did you mean {hint}?" if hint else f"known models are {', '.join(SHAPES)}"
    raise UserError(
        f"{source!r} is no model whose sizes are known, and no config.json or directory with one; {suffix}"
    )
