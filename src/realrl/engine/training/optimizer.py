"""AdamW with state sharded over data-parallel ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.flat import FlatBuffer
from realrl.families.tensors import TensorSpec
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.recipe.model import OptimizerConfig


@dataclass(frozen=True)
class OptimizerPart:
    """Part of a tensor that a rank updates: elements `first` up to `end` of the tensor as the rank stores it.

    in_parameters, in_state: where the first of them lies in the flat buffer of parameters, and in the flat tensors
    of moments and master.
    """

    tensor: str
    first: int
    end: int
    in_parameters: int
    in_state: int


class ShardedAdamW:
    """Optimizer of a flat parameter buffer with a flat float32 gradient buffer of the same length.

    The buffers are cut into buckets, and every bucket into equal parts, one per rank. A step adds the gradients
    of each bucket up over the ranks (reduce-scatter, which can start while others are still being computed),
    updates this rank's part in float32, and collects the parameters (all-gather, while the next bucket is
    updated). Parameters of a lower precision have float32 masters, which exist only as this rank's parts.
    """

    def __init__(
        self,
        parameters: FlatBuffer,
        gradients: FlatBuffer,
        config: OptimizerConfig,
        group: Group,
        *,
        norm_group: Group | None = None,
        counted: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Both buffers must be padded to a multiple of `group.size` times their bucket count. They may be empty, on
        a pipeline stage that has nothing to train.

        The gradient norm is taken over `norm_group`, the ranks of all shards of the model, where a rank counts
        elements `counted[name]`, first and end, of a tensor; by default over `group` and all elements.
        """
        self._parameters = parameters
        self._gradients = gradients.data
        self._group = group
        self._norm_group = norm_group or group
        self._clip = config.grad_clip
        self._decay = config.weight_decay
        self.buckets = parameters.buckets if parameters.tensors else 0
        self.bucket_size = parameters.data.numel() // max(1, self.buckets)
        self._part_size = self.bucket_size // group.size
        local = parameters.data.new_empty(self.buckets * self._part_size, dtype=torch.float32)
        self._local_gradient, *self._moments = (torch.zeros_like(local) for _ in range(3))
        self._master: Tensor | None = None
        if parameters.data.dtype != torch.float32:
            self._master = local
            for bucket in range(self.buckets):
                self._local_part(local, bucket).copy_(self._local_parameters(bucket))
        self._norm_parts = list(self._counted_parts(counted))
        self._optimizers = [self._make_bucket_optimizer(bucket, config) for bucket in range(self.buckets)]
        self._reducing: dict[int, dist.Work | None] = {}

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that must survive between steps, besides the parameters themselves."""
        return [*self._moments, *([] if self._master is None else [self._master])]

    @property
    def steps(self) -> int:
        """Number of steps applied, which the correction of the moments depends on; 0 with nothing to train."""
        counts = [int(state["step"]) for state in self._iter_states()]
        return max(counts, default=0)

    @steps.setter
    def steps(self, count: int) -> None:
        for state in self._iter_states():
            state["step"].fill_(count)

    def _iter_states(self) -> Iterator[dict[str, Tensor]]:
        for optimizer in self._optimizers:
            yield from optimizer.state.values()

    @property
    def master(self) -> Tensor | None:
        """Float32 values of this rank's parts; None where the parameters are float32 themselves."""
        return self._master

    @property
    def moments(self) -> dict[str, Tensor]:
        """First and second moments of this rank's parts, flat, by the names that torch's AdamW has for them."""
        return dict(zip(("exp_avg", "exp_avg_sq"), self._moments, strict=True))

    def list_parts(self) -> Iterator["OptimizerPart"]:
        """List the parts of tensors that this rank updates."""
        for bucket in range(self.buckets):
            begin = self._find_start(bucket)
            for tensor, low, high in self._tensors_in(bucket):
                start = self._parameters.offset(tensor.name)
                yield OptimizerPart(
                    tensor=tensor.name,
                    first=low - start,
                    end=high - start,
                    in_parameters=low,
                    in_state=bucket * self._part_size + low - begin,
                )

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameters, on all ranks, what this rank's parts of them say: the master where there is one."""
        gathering = [self._gather(bucket) for bucket in range(self.buckets)]
        for work in gathering:
            if work is not None:
                work.wait()

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that are used only during a step, and overwritten then."""
        return [self._local_gradient]

    def _local_part(self, flat: Tensor, bucket: int) -> Tensor:
        """A bucket's part of a flat tensor that holds all of this rank's parts."""
        return flat[bucket * self._part_size : (bucket + 1) * self._part_size]

    def _find_start(self, bucket: int) -> int:
        """Find the start of this rank's part of a bucket in the buffers."""
        return bucket * self.bucket_size + self._group.index * self._part_size

    def _local_parameters(self, bucket: int) -> Tensor:
        """This rank's part of a bucket of the parameters."""
        begin = self._find_start(bucket)
        return self._parameters.data[begin : begin + self._part_size]

    def _tensors_in(self, bucket: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """Tensors, or parts of them, in this rank's part of a bucket: which, first element and end in the
        buffers."""
        begin = self._find_start(bucket)
        for tensor in self._parameters.tensors:
            start = self._parameters.offset(tensor.name)
            low, high = max(start, begin), min(start + tensor.numel, begin + self._part_size)
            if low < high:
                yield tensor, low, high

    def _counted_parts(self, counted: Mapping[str, tuple[int, int]] | None) -> Iterator[tuple[Tensor, bool]]:
        """Views of this rank's gradient whose elements it counts in the norm, and whether they are the head's."""
        for bucket in range(self.buckets):
            gradient = self._local_part(self._local_gradient, bucket)
            begin = self._find_start(bucket)
            for tensor, low, high in self._tensors_in(bucket):
                if counted is not None:
                    start = self._parameters.offset(tensor.name)
                    first, end = counted[tensor.name]
                    low, high = max(low, start + first), min(high, start + end)
                if low < high:
                    yield gradient[low - begin : high - begin], _is_scalar_head(tensor)

    def _make_bucket_optimizer(self, bucket: int, config: OptimizerConfig) -> torch.optim.AdamW:
        """AdamW over this rank's part of a bucket: pieces with weight decay, pieces without, and the scalar head,
        whose learning rate is its own. The moments of all pieces are views of two flat tensors, which can be
        offloaded in one copy."""
        begin = self._find_start(bucket)
        values = self._local_parameters(bucket)
        if self._master is not None:
            values = self._local_part(self._master, bucket)
        pieces: dict[str, list[Tensor]] = {"decay": [], "no decay": [], "head": []}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for kind, low, high in _merge_runs(
            (_find_kind(tensor), low, high) for tensor, low, high in self._tensors_in(bucket)
        ):
            window = slice(low - begin, high - begin)
            piece = torch.nn.Parameter(values[window])
            piece.grad = self._local_part(self._local_gradient, bucket)[window]
            pieces[kind].append(piece)
            first, second = (self._local_part(moment, bucket)[window] for moment in self._moments)
            step = torch.zeros((), dtype=torch.float32, device=piece.device)
            state[piece] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        optimizer = torch.optim.AdamW(
            [
                {"params": pieces["decay"], "weight_decay": config.weight_decay},
                {"params": pieces["no decay"], "weight_decay": 0.0},
                {"params": pieces["head"], "weight_decay": config.weight_decay},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        optimizer.state.update(state)
        return optimizer

    def start_reduce(self, bucket: int) -> None:
        """Start the reduce-scatter of a bucket, whose gradients must be complete.

        Every rank of the group starts the buckets in the same order.
        """
        whole = self._gradients[bucket * self.bucket_size : (bucket + 1) * self.bucket_size]
        self._reducing[bucket] = reduce_scatter(
            self._local_part(self._local_gradient, bucket), whole, self._group, async_op=True
        )

    def _finish_reduce(self) -> None:
        for bucket in reversed(range(self.buckets)):
            if bucket not in self._reducing:
                self.start_reduce(bucket)
        for work in self._reducing.values():
            if work is not None:
                work.wait()
        self._reducing.clear()

    @torch.no_grad()
    def step(self, lr: float, *, head_scale: float = 1.0) -> float:
        """Apply the accumulated gradients at learning rate `lr` and set them to zero.

        A scalar head's rate is `lr * head_scale`, and its decay per step that of `lr`: it is trained as if it were
        stored divided by `head_scale`, and so its gradient counts times `head_scale` in the norm.
        Returns the global gradient norm before clipping. Where it is not finite, parameters and gradients are left
        as they were: look at the gradients, and `discard` them.
        """
        self._finish_reduce()
        squares = [
            part.square().sum(dtype=torch.float64) * (head_scale**2 if head else 1.0)
            for part, head in self._norm_parts
        ]
        total = self._local_gradient.new_zeros((), dtype=torch.float64)
        if squares:
            total = torch.stack(squares).sum()
        norm: float = self._norm_group.sum(total).sqrt().item()
        if not isfinite(norm):
            return norm
        self._gradients.zero_()
        if self._clip is not None and norm > self._clip:
            self._local_gradient.mul_(self._clip / norm)
        gathering = [self._update(bucket, lr, head_scale) for bucket in range(self.buckets)]
        for work in gathering:
            if work is not None:
                work.wait()
        return norm

    def _update(self, bucket: int, lr: float, head_scale: float) -> dist.Work | None:
        """Update a bucket and start its all-gather."""
        optimizer = self._optimizers[bucket]
        *rest, head = optimizer.param_groups
        for settings in rest:
            settings["lr"] = lr
        head |= {"lr": lr * head_scale, "weight_decay": self._decay / head_scale}
        optimizer.step()
        return self._gather(bucket)

    def _gather(self, bucket: int) -> dist.Work | None:
        """Start the all-gather of a bucket of the parameters."""
        stored = self._local_parameters(bucket)
        if self._master is not None:
            stored.copy_(self._local_part(self._master, bucket))
        whole = self._parameters.data[bucket * self.bucket_size : (bucket + 1) * self.bucket_size]
        return all_gather(whole, stored, self._group, async_op=True)

    @torch.no_grad()
    def discard(self) -> None:
        """Discard the accumulated gradients."""
        if self._reducing:
            self._finish_reduce()
        self._gradients.zero_()


def _find_kind(tensor: TensorSpec) -> str:
    if _is_scalar_head(tensor):
        return "head"
    return "decay" if tensor.decay else "no decay"


def _is_scalar_head(tensor: TensorSpec) -> bool:
    return tensor.parameter == "scalar_head"


def _merge_runs(runs: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Join neighbouring runs (kind, first, end) of the same kind."""
    joined: list[tuple[str, int, int]] = []
    for kind, low, high in runs:
        if joined and joined[-1][0] == kind and joined[-1][2] == low:
            joined[-1] = (kind, joined[-1][1], high)
        else:
            joined.append((kind, low, high))
    return joined
