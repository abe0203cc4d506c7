"""Settings of `config.json` that mixtures have in common."""

from typing import Any

from realrl.families.experts import MOST_EXPERTS, Mixture
from realrl.families.settings import ConfigReader
from realrl.families.shape import ModelShape

ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Settings of a loss that transformers adds in training; recipes have their own (`models.ROLE.router_loss`)."""

_NAMES = "num_local_experts", "num_experts"
"""Names of the number of experts; transformers 5 writes the first for all families, and takes both."""


def read_mixture(config: ConfigReader, *, experts: int, per_token: int, normalised: bool) -> Mixture:
    """Read the numbers of experts, of which `experts` and `per_token` are the usual ones.

    UserError for what is not supported.
    """
    counts = {name: config.size(name, most=MOST_EXPERTS) for name in _NAMES if config.has(name)}
    if len({*counts.values()}) > 1:
        raise config.fail(" and ".join(f"{name}={count}" for name, count in counts.items()) + " differ")
    found = next(iter(counts.values()), experts)
    chosen = config.size("num_experts_per_tok", per_token, most=MOST_EXPERTS)
    if chosen > found:
        raise config.fail(f"num_experts_per_tok={chosen} is more than the {found} experts")
    return Mixture(experts=found, per_token=chosen, normalised=normalised)


def write_mixture(shape: ModelShape) -> dict[str, Any]:
    """Write the settings that `read_mixture` reads, of a shape that has a mixture."""
    mixture = shape.mixture
    assert mixture is not None, "`check_writing` has seen to it"
    return {**dict.fromkeys(_NAMES, mixture.experts), "num_experts_per_tok": mixture.per_token}
