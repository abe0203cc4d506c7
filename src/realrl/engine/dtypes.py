"""Data types of models in torch: how parameters are stored, and how matrices are multiplied."""

import torch

from realrl.config.errors import UserError
from realrl.config.hardware import choose_products
from realrl.layout.sets import QUANTISED
from realrl.model.arithmetic.ops import PLAIN, Products
from realrl.plan.placement import Dtype


def find_torch_dtype(dtype: Dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def find_set_dtype(parameter_set: str, dtype: torch.dtype) -> torch.dtype:
    """Find the type in which a parameter set is stored; `dtype` is the type of the model's parameters."""
    return torch.uint8 if parameter_set == QUANTISED else dtype


def find_products(dtype: Dtype, device: torch.device, *, exact: bool = False) -> Products:
    """Choose how a model multiplies matrices. Raises UserError for `mixed` on a GPU."""
    if device.type != "cpu":
        if dtype == "mixed":
            raise UserError("dtype=mixed is for CPUs; on a GPU, choose bfloat16 or float32")
        return Products(exact=True) if exact else PLAIN
    choice = choose_products()
    return Products(
        onednn=choice.onednn,
        bfloat16=dtype == "mixed",
        # If the processor has instructions for bfloat16 products, a library uses them, but our packed kernel does
        # not.
        packed=choice.packed and not (choice.bfloat16 and dtype != "float32"),
        exact=exact,
    )
