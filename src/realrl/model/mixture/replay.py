"""Router replay: experts that a sampler chose, recorded beside its keys and values, and used again in training."""

import torch
from torch import Tensor

from realrl.model.mixture.routing import LIKELIEST, Routing

NONE_CHOSEN = -1
"""Number in the place of experts that nobody chose: of a token that has not passed through a layer."""
EXPERT_DTYPE = torch.int16
"""Type of the numbers of experts that are recorded."""


class RecordedRouting(Routing):
    """Choice by another routing, which is written down for each token."""

    def __init__(
        self, record: Tensor, places: tuple[Tensor, ...], source: Tensor | None, inner: Routing
    ) -> None:
        """`record`: [layers of the stage, ..., k] EXPERT_DTYPE; `places`: indices into its middle dims, one for
        each token that is recorded, [N]; `source`: which tokens these are, [N], None for all."""
        self._record, self._places, self._source, self._inner = record, places, source, inner

    def route(self, layer: int, probabilities: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        """Choose, and record the choice."""
        weighed, experts = self._inner.route(layer, probabilities, per_token)
        kept = experts if self._source is None else experts.index_select(0, self._source)
        self._record[layer][self._places] = kept.to(EXPERT_DTYPE)
        return weighed, experts

    def skip(self, layer: int) -> None:
        """Record that the tokens do not pass through the experts of a layer."""
        self._record[layer][self._places] = NONE_CHOSEN


class ReplayedRouting(Routing):
    """Choice that was made before; where none was, another routing chooses.

    What the experts are weighed by, and its gradient, are the model's own.
    """

    def __init__(self, experts: Tensor, inner: Routing = LIKELIEST) -> None:
        """`experts`: of the layers of the stage, [T, layers, k]."""
        self._experts, self._inner = experts, inner

    def route(self, layer: int, probabilities: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        """Take the experts that were chosen before."""
        weighed, experts = self._inner.route(layer, probabilities, per_token)
        chosen = self._experts[:, layer].long()
        return weighed, torch.where(chosen == NONE_CHOSEN, experts, chosen)
