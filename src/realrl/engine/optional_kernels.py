"""Kernels of other packages that replace built-in ones on a GPU: FlashAttention 4 and FlashInfer.

Both packages are registered with torch's dispatcher for the whole process, so callers of the operators need no
change.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor
from torch.library import _scoped_library
from torch.nn import attention
from torch.nn.attention import _fa4

from realrl.config.errors import UserError
from realrl.model.gpu.library import NAMESPACE

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    # Earlier betas do not compile with later versions of these compilers.
    "fa4": ("flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl<4.9", "quack-kernels<0.7"),
    # Before 0.7.1, top-k's sums depend on the order in which blocks finish.
    "flashinfer": ("flashinfer-python>=0.7.1,<0.8",),
}
"""Packages that each extra needs."""

_FA4, _FA4_MODULE = "realrl-fa4", "realrl.model.gpu.flash_attention_4"
_FA4_TORCH = Version("2.12")
"""Minimum version of torch. The adapter of torch 2.11 refuses windows in backward passes, and `varlen_attn` always
passes a window."""
_FA4_DIMS = {9: 256, 10: 128}
"""Major compute capability -> largest supported head dim."""


@contextmanager
def use_kernels(names: Collection[str], device: torch.device) -> Iterator[None]:
    """Use the kernels of some extras on a GPU inside this context. Raises UserError if they cannot be used."""
    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            if device.type == "cpu":
                raise _refuse(name, "it computes on GPUs, and this run computes on CPUs")
            _check_packages(name)
            if name == "fa4":
                _check_fa4(device)
            try:
                stack.enter_context(_SWITCHES[name](device))
            except Exception as error:  # incompatible packages fail in many ways
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise _refuse(name, f"the package does not load ({reason})") from error
        yield


def _refuse(name: str, reason: str) -> UserError:
    return UserError(f"kernels=[{name}]: {reason}; leave {name} out of kernels for the built-in ones")


def _check_packages(name: str) -> None:
    for wanted in map(Requirement, REQUIREMENTS[name]):
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            state = "is not installed"
        else:
            if wanted.specifier.contains(found, prereleases=True):
                continue
            state = f"{found} is installed"
        raise _refuse(name, f"it needs {wanted}, and {wanted.name} {state}; run pip install 'realrl[{name}]'")


def _check_fa4(device: torch.device) -> None:
    if Version(torch.__version__) < _FA4_TORCH:
        raise _refuse(
            "fa4", f"it needs torch {_FA4_TORCH} or later, and torch {torch.__version__} is installed"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _FA4_DIMS:
        raise _refuse("fa4", f"it needs compute capability 9.x or 10.x, and this GPU has {major}.{minor}")


def check_heads(head_dims: Mapping[str, int], device: torch.device) -> None:
    """If FlashAttention 4 is in use, check that it supports the heads of all roles. Raises UserError if it does
    not."""
    if device.type == "cpu" or attention.current_flash_attention_impl() != _FA4:
        return
    major, minor = torch.cuda.get_device_capability(device)
    for role, dims in head_dims.items():
        # Sequences with other heads are padded. torch's attention over padded sequences would also use
        # FlashAttention 4.
        if dims % 8 or dims > _FA4_DIMS[major]:
            raise _refuse(
                "fa4",
                f"models.{role} has heads of {dims} dims, and on compute capability {major}.{minor} it takes"
                f" multiples of 8 up to {_FA4_DIMS[major]}",
            )


@contextmanager
def _use_fa4(_: torch.device) -> Iterator[None]:
    register = partial(_fa4.register_flash_attention_fa4, module_path=_FA4_MODULE)
    attention.register_flash_attention_impl(_FA4, register_fn=register)
    attention.activate_flash_attention_impl(_FA4)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


@contextmanager
def _use_flashinfer(device: torch.device) -> Iterator[None]:
    sampling = import_module("flashinfer.sampling")
    sampling.get_sampling_module()  # compiled now, not in the first decode step

    # FlashInfer normalises the kept probabilities, which does not change the choice of tokens.
    def restrict_to_top_k(probabilities: Tensor, count: int) -> Tensor:
        kept: Tensor = sampling.top_k_renorm_probs(probabilities.contiguous(), count, is_deterministic=True)
        return kept

    def restrict_to_top_p(probabilities: Tensor, share: float) -> Tensor:
        kept: Tensor = sampling.top_p_renorm_probs(probabilities.contiguous(), share, is_deterministic=True)
        return kept

    with _scoped_library(NAMESPACE, "IMPL") as library:
        for function in (restrict_to_top_k, restrict_to_top_p):
            library.impl(function.__name__, function, device.type.upper())
        yield


_SWITCHES: Mapping[str, Callable[[torch.device], AbstractContextManager[None]]] = {
    "fa4": _use_fa4,
    "flashinfer": _use_flashinfer,
}
