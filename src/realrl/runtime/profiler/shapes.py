"""List all measurements of one model shape in one data type."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, zip_longest
from operator import itemgetter

import torch
from torch import Tensor

from realrl.engine.dtypes import find_products, find_torch_dtype
from realrl.engine.model import Model
from realrl.engine.parallel_groups import ParallelGroups
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Init, TensorSpec
from realrl.layout.layout import build_layout
from realrl.layout.shard import Shard
from realrl.model.arithmetic.ops import Products
from realrl.model.group import Group
from realrl.plan.placement import ELEMENT_BYTES, Dtype, Mesh, Placement, Strategy
from realrl.planner.profile.profile import LayerKind, Measurement
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.profiler.decoding import DECODE_STEPS, Decoding
from realrl.runtime.profiler.machine import Update
from realrl.runtime.profiler.passes import Passes, convert_parts, find_window_share, measure_preparation
from realrl.runtime.profiler.points import UNKNOWN, Clock, Point
from realrl.runtime.profiler.sizes import Sizes

_LAYERS = 2
"""Number of layers of models for passes. The first layer prepares data for all, and the second one is typical."""
_STARTED_LAYERS = 3
"""Number of layers of models for prefill, which computes only a part of the last layer."""
_MIXED_LAYERS = 4
"""Number of layers of models in which some layers have sliding windows. One layer of each kind is neither first nor
last."""
_DECODED_BYTES = 256 << 20
"""Minimum bytes of the layers in measured decode steps, so that caches cannot hold them. Smaller models are
measured with all their layers."""
_LARGEST_UPDATE = 1 << 27
"""Maximum number of parameters in a measured optimizer update."""
_PASSES: Mapping[Head, tuple[LayerKind, ...]] = {
    "lm": ("head", "head_backward"),
    "scalar": ("embed", "embed_backward", "forward", "backward", "scalar", "scalar_backward"),
}
"""Parts that are measured with each head. Parts without a head use the scalar head, which has no vocabulary."""

_PRODUCTS = {"cpu": (1 << 9, 1 << 11), "cuda": (1 << 12, 1 << 13)}
"""Numbers of rows of square matrices in products, by type of device. The larger size reaches the peak speed."""

ShapeRow = list[Point[Measurement]]


@dataclass(frozen=True)
class ShapeMeasurements:
    """Measurements of a model shape. `degrees`: degrees of tensor parallelism."""

    shape: ModelShape
    dtype: Dtype
    sizes: Sizes
    sampling: GenerationConfig
    degrees: tuple[int, ...]
    clock: Clock

    def rows(self) -> Iterator[ShapeRow]:
        """Yield series of points of increasing size.

        Degrees of parallelism alternate, so that changes in the machine's speed affect all of them.
        """
        for answer, sizes in _by_length(self.sizes.preparations()):
            yield [self._preparation(rows, answer) for rows in sizes]
        yield [self._update(layers) for layers in self.sizes.layers(self.shape.layers)]
        yield [self._product(rows) for rows in _PRODUCTS[self.clock.device.type]]
        for alike in zip_longest(*map(self._calls, self.degrees)):
            yield from (row for row in alike if row is not None)

    def _calls(self, tp: int) -> Iterator[ShapeRow]:
        yield from self._passes("scalar", tp, self.sizes.passes())
        yield from self._passes("lm", tp, self.sizes.few_passes())
        yield from self._starts(tp)
        yield from self._turns(tp)

    def _preparation(self, rows: int, answer: int) -> Point[Measurement]:
        blank = Measurement(kind="prepare", sequences=rows, context=answer, seconds=UNKNOWN)
        return Point(
            (blank,), lambda: {"prepare": measure_preparation(rows, answer, self.clock)}, rows, times=2
        )

    def _update(self, layers: int) -> Point[Measurement]:
        tensors = _layer_tensors(self.shape, layers)
        elements = sum(spec.numel for spec in tensors)
        update = cache(lambda: Update(tensors, self._torch_dtype, self.clock))
        blank = Measurement(kind="optimizer", tokens=elements, seconds=UNKNOWN)
        return Point((blank,), lambda: {"optimizer": update().seconds()}, elements)

    def _product(self, rows: int) -> Point[Measurement]:
        products = find_products(self.dtype, self.clock.device)
        factors = cache(lambda: torch.randn(2, rows, rows, dtype=self._torch_dtype, device=self.clock.device))

        def multiply() -> Mapping[LayerKind, float]:
            x, weight = factors()
            begin = self.clock.now()
            products.matmul_nt(x, weight)
            (seconds,) = self.clock.between(begin, self.clock.now())
            return {"product": seconds}

        return Point((Measurement(kind="product", tokens=rows, seconds=UNKNOWN),), multiply, rows**3)

    def _passes(self, head: Head, tp: int, sizes: Iterable[tuple[int, int]]) -> Iterator[ShapeRow]:
        layers, share = self._count_layers(_LAYERS), find_window_share(self.shape)
        passes = cache(lambda: Passes(self._model(head, tp, layers), self.clock, share))

        def point(tokens: int, context: int) -> Point[Measurement]:
            blanks = _blanks(_PASSES[head], tp=tp, tokens=tokens, context=context)
            return Point(
                blanks,
                lambda: passes().measure([context] * (tokens // context)),
                tokens,
                times=layers,
                derive=partial(convert_parts, head=head),
            )

        for context, group in _by_length(sizes):
            yield [point(tokens, context) for tokens in group]

    def _starts(self, tp: int) -> Iterator[ShapeRow]:
        layers, share = self._count_layers(_STARTED_LAYERS), find_window_share(self.shape)
        decoding = cache(lambda: Decoding(self._model("lm", tp, layers), self.sampling, self.clock, share))

        def point(tokens: int, context: int) -> Point[Measurement]:
            blanks = _blanks(("prefill", "start"), tp=tp, tokens=tokens, context=context)
            return Point(blanks, lambda: decoding().start(tokens, context), tokens, layers)

        for context, group in _by_length(self.sizes.starts()):
            yield [point(tokens, context) for tokens in group]

    def _turns(self, tp: int) -> Iterator[ShapeRow]:
        layer_bytes = LocalSizes(self.shape, "lm", tp).layer_elements * ELEMENT_BYTES[self.dtype]
        few = self._count_layers(_LAYERS)
        layers = max(few, min(self.shape.layers, -(-_DECODED_BYTES // layer_bytes)))
        share = find_window_share(self.shape)
        decoding = cache(lambda: Decoding(self._model("lm", tp, layers), self.sampling, self.clock, share))

        def point(rows: int, context: int, *, first: bool) -> Point[Measurement]:
            blanks = _blanks(("decode",), tp=tp, sequences=rows, context=context)
            if first:
                # These two entries do not depend on the context.
                blanks += _blanks(("decode_overhead", "sample"), tp=tp, sequences=rows)
            return Point(blanks, lambda: decoding().measure_step(rows, context), rows, layers * DECODE_STEPS)

        for i, (context, group) in enumerate(_by_length(self.sizes.turns())):
            yield [point(rows, context, first=i == 0) for rows in group]

    def _count_layers(self, few: int) -> int:
        """Return the number of layers of a measured model. `few` are enough if all layers are alike."""
        return _MIXED_LAYERS if 0 < find_window_share(self.shape) < 1 else few

    def _model(self, head: Head, tp: int, layers: int) -> Model:
        return make_tensor_rank(
            self.shape,
            head,
            tp,
            layers=layers,
            dtype=self._torch_dtype,
            device=self.clock.device,
            products=find_products(self.dtype, self.clock.device),
        )

    @property
    def _torch_dtype(self) -> torch.dtype:
        return find_torch_dtype(self.dtype)


def _by_length(sizes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Group (size, length) pairs by length. Yields each length with its sizes."""
    for length, group in groupby(sizes, itemgetter(1)):
        yield length, [size for size, _ in group]


def _blanks(kinds: Iterable[LayerKind], **at: int) -> tuple[Measurement, ...]:
    return tuple(Measurement(kind=kind, seconds=UNKNOWN, **at) for kind in kinds)


def _layer_tensors(shape: ModelShape, layers: int) -> list[TensorSpec]:
    """List the tensors of some layers, with at most `_LARGEST_UPDATE` elements, but of at least one layer."""
    few = shape.model_copy(update={"layers": layers})
    tensors = [spec for spec in model_tensors(few, "lm") if spec.layer is not None]
    per_layer = sum(spec.numel for spec in tensors) // layers
    return [spec for spec in tensors if (spec.layer or 0) < max(1, _LARGEST_UPDATE // per_layer)]


@dataclass(frozen=True)
class _Silent(Group):
    """Group of TP ranks in which only this rank exists. Collectives return data of this rank only."""

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Repeat the columns once per rank."""
        width = -(-columns // self.size)
        return part.repeat(1, -(-width * self.size // part.shape[1]))[:, :columns].contiguous()


def make_tensor_rank(
    shape: ModelShape,
    head: Head,
    tp: int,
    *,
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    products: Products,
) -> Model:
    """Create the part of a model that the largest of `tp` TP ranks has, with `layers` layers and fresh weights.

    Collectives return the rank's own data. A pass therefore takes only the time of the arithmetic, and its results
    are meaningless.
    """
    shape = shape.with_layers(layers)
    placement = Placement(Mesh(0, tp), Strategy(tp=tp))
    rank = max(range(tp), key=lambda t: (len(Shard(shape, head, tp, t).queries), -t))
    tensor = {"tensor": _Silent(placement.ranks, rank)} if tp > 1 else {}
    groups = ParallelGroups.of_single_rank(rank, **tensor)
    layout = build_layout(shape, head, placement)
    model = Model(layout, rank, groups, dtype=dtype, device=device, products=products)
    # Use values like those of a model, but draw them on the device: on a CPU, a large model would take minutes.
    for part in model.sets.values():
        part.buffer.data.normal_(0.0, shape.init_std)
    for spec in model.parameters.tensors:
        if spec.init in (Init.ONES, Init.ZEROS):
            model.parameters[spec.name].fill_(float(spec.init is Init.ONES))
    return model
