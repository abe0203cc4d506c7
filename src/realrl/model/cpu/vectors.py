"""Vectors of 16 float32 numbers in compiled kernels.

Loops over a block of 16 keys are too short for the compiler to find the vectors in them by itself: it checks for
every loop whether arrays overlap. Kernels that know how long their blocks are say what they want instead. On a
processor with shorter vectors, the compiler makes several of one.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
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
    """Type of vectors in Numba."""

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
    """Call a function that every target of the compiler knows."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **options)


def _fill(builder: Any, scalar: Any) -> Any:
    """Make a vector of equal numbers."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, _repeat(_INT, 0))


def _find(context: Any, builder: Any, kind: Any, where: Any, index: Any) -> Any:
    """Find the address of an element, counted from the first one of an array or from what a pointer points to."""
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
    """Load the numbers from where[index] on: float32, or bfloat16 as uint16. `where`: array or pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _load(builder, where.dtype, _find(context, builder, where, *arguments))

    return vector(where, index), generate


@intrinsic
def repeat(context, where, index):  # type: ignore[no-untyped-def]
    """Make a vector of where[index], a float32 number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _fill(builder, builder.load(_find(context, builder, where, *arguments)))

    return vector(where, index), generate


@intrinsic
def store_vector(context, where, index, value):  # type: ignore[no-untyped-def]
    """Store a vector from where[index] on, float32. `where`: array or pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _find(context, builder, where, *arguments[:2])
        builder.store(arguments[2], builder.bitcast(place, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(where, index, value), generate


@intrinsic
def store_number(context, pointer, index, number):  # type: ignore[no-untyped-def]
    """Store a float32 number, or round it to bfloat16 where `pointer` is one to uint16."""

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
    """Fetch the cache line of pointer[index], which need not exist."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        flags = (ir.Constant(_INT, value) for value in (0, 3, 1))  # to read, into all caches, data
        _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *flags)
        return context.get_dummy_value()

    return types.void(pointer, index), generate


@intrinsic
def fill(context, number):  # type: ignore[no-untyped-def]
    """Make a vector of equal numbers."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _fill(builder, arguments[0])

    return vector(types.float32), generate


@intrinsic
def multiply_add(context, a, b, c):  # type: ignore[no-untyped-def]
    """Compute a * b + c."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.fma.v16f32", _VECTOR, *arguments)

    return vector(vector, vector, vector), generate


@intrinsic
def add(context, a, b):  # type: ignore[no-untyped-def]
    """Compute a + b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fadd(*arguments)

    return vector(vector, vector), generate


@intrinsic
def subtract(context, a, b):  # type: ignore[no-untyped-def]
    """Compute a - b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fsub(*arguments)

    return vector(vector, vector), generate


@intrinsic
def multiply(context, a, b):  # type: ignore[no-untyped-def]
    """Compute a * b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fmul(*arguments)

    return vector(vector, vector), generate


@intrinsic
def divide(context, a, b):  # type: ignore[no-untyped-def]
    """Compute a / b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fdiv(*arguments)

    return vector(vector, vector), generate


@intrinsic
def take_magnitude(context, a):  # type: ignore[no-untyped-def]
    """Compute |a|."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.fabs.v16f32", _VECTOR, *arguments)

    return vector(vector), generate


@intrinsic
def copy_sign(context, a, b):  # type: ignore[no-untyped-def]
    """Give a the sign of b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.copysign.v16f32", _VECTOR, *arguments)

    return vector(vector, vector), generate


@intrinsic
def larger(context, a, b):  # type: ignore[no-untyped-def]
    """Choose the larger of a and b in each lane; a where one is NaN."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    return vector(vector, vector), generate


@intrinsic
def smaller(context, a, b):  # type: ignore[no-untyped-def]
    """Choose the smaller of a and b in each lane; a where one is NaN."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        a, b = arguments
        return builder.select(builder.fcmp_ordered("<", b, a), b, a)

    return vector(vector, vector), generate


@intrinsic
def keep_first(context, a, count):  # type: ignore[no-untyped-def]
    """Set all but the first `count` numbers to -inf."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        lanes = ir.Constant(_INTS, list(range(LANES)))
        kept = builder.icmp_signed("<", lanes, _fill(builder, builder.trunc(arguments[1], _INT)))
        return builder.select(kept, arguments[0], _repeat(_FLOAT, float("-inf")))

    return vector(vector, types.int64), generate


@intrinsic
def drop_first(context, a, count):  # type: ignore[no-untyped-def]
    """Set the first `count` numbers to -inf."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        lanes = ir.Constant(_INTS, list(range(LANES)))
        dropped = builder.icmp_signed("<", lanes, _fill(builder, builder.trunc(arguments[1], _INT)))
        return builder.select(dropped, _repeat(_FLOAT, float("-inf")), arguments[0])

    return vector(vector, types.int64), generate


@intrinsic
def find_maximum(context, a):  # type: ignore[no-untyped-def]
    """Find the largest number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, *arguments)

    return types.float32(vector), generate


@intrinsic
def add_up(context, a):  # type: ignore[no-untyped-def]
    """Add the numbers up, in pairs."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        zero = ir.Constant(_FLOAT, 0.0)
        name = "llvm.vector.reduce.fadd.v16f32"
        return _call(builder, name, _FLOAT, zero, *arguments, fastmath=_REORDER)

    return types.float32(vector), generate


@intrinsic
def add_halves(context, a):  # type: ignore[no-untyped-def]
    """Add the numbers up, one half to the other until one is left: in this order wherever it is compiled."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        (a,) = arguments
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(a.type, ir.Undefined)
            low, high = (
                ir.Constant(ir.VectorType(_INT, lanes), list(range(first, first + lanes)))
                for first in (0, lanes)
            )
            a = builder.fadd(
                builder.shuffle_vector(a, undefined, low), builder.shuffle_vector(a, undefined, high)
            )
        return builder.extract_element(a, ir.Constant(_INT, 0))

    return types.float32(vector), generate


@intrinsic
def find_first(context, a):  # type: ignore[no-untyped-def]
    """Return the first number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.extract_element(arguments[0], ir.Constant(_INT, 0))

    return types.float32(vector), generate


@intrinsic
def exp2(context, a):  # type: ignore[no-untyped-def]
    """Compute 2^a of numbers up to 0: 0 below -126, NaN of NaN."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        (a,) = arguments
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

    return vector(vector), generate


@numba.njit(inline="always")
def zeros() -> Any:
    """Make a vector of zeros."""
    return fill(np.float32(0.0))


@numba.njit(inline="always")
def tanh(a: Any) -> Any:
    """Compute the hyperbolic tangent: (1 - e^-2|a|) / (1 + e^-2|a|), with the sign of a."""
    one = fill(np.float32(1.0))
    power = exp2(smaller(multiply(take_magnitude(a), fill(_MINUS_2_LOG2_E)), zeros()))
    return copy_sign(divide(subtract(one, power), add(one, power)), a)


def make_panel_product(rows: int, *, adds: bool = False) -> Any:
    """Make a function for kernels: the product of so many rows with a panel, whose sums stay in registers.

    multiply(x, at_x, x_stride, x_step, panel, at_panel, panel_step, depth, out, at_out, out_stride) computes, for
    each row r, out[at_out + r * out_stride + lane] = sum over k of x[at_x + r * x_stride + k * x_step] *
    panel[at_panel + k * panel_step + lane], in the order of k, each step fused; if it `adds`, the sum is added to
    what is in `out`. x and out: pointers to float32 or arrays, panel: the same, or pointer to uint16 as bfloat16.
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
