"""Registration of Triton kernels and replaceable functions as torch operators, for tracing and fake tensors."""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "realrl"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_kernel(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that launches a kernel as operator `torch.ops.realrl.NAME`; return the operator.

    `schema` is NAME(ARGUMENTS) in torch's notation, with outputs marked as written arguments, such as `Tensor(a!)
    out`.
    """
    name = schema.partition("(")[0]

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        _LIBRARY.define(f"{schema} -> ()")
        # The operator takes CPU tensors too: in tests, Triton's interpreter runs the kernels on a CPU.
        _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"realrl::{name}", lambda *_: None, lib=_LIBRARY)
        operator: Callable[..., None] = getattr(torch.ops.realrl, name).default
        return operator

    return register


def register_default(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as operator `torch.ops.realrl.NAME`; return the operator.

    `schema` is NAME(ARGUMENTS) -> RESULTS in torch's notation. An implementation registered later for a device
    replaces the function there.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        operator: Callable[..., Any] = getattr(torch.ops.realrl, name).default
        return operator

    return register
