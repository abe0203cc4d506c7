"""Settings of `config.json` for layers without rotary embeddings."""

from typing import Any

from realrl.config.explain import brief
from realrl.families.settings import ConfigReader
from realrl.families.shape import ModelShape


def read_unrotated(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """Read which layers have no rotary embeddings: those with a 0 in `no_rope_layers`, else every n-th one.

    An empty list, as Llama 4's files have, is none. UserError for a list that does not suit.
    """
    interval = config.size("no_rope_layer_interval", 4)
    rotated = config.read("no_rope_layers")
    if rotated is None or rotated == []:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(n not in (0, 1) for n in rotated):
        raise config.fail(f"no_rope_layers={brief(rotated)} must be a list of {layers} numbers, each 0 or 1")
    return tuple(layer for layer, on in enumerate(rotated) if not on)


def write_unrotated(shape: ModelShape) -> dict[str, Any]:
    """Write the settings that `read_unrotated` reads, but for the interval."""
    return {"no_rope_layers": [int(layer not in shape.unrotated_layers) for layer in range(shape.layers)]}
