"""AdamW whose state is sharded over data-parallel ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from realrl.config.model import OptimizerConfig
from realrl.engine.flat import FlatBuffer
from realrl.model.group import Group, all_gather, reduce_scatter


class ShardedAdamW:
    """Updates a flat parameter buffer from a flat float32 gradient buffer of the same length.

    The buffers are cut into equal parts, one per rank. A step adds the gradients up over the ranks
    (reduce-scatter), updates this rank's part in float32, and collects the parameters (all-gather).
    Parameters of a lower precision have float32 masters, which exist only as this rank's part.
    """

    def __init__(
        self,
        parameters: FlatBuffer,
        gradients: FlatBuffer,
        config: OptimizerConfig,
        group: Group,
        *,
        everyone: Group | None = None,
        owned: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Both buffers must be padded to a multiple of `group.size`.

        The gradient norm is taken over `everyone`, the ranks of all shards of the model, where a rank counts
        elements `owned[name]`, first and end, of a tensor; by default over `group` and all elements.
        """
        self._parameters, self._gradients, self._group = parameters.data, gradients.data, group
        self._clip = config.grad_clip
        part = parameters.data.numel() // group.size
        self._begin, self._end = group.index * part, (group.index + 1) * part
        mine = self._parameters[self._begin : self._end]
        self.master = mine if mine.dtype == torch.float32 else mine.float()
        self._gradient = torch.zeros_like(self.master)
        self._everyone = everyone or group
        self._counted = self._counted_parts(parameters, owned)
        decayed, plain = self._pieces(parameters)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def _counted_parts(
        self, parameters: FlatBuffer, owned: Mapping[str, tuple[int, int]] | None
    ) -> list[Tensor]:
        """Views of this rank's gradient whose elements it counts in the norm."""
        if owned is None:
            return [self._gradient]
        parts = []
        for tensor in parameters.tensors:
            start = parameters.offset(tensor.name)
            low = max(start + owned[tensor.name][0], self._begin)
            high = min(start + owned[tensor.name][1], self._end)
            if low < high:
                parts.append(self._gradient[low - self._begin : high - self._begin])
        return parts

    def _pieces(self, parameters: FlatBuffer) -> tuple[list[Tensor], list[Tensor]]:
        """Parts of this rank's shard with and without weight decay, as parameters with gradients. Neighbours
        of the same kind are one piece."""
        runs: list[tuple[bool, int, int]] = []
        for tensor in parameters.tensors:
            start = parameters.offset(tensor.name)
            low, high = max(start, self._begin), min(start + tensor.numel, self._end)
            decay = len(tensor.shape) > 1
            if low >= high:
                continue
            if runs and runs[-1][0] == decay and runs[-1][2] == low:
                runs[-1] = (decay, runs[-1][1], high)
            else:
                runs.append((decay, low, high))
        pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
        for decay, low, high in runs:
            window = slice(low - self._begin, high - self._begin)
            piece = torch.nn.Parameter(self.master[window])
            piece.grad = self._gradient[window]
            pieces[0 if decay else 1].append(piece)
        return pieces

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Apply the accumulated gradients at learning rate `lr` and set them to zero.

        Returns the global gradient norm before clipping. A norm that is not finite leaves the parameters as
        they were.
        """
        reduce_scatter(self._gradient, self._gradients, self._group)
        squares = [part.square().sum(dtype=torch.float64) for part in self._counted]
        total = torch.stack(squares).sum() if squares else self._gradient.new_zeros((), dtype=torch.float64)
        norm = self._everyone.sum(total).sqrt().item()
        self._gradients.zero_()
        if norm != norm or norm == float("inf"):
            return norm
        if self._clip is not None and norm > self._clip:
            self._gradient.mul_(self._clip / norm)
        for settings in self._optimizer.param_groups:
            settings["lr"] = lr
        self._optimizer.step()
        mine = self._parameters[self._begin : self._end]
        if mine.data_ptr() != self.master.data_ptr():
            mine.copy_(self.master)
        all_gather(self._parameters, mine, self._group)
        return norm

    def discard(self) -> None:
        """Forget the accumulated gradients."""
        self._gradients.zero_()
