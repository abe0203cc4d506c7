"""Experts that some of the tokens of a pass are sent to."""

from realrl.families.shape import ModelShape
from realrl.families.sizes import count_block_weights, count_layer_weights
from realrl.planner.arrays.arrays import Real


def count_visited_experts(shape: ModelShape, tokens: Real) -> Real:
    """Compute the experts of a layer that at least one of so many tokens passes through, if all are as likely.

    0 for a model without experts.
    """
    mixture = shape.mixture
    if mixture is None:
        return 0.0
    return mixture.experts * (1 - (1 - mixture.per_token / mixture.experts) ** tokens)


def count_read_weights(shape: ModelShape, tokens: Real) -> Real:
    """Count the parameters of a layer's matrices that a pass of so many tokens reads."""
    own = count_layer_weights(shape)
    if shape.mixture is None:
        return own
    others = count_visited_experts(shape, tokens) - shape.mixture.per_token
    return own + others * count_block_weights(shape)
