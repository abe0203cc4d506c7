"""Compiled kernels that work row by row, on the threads that torch computes with.

A kernel is a function that Numba compiles at its first call and caches on disk. It takes rows until none are left:

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

Run `make clean` after changes of this file, because Numba does not notice them.
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
"""Indices of the 64-bit words of a work buffer, which passes arguments to a kernel: the next row, the number of
rows, rows per claim, the first argument."""
_WORDS = 3
"""Number of words per argument: its address, row stride in elements, and elements per row. A number uses only the
first word."""

_CLAIMS_CONVERTED = 4
"""Number of claims whose rows are converted from bfloat16 and back at a time. These rows should fit in a cache."""

Work = Any
"""Pointer to the words of a work buffer, as kernels see it."""
FAST_MATH = {"reassoc", "contract", "nsz"}
"""Fast-math flags of the compiler. It may reorder sums, which vectors require, but must preserve NaN and infinity.

The compiler makes a vectorised version and a scalar version of each loop. Which version runs depends on how close
arrays lie to each other, so both versions must give the same result. Therefore the compiler may not approximate
quotients (`arcp`), and a loop that sums must not store.
"""


@intrinsic
def _add_atomically(context, pointer, value):  # type: ignore[no-untyped-def]
    """Add `value` to the number at `pointer`, and return the old number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", *arguments, "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), generate


def _make_pointer_function(kind: ir.Type, result: types.Type) -> Any:
    """Make a function for kernels that turns an address into a pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], kind.as_pointer())

    return intrinsic(lambda context, address: (types.CPointer(result)(types.int64), generate))


_float_pointer = _make_pointer_function(ir.FloatType(), types.float32)
_int_pointer = _make_pointer_function(ir.IntType(64), types.int64)
_short_pointer = _make_pointer_function(ir.IntType(16), types.uint16)


@intrinsic
def as_float64(context, word):  # type: ignore[no-untyped-def]
    """Interpret 64 bits as a float64 number. Kernels receive float64 tensors as int64."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@numba.njit(inline="always")
def claim(work: Work) -> tuple[int, int]:
    """Take the next rows. Returns the first row and the row after the last one. If the two are equal, no rows are
    left."""
    first = min(_add_atomically(work, work[_CLAIM]), work[_ROWS])
    return first, min(first + work[_CLAIM], work[_ROWS])


@numba.njit(inline="always")
def number_of_claim(work: Work, first: int) -> int:
    """Find the number of the claim that begins with row `first`. The first claim has number 0, whichever thread
    makes it."""
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
    """Number of elements from one row of an argument to the next."""
    return work[_ARGUMENTS + _WORDS * argument + 1]


@numba.njit(inline="always")
def float_pointer(work: Work, argument: int) -> Any:
    """Point to the first element of a float32 argument."""
    return _float_pointer(work[_ARGUMENTS + _WORDS * argument])


@numba.njit(inline="always")
def bfloat16_pointer(work: Work, argument: int) -> Any:
    """Point to the first element of an int16 argument that holds the bits of bfloat16 numbers. Kernels see them as
    uint16."""
    return _short_pointer(work[_ARGUMENTS + _WORDS * argument])


@numba.njit(inline="always")
def number(work: Work, argument: int) -> np.float32:
    """Read an argument that is a number."""
    return np.float32(as_float64(work[_ARGUMENTS + _WORDS * argument]))


@cache
def load_openmp() -> ctypes.CDLL | None:
    """Load torch's own OpenMP library; its GOMP_parallel runs a function on all threads.

    Returns None if torch comes without GNU's library, as on macOS. Kernels then run on the calling thread.
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

    The count does not depend on the number of threads, so the sums of claims do not depend on it either.
    """
    return max(1, KERNEL_ELEMENTS // max(1, width))


def count_claims(rows: Tensor) -> int:
    """Count the claims into which a kernel divides the rows of its first argument. rows: [N, width]"""
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
    rows = shape[0] if shape[1:] else 1  # a single row serves every index
    return _TENSOR.pack(argument.data_ptr(), strides[0] if rows > 1 else 0, width)


def _call_in_float32(
    kernel: Callable[..., None], rows: int, arguments: Sequence[Tensor | float], outputs: int, claim: int
) -> None:
    """Call a kernel for a few rows at a time, with float32 copies of bfloat16 matrices; copy the outputs back."""
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
    """Make a decorator that compiles a kernel at its first call. The kernel writes to its last `outputs` arguments.

    The compiled function is called with the number of rows and the arguments. An argument is a number, or a CPU
    tensor of float32 or int64: [N, width] with any row stride, or [width] for the same row each time. Threads claim
    `claim` rows at a time, by default about `KERNEL_ELEMENTS` elements of the first argument. Matrices may also be
    bfloat16; they are then converted to float32 and back, some rows at a time. An argument that a kernel reads by
    its address may also be int16. With `strict` the compiler does not reorder operations.
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
    """Run a compiled kernel on torch's threads, at most one per claim."""
    work = _HEADER.pack(0, rows, claim) + b"".join(map(_pack, arguments))
    buffer = ctypes.create_string_buffer(work, len(work))
    threads = min(torch.get_num_threads(), -(-rows // claim))
    openmp = load_openmp() if threads > 1 else None
    if openmp is None:
        threads = 1
        kernel.ctypes(ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int64)))
    else:
        openmp.GOMP_parallel(kernel.address, ctypes.addressof(buffer), threads, 0)
    # Every thread that finishes ends with a claim that gets no rows. If a thread could not allocate memory, this
    # claim is missing, because Numba only prints exceptions of compiled code and returns.
    claims = _FIRST.unpack_from(buffer)[0] // claim
    if claims < -(-rows // claim) + threads:
        raise MemoryError("a compiled kernel could not allocate its scratch memory")
