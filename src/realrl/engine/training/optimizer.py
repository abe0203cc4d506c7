"""AdamW with state sharded over data-parallel ranks, learning rate schedules, and the gradient norm."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, eq=False)
class Bucket:
    """Elements of flat buffers that are communicated together. The ranks of `group` divide them equally."""

    start: int
    """Index of the first element in the buffers."""
    size: int
    group: Group
    run: int
    """Index of the run of the buffers that it is part of."""
    in_state: int
    """Index of this rank's first element in the flat tensors of all parts that this rank updates."""

    @property
    def part(self) -> int:
        """Number of elements that this rank updates."""
        return self.size // self.group.size

    @property
    def own(self) -> int:
        """Index in the buffers of the first element that this rank updates."""
        return self.start + self.group.index * self.part

    def view_whole(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size]

    def view_own(self, flat: Tensor) -> Tensor:
        """View this rank's part in a buffer."""
        return flat[self.own : self.own + self.part]

    def view_state(self, flat: Tensor) -> Tensor:
        """View this rank's part in a flat tensor of all parts that it updates."""
        return flat[self.in_state : self.in_state + self.part]


Buckets = tuple[Bucket, ...]


def _cut_buckets(buffer: FlatBuffer, groups: Sequence[Group]) -> Buckets:
    """Cut each run of a buffer into buckets of equal size, which the ranks of its group divide."""
    found: list[Bucket] = []
    start = in_state = 0
    for number, (run, group) in enumerate(zip(buffer.runs, groups, strict=True)):
        size = run.size // run.buckets
        for _ in range(run.buckets if run.tensors else 0):
            found.append(Bucket(start, size, group, number, in_state))
            start += size
            in_state += size // group.size
    return tuple(found)


class ShardedAdamW:
    """Optimizer of a flat parameter buffer with a flat float32 gradient buffer of the same length.

    Each run of the buffers is cut into buckets, and every bucket into equal parts, one per rank. A step has three
    phases. First, it sums the gradients of each bucket over ranks (reduce-scatter); these sums can start while
    other gradients are computed. Second, it updates this rank's parts in float32. Third, it collects the updated
    parameters (all-gather), while more buckets are updated. Parameters of lower precision have float32 masters,
    which exist only for this rank's parts. A rank that is alone in its group updates everything, and uses the
    gradient buffer directly.
    """

    def __init__(
        self,
        parameters: FlatBuffer,
        gradients: FlatBuffer,
        config: OptimizerConfig,
        *groups: Group,
        norm_group: Group | None = None,
        counted: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`groups` has the ranks that divide each run of the buffers among themselves. A run must be padded to a
        multiple of its group's size times its bucket count. Runs may be empty, on a pipeline stage without trained
        parameters.

        The gradient norm is summed over `norm_group`, the ranks of all shards of the model; by default over the
        only group. A rank adds elements `first` to `end` - 1 of a tensor if `counted[name]` is (first, end); by
        default it adds all elements.
        """
        self._parameters = parameters
        self._gradients = gradients.data
        self._norm_group = norm_group or groups[0]
        self._config = config
        self.buckets = _cut_buckets(parameters, groups)
        self._alone = all(group.size == 1 for group in groups)
        parts = sum(bucket.part for bucket in self.buckets)
        local = parameters.data.new_empty(parts, dtype=torch.float32)
        self._local_gradient = self._gradients if self._alone else torch.zeros_like(local)
        self._moments = [torch.zeros_like(local) for _ in range(2)]
        self._master: Tensor | None = None
        if parameters.data.dtype != torch.float32:
            self._master = local
            self.adopt()
        self._norm_parts = list(self._view_counted(counted))
        # Buckets form a few groups, so that an all-gather overlaps with the next update, and the host launches few
        # kernels.
        count = len(self.buckets)
        stages = 1 if self._alone else min(GATHER_STAGES, count)
        bounds = [count * i // max(1, stages) for i in range(stages + 1)]
        self._stages = {
            buckets: self._cut_pieces(buckets)
            for first, end in pairwise(bounds)
            if (buckets := self.buckets[first:end])
        }
        """Pieces of each group of buckets, in the order of the updates, by kind. The kinds are pieces with weight
        decay, pieces without it, and pieces of the scalar head, which has its own learning rate."""
        self._reducing: dict[Bucket, dist.Work | None] = {}

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
        return [] if self._alone else [self._local_gradient]

    def list_parts(self) -> Iterator[OptimizerPart]:
        for tensor, low, high, in_state in self._cut_tensors(self.buckets):
            start = self._parameters.offset(tensor.name)
            yield OptimizerPart(
                tensor=tensor.name,
                first=low - start,
                end=high - start,
                in_parameters=low,
                in_state=in_state,
            )

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the parameters of this rank's parts into the float32 master values, if there are any."""
        if self._master is not None:
            for bucket in self.buckets:
                bucket.view_state(self._master).copy_(bucket.view_own(self._parameters.data))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy this rank's parts (their master values, if there are any) to the parameters of all ranks."""
        _wait_for(self._gather(self.buckets))

    def start_reduce(self, bucket: "Bucket") -> None:
        """Start the reduce-scatter of a bucket, whose gradients must be complete.

        Every rank of the group starts the buckets in the same order.
        """
        self._reducing[bucket] = None
        if not self._alone:
            whole, local = bucket.view_whole(self._gradients), bucket.view_state(self._local_gradient)
            self._reducing[bucket] = reduce_scatter(local, whole, bucket.group, async_op=True)

    def _finish_reduce(self) -> None:
        # Start from the end, like the buckets that started during the backward pass, because ranks must agree on
        # the order.
        for bucket in reversed(self.buckets):
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
        self, buckets: "Buckets", lr: float, head_scale: float, divisor: Tensor | None
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

    def _gather(self, buckets: "Buckets") -> list[dist.Work | None]:
        flat = self._parameters.data
        if self._master is not None:
            # One call, so that the host launches few kernels.
            masters = [bucket.view_state(self._master) for bucket in buckets]
            torch._foreach_copy_([bucket.view_own(flat) for bucket in buckets], masters)
        if self._alone:
            return []
        return [
            all_gather(bucket.view_whole(flat), bucket.view_own(flat), bucket.group, async_op=True)
            for bucket in buckets
        ]

    def _cut_pieces(self, buckets: "Buckets") -> dict[str, _Pieces]:
        """Cut this rank's parts of buckets into pieces by kind.

        All moments are views of two flat tensors, which can be offloaded in one copy each.
        """
        kinds: dict[str, _Pieces] = {}
        for kind, low, first, size in _merge_runs(
            (_find_kind(tensor), low, in_state, high - low)
            for tensor, low, high, in_state in self._cut_tensors(buckets)
        ):
            window = slice(first, first + size)
            average, average_square = (moment[window] for moment in self._moments)
            pieces = kinds.setdefault(kind, _Pieces())
            pieces.values.append(
                self._parameters.data[low : low + size] if self._master is None else self._master[window]
            )
            pieces.gradients.append(self._local_gradient[window])
            pieces.averages.append(average)
            pieces.squares.append(average_square)
            pieces.steps.append(torch.zeros((), dtype=torch.float32, device=average.device))
        return kinds

    def _view_counted(self, counted: Mapping[str, tuple[int, int]] | None) -> Iterator[tuple[Tensor, bool]]:
        """Yield views of the gradient elements that this rank counts in the norm, and whether they belong to the
        scalar head."""
        runs: list[tuple[str, int, int, int]] = []
        for tensor, low, high, in_state in self._cut_tensors(self.buckets):
            begin, end = low, high
            if counted is not None:
                start = self._parameters.offset(tensor.name)
                first, last = counted[tensor.name]
                begin, end = max(low, start + first), min(high, start + last)
            if begin < end:
                kind = "head" if _is_scalar_head(tensor) else "other"
                runs.append((kind, begin, in_state + begin - low, end - begin))
        for kind, _, first, size in _merge_runs(runs):
            yield self._local_gradient[first : first + size], kind == "head"

    def _cut_tensors(self, buckets: "Buckets") -> Iterator[tuple[TensorSpec, int, int, int]]:
        """Yield this rank's parts of tensors in some buckets: the tensor, the first element and the end in the flat
        buffers, and the index of the first element in the flat tensors of this rank's parts."""
        for bucket in buckets:
            for tensor in self._parameters.tensors:
                start = self._parameters.offset(tensor.name)
                low, high = max(start, bucket.own), min(start + tensor.numel, bucket.own + bucket.part)
                if low < high:
                    yield tensor, low, high, bucket.in_state + low - bucket.own


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


def _merge_runs(runs: Iterable[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """Join neighbouring runs (kind, first in the buffers, first in the state, size) of the same kind."""
    joined: list[tuple[str, int, int, int]] = []
    for kind, low, first, size in runs:
        if joined:
            of, its_low, its_first, its_size = joined[-1]
            if of == kind and its_low + its_size == low and its_first + its_size == first:
                joined[-1] = (kind, its_low, its_first, its_size + size)
                continue
        joined.append((kind, low, first, size))
    return joined
