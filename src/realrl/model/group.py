"""Group of ranks and its collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# From torch 2.13 on, collectives for single tensors have new names, and the old names warn at every call.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """Ranks of a process group, and this rank's index among them. `handle` is None for a single rank."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce the sum of `tensor` over the group, in place."""
        if self.handle is not None:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.handle)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """All-reduce the elementwise maximum over the group, in place."""
        if self.handle is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's `tensor`, in place."""
        if self.handle is not None:
            dist.broadcast(tensor, self.ranks[0], group=self.handle)
        return tensor

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """All-gather matrices side by side. part: [N, columns of this rank] -> [N, columns]

        Each rank has ceil(columns / size) columns; the last ranks may have fewer.
        """
        if self.handle is None:
            return part
        width = -(-columns // self.size)
        padded = F.pad(part, (0, width - part.shape[1])).contiguous()
        buffer = part.new_empty(self.size, len(part), width)
        all_gather(buffer.view(-1, width), padded, self)
        return buffer.transpose(0, 1).reshape(len(part), -1)[:, :columns]


def make_single_rank_group(rank: int = 0) -> Group:
    return Group((rank,), 0)


def reduce_scatter(
    output: Tensor, buffer: Tensor, group: Group, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce-scatter `buffer` [N] over the group into `output` [N / size].

    With `async_op`, returns at once with the work to wait for, if any.
    """
    if group.handle is None:
        output.copy_(buffer)
        return None
    return _reduce_scatter(output, buffer, dist.ReduceOp.SUM, group=group.handle, async_op=async_op)


def all_gather(buffer: Tensor, part: Tensor, group: Group, *, async_op: bool = False) -> dist.Work | None:
    """All-gather each rank's `part` [N / size] into `buffer` [N]; `part` may lie inside `buffer`.

    With `async_op`, returns at once with the work to wait for, if any.
    """
    if group.handle is not None:
        inside = part.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        own = part.clone() if inside else part
        return _all_gather(buffer, own, group=group.handle, async_op=async_op)
    if buffer.data_ptr() != part.data_ptr():
        buffer.copy_(part)
    return None


def gather_rows(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """All-gather the rows of several tensors in one message, without gradient. parts: [N, C] each, of any types ->
    [size * N, C] each"""
    each = [part.contiguous().view(torch.uint8) for part in parts]
    own = torch.cat(each, 1)
    buffer = own.new_empty(group.size * len(own), own.shape[1])
    all_gather(buffer, own, group)
    found = buffer.split([part.shape[1] for part in each], 1)
    return [of.contiguous().view(part.dtype) for of, part in zip(found, parts, strict=True)]


def all_to_all(
    found: Tensor,
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Group,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Send consecutive `rows` to the ranks of a group of several ranks. The rows that arrive are written to
    `found`, in the order of ranks. `sent` and `received` have the number of rows for each rank, and from each rank.

    With `async_op`, returns at once with the work to wait for.
    """
    return dist.all_to_all_single(
        found, rows.contiguous(), [*received], [*sent], group=group.handle, async_op=async_op
    )
