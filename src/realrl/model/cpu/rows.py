"""Compiled kernels that work row by row, on the threads that torch computes with.

A kernel is a function that Numba compiles when it is first called, and keeps on disk. It takes rows until there are
none left:

    @row_kernel(outputs=1)
    def double(work):
        first, last = claim(work)
        while first < last:
            for i in range(first, last):
                x, out = row(work, 0, i), row(work, 1, i)
                for j in range(len(x)):
                    out[j] = 2 * x[j]
            first, last = claim(work)

    double(len(x), x, out)

Numba does not notice changes of this file: `make clean` removes what was compiled.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from realrl.layout.limits import KERNEL_ELEMENTS

_NEXT, _ROWS, _CLAIM, _ARGUMENTS = range(4)
"""Words of a piece of work: next row to be taken, number of rows, rows taken at a time, first argument."""
_WORDS = 3
"""Words of an argument: address, elements from one row to the next, elements of a row; or a number in the first."""

_CLAIMS_CONVERTED = 4
"""Claims whose rows are converted from bfloat16 and back together: they stay in a cache."""

Work = Any
"""Pointer to the words of a piece of work, as kernels see it."""
FAST_MATH = {"reassoc", "contract", "nsz"}
"""Liberties of the compiler: sums in another order, as vectors need them; what is not finite stays so.

Which of its versions of a loop runs, with vectors or without, depends on how close to each other arrays lie. So
both must compute the same: quotients are no approximations (`arcp`), and a loop that sums stores nothing."""


@intrinsic
def _add_atomically(context, pointer, value):  # type: ignore[no-untyped-def]
    """Add `value` to what `pointer` points to, and return what was there before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", *arguments, "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), generate


@intrinsic
def _float_pointer(context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _int_pointer(context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def _short_pointer(context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


@intrinsic
def _as_float64(context, word):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@numba.njit(inline="always")
def claim(work: Work) -> tuple[int, int]:
    """Take the next rows, from the first up to the last; none are left where the two are equal."""
    first = min(_add_atomically(work, work[_CLAIM]), work[_ROWS])
    return first, min(first + work[_CLAIM], work[_ROWS])


@numba.njit(inline="always")
def number_of_claim(work: Work, first: int) -> int:
    """Find the number of the claim with these rows: 0 for the first ones, whichever thread takes them."""
    return first // work[_CLAIM]


@numba.njit(inline="always")
def row(work: Work, argument: int, index: int) -> np.ndarray:
    """View a row of a float32 argument. [its elements]"""
    at = _ARGUMENTS + _WORDS * argument
    address = work[at] + index * work[at + 1] * 4
    return numba.carray(_float_pointer(address), (work[at + 2],))


@numba.njit(inline="always")
def int_row(work: Work, argument: int, index: int) -> np.ndarray:
    """View a row of an int64 argument. [its elements]"""
    at = _ARGUMENTS + _WORDS * argument
    address = work[at] + index * work[at + 1] * 8
    return numba.carray(_int_pointer(address), (work[at + 2],))


@numba.njit(inline="always")
def row_stride(work: Work, argument: int) -> int:
    """Read how many elements lie from one row of an argument to the next."""
    return work[_ARGUMENTS + _WORDS * argument + 1]


@numba.njit(inline="always")
def float_pointer(work: Work, argument: int) -> Any:
    """Point to the first element of a float32 argument."""
    return _float_pointer(work[_ARGUMENTS + _WORDS * argument])


@numba.njit(inline="always")
def bfloat16_pointer(work: Work, argument: int) -> Any:
    """Point to the first element of an int16 argument: the bits of bfloat16, which kernels see as uint16."""
    return _short_pointer(work[_ARGUMENTS + _WORDS * argument])


@numba.njit(inline="always")
def as_float64(word: int) -> float:
    """Read the bits of a float64 number, which is how kernels get rows of them."""
    return _as_float64(word)


@numba.njit(inline="always")
def number(work: Work, argument: int) -> np.float32:
    """Read an argument that is a number."""
    return np.float32(_as_float64(work[_ARGUMENTS + _WORDS * argument]))


@cache
def load_openmp() -> ctypes.CDLL | None:
    """Load torch's OpenMP library, whose GOMP_parallel runs a function on all threads.

    None if torch comes without GNU's library, as on macOS: there a kernel runs on the calling thread.
    """
    folder = Path(torch.__file__).parent
    found = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


def _rows_per_claim(width: int) -> int:
    """Count the rows of `width` elements that a thread takes at a time.

    It does not depend on the number of threads, so that sums over these rows do not either.
    """
    return max(1, KERNEL_ELEMENTS // max(1, width))


def count_claims(rows: Tensor) -> int:
    """Count the times that threads take rows of a kernel's first argument. rows: [N, width]"""
    return -(-len(rows) // _rows_per_claim(rows.shape[1]))


_DTYPES = (torch.float32, torch.int64, torch.int16)
_TENSOR, _NUMBER = struct.Struct("3q"), struct.Struct("d2q")
_HEADER, _FIRST = struct.Struct("3q"), struct.Struct("q")


def _pack(argument: Tensor | float) -> bytes:
    if not isinstance(argument, Tensor):
        return _NUMBER.pack(argument, 0, 0)
    assert argument.dtype in _DTYPES and argument.device.type == "cpu", argument
    shape, strides = argument.shape, argument.stride()
    width = shape[-1]
    assert width < 2 or strides[-1] == 1, "elements of a row lie side by side"
    rows = shape[0] if shape[1:] else 1  # one row is the same for every index
    return _TENSOR.pack(argument.data_ptr(), strides[0] if rows > 1 else 0, width)


def _call_in_float32(
    kernel: Callable[..., None], rows: int, arguments: Sequence[Tensor | float], outputs: int, claim: int
) -> None:
    """Call a kernel for a few rows at a time, with float32 copies of bfloat16 matrices; outputs are copied back."""
    size = _CLAIMS_CONVERTED * claim
    for start in range(0, rows, size):
        count = min(size, rows - start)
        parts = [
            of[start : start + count] if isinstance(of, Tensor) and of.dim() == 2 and len(of) == rows else of
            for of in arguments
        ]
        wide = [of.float() if isinstance(of, Tensor) and of.dtype == torch.bfloat16 else of for of in parts]
        kernel(count, *wide, claim=claim)
        for narrow, converted in zip(parts[-outputs:], wide[-outputs:], strict=True):
            if isinstance(narrow, Tensor) and isinstance(converted, Tensor) and narrow is not converted:
                narrow.copy_(converted)


def row_kernel(
    *, outputs: int, strict: bool = False
) -> Callable[[Callable[[Work], None]], Callable[..., None]]:
    """Compile a kernel when it is first called; the last `outputs` of its arguments are written.

    It is called with the number of rows, and arguments: tensors on the CPU of float32 or int64, whose rows may lie
    apart ([N, width]; [width] is the same row for all), and numbers. Rows are taken `claim` at a time, by default
    some thousand elements of the first argument. Matrices may be bfloat16, too: they are converted to float32 and
    back, some rows at a time. What a kernel reads as it is, by its address, may also be int16. With `strict` the
    compiler changes no order of operations.
    """

    def decorate(body: Callable[[Work], None]) -> Callable[..., None]:
        compiled = cache(partial(_compile, body, strict))

        @wraps(body)
        def call(rows: int, *arguments: Tensor | float, claim: int | None = None) -> None:
            if claim is None:
                first = arguments[0]
                assert isinstance(first, Tensor)
                claim = _rows_per_claim(first.shape[-1])
            if any(isinstance(of, Tensor) and of.dtype == torch.bfloat16 for of in arguments):
                _call_in_float32(call, rows, arguments, outputs, claim)
            else:
                _run(compiled(), rows, arguments, claim)

        return call

    return decorate


def _compile(body: Callable[[Work], None], strict: bool) -> Any:
    compile_kernel = numba.cfunc(
        types.void(types.CPointer(types.int64)),
        cache=True,
        nopython=True,
        fastmath=False if strict else FAST_MATH,
        error_model="numpy",  # a check of every divisor would keep loops from being vectorised
    )
    return compile_kernel(body)


def _run(kernel: Any, rows: int, arguments: Sequence[Tensor | float], claim: int) -> None:
    """Run a compiled kernel on as many of torch's threads as there is work for."""
    work = _HEADER.pack(0, rows, claim) + b"".join(map(_pack, arguments))
    buffer = ctypes.create_string_buffer(work, len(work))
    threads = min(torch.get_num_threads(), -(-rows // claim))
    openmp = load_openmp() if threads > 1 else None
    if openmp is None:
        threads = 1
        kernel.ctypes(ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int64)))
    else:
        openmp.GOMP_parallel(kernel.address, ctypes.addressof(buffer), threads, 0)
    # A thread that has come to its end has asked for rows once more than it was given any. One that could not
    # allocate memory has not; Numba prints an exception of compiled functions, and goes on.
    claims = _FIRST.unpack_from(buffer)[0] // claim
    if claims < -(-rows // claim) + threads:
        raise MemoryError("a compiled kernel could not allocate its scratch memory")
