"""Memory of decode steps (KV cache, row buffers, CUDA graphs), which a generate call may leave to the next call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realrl.engine.generation.decode_step import DecodeStep, StepGraphs
from realrl.engine.generation.row_buffers import RowBuffers
from realrl.engine.generation.sampler import Sampler
from realrl.engine.model import Model
from realrl.layout.kv_blocks import BLOCK_TOKENS, CacheSize, count_steps_per_look, pad_rows
from realrl.model.kv_cache import PagedCache
from realrl.model.matrices import DecodeWeights
from realrl.recipe.generation import GenerationConfig


@dataclass(frozen=True)
class DecodeKind:
    """Everything that CUDA graphs of decode steps depend on, except sizes. Calls of different kinds cannot share
    graphs."""

    sampling: GenerationConfig
    choices: bool
    """Whether rows differ in how their tokens are chosen."""
    stop_token_ids: tuple[int, ...]
    experts: int
    """Experts per token that are recorded in each layer; 0 for none."""
    batches: int
    """Number of decode batches."""
    on_gpu: bool
    addresses: tuple[int, ...]
    """Addresses of the parameters."""


@dataclass(frozen=True)
class DecodeSize:
    """Size of the memory of decode steps."""

    blocks: int
    """Blocks of the KV cache."""
    rows: int
    """Rows of a decode batch, including rows that only pad a step."""
    longest_prompt: int
    """Tokens of the longest prompt."""

    def holds(self, other: "DecodeSize") -> bool:
        """Check whether memory of this size is enough for another size."""
        return self.join(other) == self

    def join(self, other: "DecodeSize") -> "DecodeSize":
        """Compute the smallest size that is enough for both."""
        return DecodeSize(
            max(self.blocks, other.blocks),
            max(self.rows, other.rows),
            max(self.longest_prompt, other.longest_prompt),
        )


@dataclass(frozen=True, eq=False)
class DecodeMemory:
    """Memory of a generate call's decode steps, and the steps themselves, whose graphs contain addresses of this
    memory."""

    kind: DecodeKind
    size: DecodeSize
    weights: DecodeWeights
    cache: PagedCache
    buffers: Sequence[RowBuffers]
    """Buffers of each decode batch."""
    steps: Sequence[DecodeStep | StepGraphs]
    """Step of each decode batch."""

    @classmethod
    def allocate(cls, model: Model, kind: DecodeKind, size: DecodeSize) -> "DecodeMemory":
        device = model.device
        weights = model.transformer.prepare_decoding()
        cache = PagedCache(
            CacheSize(size.blocks, size.rows, BLOCK_TOKENS * model.groups.context.size),
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_kv_heads,
            head_dim=model.shape.head_dim,
            dtype=model.dtype,
            device=device,
            experts=kind.experts,
            group=model.groups.context,
        )
        sampler = Sampler(
            kind.sampling, temperature=model.temperature, stop_token_ids=kind.stop_token_ids, device=device
        )
        step = DecodeStep(model, weights, cache, sampler)
        by_graphs = kind.on_gpu and weights.runs_ahead
        buffers = [
            RowBuffers(
                size.rows,
                longest_prompt=size.longest_prompt,
                new_tokens=kind.sampling.max_new_tokens,
                steps=count_steps_per_look(cpu=not kind.on_gpu),
                device=device,
                mirrored=kind.on_gpu,
                part=cache.part,
                choices=kind.choices,
            )
            for _ in range(kind.batches)
        ]
        steps = [StepGraphs(step, device) if by_graphs else step for _ in buffers]
        return cls(kind, size, weights, cache, buffers, steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and the row buffers on the device. Graphs are not counted, because torch does not
        report their bytes."""
        return self.cache.nbytes + sum(buffers.nbytes for buffers in self.buffers)


class KeptDecoding:
    """Memory of decode steps that survives from one generate call to the next, so that graphs are captured only
    once.

    It grows to the size of the largest call. If a call is of another kind, for example because parameters have
    moved, the memory is freed and allocated again.
    """

    def __init__(self) -> None:
        self._memory: DecodeMemory | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are held between calls (see `DecodeMemory.nbytes`)."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, model: Model, kind: DecodeKind, size: DecodeSize) -> DecodeMemory:
        """Take the memory for a call. It is kept for later calls only if its weights follow changes of the
        parameters."""
        if self._memory is not None:
            if self._memory.kind == kind and self._memory.size.holds(size):
                return self._memory
            size = size.join(self._memory.size)
            self._memory = None  # free it before the new memory is allocated
        memory = DecodeMemory.allocate(model, kind, size)
        if memory.weights.follow_parameters:
            self._memory = memory
        return memory


def list_addresses(model: Model) -> tuple[int, ...]:
    """List the addresses of a model's parameters, which change when their memory is freed and allocated again."""
    return tuple(of.buffer.data.data_ptr() for of in model.sets.values())


def count_computed_rows(rows: int, *, on_gpu: bool) -> int:
    """Count the rows to compute for a batch of `rows` rows. A GPU rounds up, because it has graphs only for some
    batch sizes."""
    return pad_rows(rows) if on_gpu else rows


def is_gpu(device: torch.device) -> bool:
    """Check whether a device computes asynchronously, so that the host can start the steps of a whole turn, as CUDA
    graphs, without waiting."""
    return device.type != "cpu"
