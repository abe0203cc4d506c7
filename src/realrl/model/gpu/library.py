"""Triton kernels as operators of torch, which know fake tensors, so that they can be traced and captured."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("realrl", "FRAGMENT")


def register_kernel(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that launches a kernel as operator `torch.ops.realrl.NAME`, and return the operator.

    `schema` is NAME(ARGUMENTS) in torch's notation. Outputs are arguments that it marks as written, such as
    `Tensor(a!) out`.
    """
    name = schema.partition("(")[0]

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        _LIBRARY.define(f"{schema} -> ()")
        # For tensors on a CPU, too: there Triton's interpreter runs the kernels in tests.
        _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"realrl::{name}", lambda *_: None, lib=_LIBRARY)
        operator: Callable[..., None] = getattr(torch.ops.realrl, name).default
        return operator

    return register
