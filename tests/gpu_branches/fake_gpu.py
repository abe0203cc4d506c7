"""A GPU that is not there: tensors without values on a device of their own, for processes that do nothing else.

Fake tensors check shapes, types, and that operations do not mix devices. Autograd runs for them on a device that
has streams, which CUDA has not where torch is built without it; hence a device of another name, which takes the
branches of GPUs (`model.gpu.path.on_gpu`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten


class Device(TorchDispatchMode):
    """Computes on the device without values, and on the host as always.

    Adds what fake tensors do not know: values that the host reads, and operators without a fake implementation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("fakegpu:0")
        self.reads: Counter[str] = Counter()
        """Operations that make the host wait for the device."""
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if not there and kwargs.get("device") != self.device:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.reads["value"] += 1
            return 1.0 if there[0].is_floating_point() else 1
        sized = kwargs.get("output_size") is not None
        if func is aten.repeat_interleave.Tensor and not sized:
            self.reads[str(func)] += 1
        if func is aten.nonzero.default:  # nothing is zero
            self.reads[str(func)] += 1
            size = (there[0].numel(), there[0].dim())
            with self._fake:
                return there[0].new_empty(size, dtype=torch.int64)
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            self.reads["copy"] += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.addmm.dtype_out:
            return _check_addmm(*args, **kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self.reads["copy"] += 1
            return args[0]
        with self._fake:
            args, kwargs = tree_map(self._describe, (args, kwargs))
            return func(*args, **kwargs)

    def _describe(self, value: Any) -> Any:
        """A tensor in host memory as one without values, so that it can be copied to the device."""
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_real else value


def _check_addmm(into: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """The rules of `torch.addmm(out_dtype=, out=)`, which has no fake implementation."""
    assert into.dtype == out.dtype == dtype and a.dtype == b.dtype
    assert dtype == a.dtype or (dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16))
    assert into.shape == out.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0]
    assert into.device == out.device == a.device == b.device
    return out


@contextmanager
def fake_gpu() -> Iterator[Device]:
    """Have a device whose tensors have no values; for a process that ends with it."""
    if torch._C._get_privateuse1_backend_name() != "fakegpu":
        _setup_privateuseone_for_python_backend("fakegpu")
    torch.cuda.get_device_capability = lambda _: (9, 0)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) asks the mode for its copy
    try:
        with Device() as device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
