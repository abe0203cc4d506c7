"""Vectors of 16 float32 numbers in compiled kernels, and products of rows with panels of 16 columns.

The compiler does not vectorise loops over a block of 16 keys by itself: it checks in every loop whether arrays
overlap. Kernels with blocks of known length therefore use explicit vectors. On a processor with shorter vectors,
the compiler splits each of them.

A panel is 16 columns side by side, [depth, 16]. An element of a product is one chain of fused multiply-adds in the
order of the depth, whichever rows are multiplied together. So it depends only on its row and its column.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from realrl.layout.limits import LANES

_FLOAT, _INT, _SHORT = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, _SHORT))
_REORDER = ("reassoc", "nsz")
_EXP2 = (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1, 1.0)
"""Polynomial of 2^x between -0.5 and 0.5 (Cephes, exp2f)."""
_MINUS_2_LOG2_E = np.float32(-2.88539008177792681)
"""-2 log2(e)."""


class VectorType(types.Type):
    """Numba's type of a vector of 16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _repeat(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def _call(builder: Any, name: str, result: ir.Type, *arguments: Any, **options: Any) -> Any:
    """Call an intrinsic function of LLVM, which exists on every target."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **options)


def _fill(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, _repeat(_INT, 0))


def _find(context: Any, builder: Any, kind: Any, where: Any, index: Any) -> Any:
    """Find the address of an element of an array, or of the memory that a pointer points to."""
    if isinstance(kind, types.Array):
        where = context.make_array(kind)(context, builder, where).data
    return builder.gep(where, [index])


def _load(builder: Any, kind: Any, place: Any) -> Any:
    """Load a vector of float32, or of bfloat16 as uint16, from an address."""
    if kind == types.float32:
        return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
    narrow = builder.load(builder.bitcast(place, _SHORTS.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(narrow, _INTS), _repeat(_INT, 16)), _VECTOR)


@intrinsic
def load_vector(context, where, index):  # type: ignore[no-untyped-def]
    """Load 16 numbers from where[index] on: float32, or bfloat16 as uint16. `where` is an array or a pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _load(builder, where.dtype, _find(context, builder, where, *arguments))

    return vector(where, index), generate


@intrinsic
def repeat(context, where, index):  # type: ignore[no-untyped-def]
    """Make a vector whose 16 numbers are all where[index], a float32 number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _fill(builder, builder.load(_find(context, builder, where, *arguments)))

    return vector(where, index), generate


@intrinsic
def store_vector(context, where, index, value):  # type: ignore[no-untyped-def]
    """Store a float32 vector at where[index]. `where` is an array or a pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _find(context, builder, where, *arguments[:2])
        builder.store(arguments[2], builder.bitcast(place, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(where, index, value), generate


@intrinsic
def store_number(context, pointer, index, number):  # type: ignore[no-untyped-def]
    """Store a float32 number, rounded to bfloat16 if `pointer` points to uint16."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place, number = builder.gep(arguments[0], [arguments[1]]), arguments[2]
        if pointer.dtype == types.uint16:
            bits = builder.bitcast(number, _INT)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_INT, 16)), ir.Constant(_INT, 1))
            rounded = builder.add(builder.add(bits, ir.Constant(_INT, 0x7FFF)), odd)
            number = builder.trunc(builder.lshr(rounded, ir.Constant(_INT, 16)), _SHORT)
        builder.store(number, place)
        return context.get_dummy_value()

    return types.void(pointer, index, types.float32), generate


@intrinsic
def prefetch(context, pointer, index):  # type: ignore[no-untyped-def]
    """Fetch the cache line of pointer[index] into the caches. The address need not be valid."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        flags = (ir.Constant(_INT, value) for value in (0, 3, 1))  # read access, all cache levels, data
        _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *flags)
        return context.get_dummy_value()

    return types.void(pointer, index), generate


def _define(emit: Callable[..., Any], *operands: Any, result: Any = vector) -> Any:
    """Make a function for kernels; `emit(builder, *values)` generates its instructions for up to three operands."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return emit(builder, *arguments)

    typed = result(*operands), generate
    # Numba reads the number of operands from the signature of the function that it is given.
    makers = (lambda context, a: typed), (lambda context, a, b: typed), (lambda context, a, b, c: typed)
    return intrinsic(makers[len(operands) - 1])


def _call_of_vectors(name: str) -> Callable[..., Any]:
    return lambda builder, *vectors: _call(builder, f"llvm.{name}.v16f32", _VECTOR, *vectors)


def _select_lanes(builder: Any, a: Any, count: Any, *, first: bool) -> Any:
    """Keep the first `count` numbers, or all numbers after them; set the other numbers to -inf."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    is_first = builder.icmp_signed("<", lanes, _fill(builder, builder.trunc(count, _INT)))
    nothing = _repeat(_FLOAT, float("-inf"))
    return builder.select(is_first, a, nothing) if first else builder.select(is_first, nothing, a)


def _add_up(builder: Any, a: Any) -> Any:
    zero = ir.Constant(_FLOAT, 0.0)
    return _call(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, zero, a, fastmath=_REORDER)


def _add_halves(builder: Any, a: Any) -> Any:
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(a.type, ir.Undefined)
        low, high = (
            ir.Constant(ir.VectorType(_INT, lanes), list(range(first, first + lanes))) for first in (0, lanes)
        )
        a = builder.fadd(
            builder.shuffle_vector(a, undefined, low), builder.shuffle_vector(a, undefined, high)
        )
    return builder.extract_element(a, ir.Constant(_INT, 0))


def _exp2(builder: Any, a: Any) -> Any:
    small = builder.fcmp_ordered("<", a, _repeat(_FLOAT, -126.0))
    x = builder.select(small, _repeat(_FLOAT, 0.0), a)
    whole = _call(builder, "llvm.floor.v16f32", _VECTOR, builder.fadd(x, _repeat(_FLOAT, 0.5)))
    rest = builder.fsub(x, whole)
    value = _repeat(_FLOAT, float(np.float32(_EXP2[0])))
    for factor in _EXP2[1:]:
        factor = _repeat(_FLOAT, float(np.float32(factor)))
        value = _call(builder, "llvm.fma.v16f32", _VECTOR, value, rest, factor)
    exponent = builder.add(builder.fptosi(whole, _INTS), _repeat(_INT, 127))
    power = builder.bitcast(builder.shl(exponent, _repeat(_INT, 23)), _VECTOR)
    return builder.select(small, _repeat(_FLOAT, 0.0), builder.fmul(value, power))


fill = _define(_fill, types.float32)
"""Make a vector of equal numbers."""
multiply_add = _define(_call_of_vectors("fma"), vector, vector, vector)
"""Compute a * b + c, rounded once."""
add = _define(lambda builder, a, b: builder.fadd(a, b), vector, vector)
subtract = _define(lambda builder, a, b: builder.fsub(a, b), vector, vector)
multiply = _define(lambda builder, a, b: builder.fmul(a, b), vector, vector)
divide = _define(lambda builder, a, b: builder.fdiv(a, b), vector, vector)
take_magnitude = _define(_call_of_vectors("fabs"), vector)
copy_sign = _define(_call_of_vectors("copysign"), vector, vector)
"""Return a with the sign of b."""
larger = _define(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a), vector, vector)
"""Choose the larger of a and b in each lane; a if either is NaN."""
smaller = _define(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", b, a), b, a), vector, vector)
"""Choose the smaller of a and b in each lane; a if either is NaN."""
keep_first = _define(partial(_select_lanes, first=True), vector, types.int64)
"""Set all but the first `count` numbers to -inf."""
drop_first = _define(partial(_select_lanes, first=False), vector, types.int64)
"""Set the first `count` numbers to -inf."""
find_maximum = _define(
    lambda builder, a: _call(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, a),
    vector,
    result=types.float32,
)
add_up = _define(_add_up, vector, result=types.float32)
"""Add the numbers up in an order that the compiler chooses."""
add_halves = _define(_add_halves, vector, result=types.float32)
"""Add one half of the numbers to the other half until one number is left. This order is the same on every
processor."""
find_first = _define(
    lambda builder, a: builder.extract_element(a, ir.Constant(_INT, 0)), vector, result=types.float32
)
exp2 = _define(_exp2, vector)
"""Compute 2^a for numbers up to 0; 0 below -126, NaN for NaN."""


@numba.njit(inline="always")
def zeros() -> Any:
    return fill(np.float32(0.0))


@numba.njit(inline="always")
def tanh(a: Any) -> Any:
    """Compute the hyperbolic tangent: (1 - e^-2|a|) / (1 + e^-2|a|), with the sign of a."""
    one = fill(np.float32(1.0))
    power = exp2(smaller(multiply(take_magnitude(a), fill(_MINUS_2_LOG2_E)), zeros()))
    return copy_sign(divide(subtract(one, power), add(one, power)), a)


def make_panel_product(rows: int, *, adds: bool = False) -> Any:
    """Make a function for kernels that multiplies `rows` rows by a panel. Its sums stay in registers.

    multiply(x, at_x, x_stride, x_step, panel, at_panel, panel_step, depth, out, at_out, out_stride) computes, for
    each row r, out[at_out + r * out_stride + lane] = sum over k of x[at_x + r * x_stride + k * x_step] *
    panel[at_panel + k * panel_step + lane], in the order of k, with one fused multiply-add for each k. With `adds`,
    the sum is added to `out`. x and out are pointers to float32 or arrays; panel may also be a pointer to uint16,
    read as bfloat16.
    """

    @intrinsic
    def multiply(  # type: ignore[no-untyped-def]
        context, x, at_x, x_stride, x_step, panel, at_panel, panel_step, depth, out, at_out, out_stride
    ):
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            values, at_x, x_stride, x_step, weights, at_panel, panel_step, depth, *to = arguments
            results, at_out, out_stride = to
            places = []
            sums = []
            for r in range(rows):
                at = builder.add(at_out, builder.mul(out_stride, out_stride.type(r)))
                place = builder.bitcast(_find(context, builder, out, results, at), _VECTOR.as_pointer())
                places.append(place)
                sums.append(cgutils.alloca_once_value(builder, _repeat(_FLOAT, 0.0)))
            starts = [builder.add(at_x, builder.mul(x_stride, x_stride.type(r))) for r in range(rows)]
            with cgutils.for_range(builder, depth) as loop:
                at = builder.add(at_panel, builder.mul(loop.index, panel_step))
                weight = _load(builder, panel.dtype, _find(context, builder, panel, weights, at))
                ahead = builder.mul(loop.index, x_step)
                for start, total in zip(starts, sums, strict=True):
                    number = builder.load(_find(context, builder, x, values, builder.add(start, ahead)))
                    step = (_fill(builder, number), weight, builder.load(total))
                    builder.store(_call(builder, "llvm.fma.v16f32", _VECTOR, *step), total)
            for place, total in zip(places, sums, strict=True):
                result = builder.load(total)
                if adds:
                    result = builder.fadd(builder.load(place, align=4), result)
                builder.store(result, place, align=4)
            return context.get_dummy_value()

        of_x, of_panel = (x, at_x, x_stride, x_step), (panel, at_panel, panel_step, depth)
        return types.void(*of_x, *of_panel, out, at_out, out_stride), generate

    return multiply


REGISTER_ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 6
"""Rows that are multiplied with a panel at a time. A sum takes one AVX-512 register, or two of the 16 registers of
AVX2."""


def _make_rows_product(*, adds: bool) -> Any:
    """Make a function for any number of rows, from panel products of `REGISTER_ROWS`, 2 and 1 rows."""
    multiply_most = make_panel_product(REGISTER_ROWS, adds=adds)
    multiply_two = make_panel_product(2, adds=adds)
    multiply_one = make_panel_product(1, adds=adds)

    @numba.njit(inline="always")
    def multiply(
        rows: int,
        x: Any,
        at_x: int,
        stride: int,
        step: int,
        panel: Any,
        at_panel: int,
        panel_step: int,
        depth: int,
        out: Any,
        at_out: int,
        out_stride: int,
    ) -> None:
        i = 0
        while rows - i >= REGISTER_ROWS:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_most(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)
            i += REGISTER_ROWS
        while rows - i >= 2:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_two(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)
            i += 2
        if i < rows:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_one(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)

    return multiply


multiply_rows_by_panel = _make_rows_product(adds=False)
"""Multiply any number of rows with a panel: (rows, x, at_x, stride, step, panel, at_panel, panel_step, depth, out,
at_out, out_stride), as in `make_panel_product`."""
add_rows_by_panel = _make_rows_product(adds=True)
"""Add the product to `out`; arguments as for `multiply_rows_by_panel`."""
