"""Parameters that tokens are multiplied by."""

from realrl.families.registry import find_layer_options
from realrl.families.shape import ModelShape


def count_layer_weights(shape: ModelShape) -> int:
    """Count the parameters of a layer's matrices that a token is multiplied by, those of its own experts alone."""
    rotated = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    block = count_block_weights(shape)
    mixture = shape.mixture
    if mixture is not None:
        blocks = mixture.per_token + mixture.shared
        return shape.hidden_size * (rotated + mixture.experts) + blocks * block
    return shape.hidden_size * rotated + block


def count_block_weights(shape: ModelShape) -> int:
    """Count the parameters of the matrices of a feed-forward block, or of an expert."""
    matrices = 3 if find_layer_options(shape).gated else 2
    return matrices * shape.hidden_size * shape.intermediate_size
