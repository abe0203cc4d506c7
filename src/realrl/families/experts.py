"""Mixtures of experts: how many feed-forward blocks a layer has, and how its router weighs them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from realrl.config.base import Settings

MOST_EXPERTS = 10**4
Experts = Annotated[int, Field(gt=0, le=MOST_EXPERTS)]
"""Number of experts, which are gone through one by one; some ten times what there is."""


class Mixture(Settings):
    """Feed-forward blocks of a layer, of which a router chooses some for each token."""

    experts: Experts
    """Feed-forward blocks of a layer, each as wide as `intermediate_size`."""
    per_token: Experts
    """Experts that a token passes through: those to which the router gives the highest scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's numbers become: probabilities that add up to 1, or each by itself one from 0 to 1."""
    normalised: bool = True
    """Whether the weights of a token's experts are their scores divided by the sum of these."""
    weighed: Literal["outputs", "inputs"] = "outputs"
    """What the weights multiply: what experts give, or what they are given (Llama 4)."""
    shared: bool = False
    """Whether all tokens pass through one more block, as wide as an expert, besides."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.per_token > self.experts:
            raise ValueError(f"per_token={self.per_token} is more than the {self.experts} experts of a layer")
        return self
