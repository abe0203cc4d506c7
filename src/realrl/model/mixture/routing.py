"""Choice of the experts of tokens."""

from torch import Tensor


class Routing:
    """Choice of experts in a pass: the likeliest ones."""

    def route(self, layer: int, probabilities: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens in a layer of the stage. probabilities, or other scores: [T, E] float32

        -> those that weights are made of [T, E], and numbers of experts [T, per_token] int64
        """
        return probabilities, probabilities.detach().topk(per_token, dim=1).indices


LIKELIEST = Routing()
