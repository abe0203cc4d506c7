"""AdamW with state sharded over data-parallel ranks, learning rate schedules, and the gradient norm."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from realrl.engine.buffers import FlatBuffer
from realrl.families.tensors import TensorSpec
from realrl.layout.limits import GATHER_STAGES
from realrl.model.gpu.path import on_gpu
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.recipe.optimizer import OptimizerConfig

_RUN = 2**16
"""Number of elements in a run. The squares of a run are summed in float32, with few roundings per vector lane. The
sums of runs are added in float64. A sum in float64 throughout would first copy all elements to float64, 8 bytes
each."""


def sum_squares(values: Tensor) -> Tensor:
    """Sum the squares of float32 values. [n], contiguous -> [] float64"""
    if not on_gpu(values):
        return torch.stack([torch.dot(run, run) for run in values.split(_RUN)]).sum(dtype=torch.float64)
    whole = len(values) - len(values) % _RUN
    norms = torch.linalg.vector_norm(values[:whole].view(-1, _RUN), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return torch.cat([norms, rest[None]]).double().square_().sum()


def compute_learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Compute the learning rate of a step: a linear warm-up comes first, then the schedule.

    `step` counts from 0; `steps` is the total number of steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    progress = min(1.0, progress)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            remaining = 1 - progress
        case "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


@dataclass(frozen=True)
class OptimizerPart:
    """Part of a tensor that a rank updates: elements `first` to `end` - 1 of the tensor as the rank stores it.

    `in_parameters` is the index of the first element in the flat buffer of parameters, `in_state` its index in the
    flat tensors of moments and master values.
    """

    tensor: str
    first: int
    end: int
    in_parameters: int
    in_state: int


@dataclass
class _Pieces:
    """Pieces of this rank's parts that are updated with the same settings; each list has one entry per piece.

    This is not an optimizer of torch, because making one imports torch's compiler, which takes 1.5 s.
    """

    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    """Number of updates so far, as torch's kernel counts them."""

    def update(self, config: OptimizerConfig, *, lr: float, decay: float, divisor: Tensor | None) -> None:
        """Update the values with the gradients divided by `divisor`, all pieces in one kernel."""
        beta1, beta2 = config.betas
        adamw(
            self.values,
            self.gradients,
            self.averages,
            self.squares,
            [],
            self.steps,
            fused=True,
            grad_scale=divisor,  # meant for mixed precision; here it clips gradients without another pass
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=config.eps,
            maximize=False,
        )


class ShardedAdamW:
    """Optimizer of a flat parameter buffer with a flat float32 gradient buffer of the same length.

    The buffers are cut into buckets, and every bucket into equal parts, one per rank. A step has three phases.
    First, it sums the gradients of each bucket over ranks (reduce-scatter); these sums can start while other
    gradients are computed. Second, it updates this rank's parts in float32. Third, it collects the updated
    parameters (all-gather), while more buckets are updated. Parameters of lower precision have float32 masters,
    which exist only for this rank's parts. A rank that is alone in its group updates everything, and uses the
    gradient buffer directly.
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
        a pipeline stage without trained parameters.

        The gradient norm is summed over `norm_group`, the ranks of all shards of the model; by default over
        `group`. A rank adds elements `first` to `end` - 1 of a tensor if `counted[name]` is (first, end); by
        default it adds all elements.
        """
        self._parameters = parameters
        self._gradients = gradients.data
        self._group = group
        self._norm_group = norm_group or group
        self._config = config
        self.buckets = parameters.buckets if parameters.tensors else 0
        self.bucket_size = parameters.data.numel() // max(1, self.buckets)
        self._part_size = self.bucket_size // group.size
        local = parameters.data.new_empty(self.buckets * self._part_size, dtype=torch.float32)
        self._local_gradient = self._gradients if group.size == 1 else torch.zeros_like(local)
        self._moments = [torch.zeros_like(local) for _ in range(2)]
        self._master: Tensor | None = None
        if parameters.data.dtype != torch.float32:
            self._master = local
            self.adopt()
        self._norm_parts = list(self._view_counted(counted))
        # Buckets form a few groups, so that an all-gather overlaps with the next update, and the host launches few
        # kernels.
        stages = 1 if group.size == 1 else min(GATHER_STAGES, self.buckets)
        bounds = [self.buckets * i // max(1, stages) for i in range(stages + 1)]
        self._stages = {
            buckets: self._cut_pieces(buckets)
            for buckets in (range(first, end) for first, end in pairwise(bounds))
            if buckets
        }
        """Pieces of each group of buckets, in the order of the updates, by kind. The kinds are pieces with weight
        decay, pieces without it, and pieces of the scalar head, which has its own learning rate."""
        self._reducing: dict[int, dist.Work | None] = {}

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that must survive between steps, in addition to the parameters."""
        return [*self._moments, *([] if self._master is None else [self._master])]

    @property
    def steps(self) -> int:
        """Number of applied steps, which the moments' bias correction needs; 0 with nothing to train."""
        return max((int(step) for step in self._iter_steps()), default=0)

    @steps.setter
    def steps(self, count: int) -> None:
        """Set the number of applied steps."""
        for step in self._iter_steps():
            step.fill_(count)

    def _iter_steps(self) -> Iterator[Tensor]:
        for kinds in self._stages.values():
            for pieces in kinds.values():
                yield from pieces.steps

    @property
    def master(self) -> Tensor | None:
        """Float32 values of this rank's parts; None if the parameters are float32 themselves."""
        return self._master

    @property
    def moments(self) -> dict[str, Tensor]:
        """First and second moments of this rank's parts, flat, named as in torch's AdamW."""
        return dict(zip(("exp_avg", "exp_avg_sq"), self._moments, strict=True))

    @property
    def workspace(self) -> list[Tensor]:
        """Tensors that are used, and overwritten, only during a step."""
        return [] if self._group.size == 1 else [self._local_gradient]

    def list_parts(self) -> Iterator[OptimizerPart]:
        for tensor, low, high in self._cut_tensors(range(self.buckets)):
            start = self._parameters.offset(tensor.name)
            yield OptimizerPart(
                tensor=tensor.name,
                first=low - start,
                end=high - start,
                in_parameters=low,
                in_state=self._find_in_state(low),
            )

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the parameters of this rank's parts into the float32 master values, if there are any."""
        if self._master is not None:
            everything = range(self.buckets)
            self._select_state(self._master, everything).copy_(self._select_parameters(everything))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy this rank's parts (their master values, if there are any) to the parameters of all ranks."""
        _wait_for(self._gather(range(self.buckets)))

    def start_reduce(self, bucket: int) -> None:
        """Start the reduce-scatter of a bucket, whose gradients must be complete.

        Every rank of the group starts the buckets in the same order.
        """
        self._reducing[bucket] = None
        if self._group.size > 1:
            whole = self._view_bucket(self._gradients, bucket)
            local = self._local_gradient[bucket * self._part_size : (bucket + 1) * self._part_size]
            self._reducing[bucket] = reduce_scatter(local, whole, self._group, async_op=True)

    def _finish_reduce(self) -> None:
        # Start from the end, like the buckets that started during the backward pass, because ranks must agree on
        # the order.
        for bucket in reversed(range(self.buckets)):
            if bucket not in self._reducing:
                self.start_reduce(bucket)
        _wait_for(self._reducing.values())
        self._reducing.clear()

    @torch.no_grad()
    def step(
        self,
        lr: float,
        *,
        head_scale: float = 1.0,
        summed: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
        loss: Tensor | None = None,
    ) -> float:
        """Apply the accumulated gradients, divided by `weight`, at learning rate `lr`, and set them to zero.

        A scalar head is trained as if it were stored divided by `head_scale`. Its learning rate is `lr *
        head_scale`, its weight decay per step is the same as with `lr`, and its gradient counts `head_scale` times
        in the norm. `summed` has gradients that are already summed over ranks; they replace the accumulated
        gradients. `loss` is the sum of this rank's losses, if it has any.

        Returns the global gradient norm before clipping, NaN if the loss of any rank is not finite. If it is not
        finite, parameters and gradients do not change; the caller can inspect the gradients, and then `discard`
        them.
        """
        self._finish_reduce()
        self._replace_gradients(summed or {})
        squares = [sum_squares(part) * (head_scale**2 if head else 1.0) for part, head in self._norm_parts]
        total = self._local_gradient.new_zeros((), dtype=torch.float64)
        if squares:
            total = torch.stack(squares).sum()
        if loss is not None:
            # A clamp has gradient 0 where its input is NaN, so gradients can be finite although the loss is not.
            total = total + 0 * loss
        norm: float = self._norm_group.sum(total).sqrt().item() / weight
        if not isfinite(norm):
            return norm
        clip = self._config.grad_clip
        excess = weight if clip is None or norm <= clip else weight * norm / clip
        divisor = None if excess == 1 else torch.full((), excess, device=self._gradients.device)
        gathering = [
            work for buckets in self._stages for work in self._update(buckets, lr, head_scale, divisor)
        ]
        self._gradients.zero_()
        _wait_for(gathering)
        return norm

    @torch.no_grad()
    def discard(self) -> None:
        if self._reducing:
            self._finish_reduce()
        self._gradients.zero_()

    def _replace_gradients(self, summed: Mapping[str, Tensor]) -> None:
        for part in self.list_parts() if summed else ():
            if part.tensor in summed:
                local = self._local_gradient[part.in_state : part.in_state + part.end - part.first]
                local.copy_(summed[part.tensor].flatten()[part.first : part.end])

    def _update(
        self, buckets: range, lr: float, head_scale: float, divisor: Tensor | None
    ) -> list[dist.Work | None]:
        """Update buckets with their gradients divided by `divisor`, and start their all-gathers."""
        decay = self._config.weight_decay
        settings = {
            "decay": (lr, decay),
            "no decay": (lr, 0.0),
            "head": (lr * head_scale, decay / head_scale),
        }
        for kind, pieces in self._stages[buckets].items():
            rate, decay = settings[kind]
            pieces.update(self._config, lr=rate, decay=decay, divisor=divisor)
        return self._gather(buckets)

    def _gather(self, buckets: range) -> list[dist.Work | None]:
        stored = self._select_parameters(buckets)
        if self._master is not None:
            stored.copy_(self._select_state(self._master, buckets))
        if self._group.size == 1:
            return []
        return [
            all_gather(self._view_bucket(self._parameters.data, bucket), part, self._group, async_op=True)
            for bucket, part in zip(buckets, stored, strict=True)
        ]

    def _cut_pieces(self, buckets: range) -> dict[str, _Pieces]:
        """Cut this rank's parts of buckets into pieces by kind.

        All moments are views of two flat tensors, which can be offloaded in one copy each.
        """
        kinds: dict[str, _Pieces] = {}
        for kind, low, high in _merge_runs(
            (_find_kind(tensor), low, high) for tensor, low, high in self._cut_tensors(buckets)
        ):
            first = self._find_in_state(low)
            window = slice(first, first + high - low)
            average, average_square = (moment[window] for moment in self._moments)
            pieces = kinds.setdefault(kind, _Pieces())
            pieces.values.append(
                self._parameters.data[low:high] if self._master is None else self._master[window]
            )
            pieces.gradients.append(self._local_gradient[window])
            pieces.averages.append(average)
            pieces.squares.append(average_square)
            pieces.steps.append(torch.zeros((), dtype=torch.float32, device=average.device))
        return kinds

    def _view_counted(self, counted: Mapping[str, tuple[int, int]] | None) -> Iterator[tuple[Tensor, bool]]:
        """Yield views of the gradient elements that this rank counts in the norm, and whether they belong to the
        scalar head."""
        runs: list[tuple[str, int, int]] = []
        for tensor, low, high in self._cut_tensors(range(self.buckets)):
            if counted is not None:
                start = self._parameters.offset(tensor.name)
                first, end = counted[tensor.name]
                low, high = max(low, start + first), min(high, start + end)
            if low < high:
                first = self._find_in_state(low)
                kind = "head" if _is_scalar_head(tensor) else "other"
                runs.append((kind, first, first + high - low))
        for kind, low, high in _merge_runs(runs):
            yield self._local_gradient[low:high], kind == "head"

    def _cut_tensors(self, buckets: range) -> Iterator[tuple[TensorSpec, int, int]]:
        """Yield this rank's parts of tensors in some buckets: the tensor, and the first element and end in the flat
        buffers."""
        for bucket in buckets:
            begin = bucket * self.bucket_size + self._group.index * self._part_size
            for tensor in self._parameters.tensors:
                start = self._parameters.offset(tensor.name)
                low, high = max(start, begin), min(start + tensor.numel, begin + self._part_size)
                if low < high:
                    yield tensor, low, high

    def _find_in_state(self, element: int) -> int:
        """Convert the index of an element of the buffers to its index in the flat tensors of this rank's parts."""
        bucket, offset = divmod(element, self.bucket_size)
        return bucket * self._part_size + offset - self._group.index * self._part_size

    def _view_bucket(self, flat: Tensor, bucket: int) -> Tensor:
        return flat[bucket * self.bucket_size : (bucket + 1) * self.bucket_size]

    def _select_parameters(self, buckets: range) -> Tensor:
        """View this rank's parts of buckets in the parameter buffer. -> [buckets, part]"""
        by_rank = self._parameters.data.view(self.buckets, self._group.size, self._part_size)
        return by_rank[buckets.start : buckets.stop, self._group.index]

    def _select_state(self, flat: Tensor, buckets: range) -> Tensor:
        """View this rank's parts of buckets in a flat tensor of all its parts. -> [buckets, part]"""
        return flat.view(self.buckets, self._part_size)[buckets.start : buckets.stop]


def _wait_for(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _find_kind(tensor: TensorSpec) -> str:
    if _is_scalar_head(tensor):
        return "head"
    return "decay" if tensor.decay else "no decay"


def _is_scalar_head(tensor: TensorSpec) -> bool:
    return tensor.parameter == "scalar_head"


def _merge_runs(runs: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Join neighbouring runs (kind, first, end) of the same kind."""
    joined: list[tuple[str, int, int]] = []
    for kind, low, high in runs:
        if joined and joined[-1][0] == kind and joined[-1][2] == low:
            joined[-1] = (kind, joined[-1][1], high)
        else:
            joined.append((kind, low, high))
    return joined
