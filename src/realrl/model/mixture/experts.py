"""Experts of a layer: feed-forward blocks of which a router chooses some for each token."""

from dataclasses import dataclass

from torch import Tensor

from realrl.families.shape import Activation, Mixture
from realrl.model.arithmetic.elementwise import activate
from realrl.model.arithmetic.grouped import Groups, gather_weighed, sum_copies
from realrl.model.arithmetic.matrices import Matrices
from realrl.model.mixture.routing import Routing


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """A layer's experts and their router, as a tensor-parallel rank holds them: a part of the units of each."""

    router: Tensor
    """[E, H]"""
    gate_up: Tensor
    """Gate and up of each expert, one after the other. [E * 2 * units, H]"""
    down: Tensor
    """[E * H, units]"""
    mixture: Mixture
    activation: Activation
    layer: int
    """Number of the layer in its stage."""

    def run(self, x: Tensor, matrices: Matrices, routing: Routing) -> Tensor:
        """Compute this rank's part of what the experts of each token add up to. x: [T, H] -> [T, H]"""
        mixture = self.mixture
        scores = self._score(matrices.multiply(x, self.router, None))
        scores, experts = routing.route(self.layer, scores, mixture.per_token)
        weights = scores.gather(1, experts)
        if mixture.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        groups = Groups.of(experts, mixture.experts)
        weights = weights.flatten().index_select(0, groups.order)
        if mixture.weighed == "inputs":
            rows = gather_weighed(x, weights, groups)
            gate_up = matrices.multiply_groups(rows, self.gate_up, groups)
            del rows
        else:
            gate_up = matrices.multiply_groups(x, self.gate_up, groups, of_tokens=True)
        inner = activate(gate_up, self.activation, gated=True)
        del gate_up
        if mixture.weighed == "outputs":
            # Before the last product, which has more columns than most experts have units.
            inner = inner * weights.to(inner.dtype)[:, None]
        rows = matrices.multiply_groups(inner, self.down, groups)
        del inner
        return sum_copies(rows, groups)

    def _score(self, logits: Tensor) -> Tensor:
        """Compute the scores of experts. [T, E] -> [T, E] float32"""
        if self.mixture.scores == "softmax":
            return logits.float().softmax(1)
        # torch's vectors, and what is left over beside them, differ in their last bits, which float32 then drops.
        return logits.double().sigmoid().float()
