"""Training on GPUs uses interfaces of torch 2.11 to 2.13. docs/notes/gpu-internals.md lists what differs."""

import inspect

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention.varlen import varlen_attn

from realrl.config.errors import UserError
from realrl.model import attention
from realrl.model.gpu import path

VERSION = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
SCHEMAS = {
    "mm.dtype": "(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor",
    "bmm.dtype": "(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor",
    "addmm.dtype_out": "(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, Scalar beta=1, "
    "Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_products_can_have_float32_results(name: str) -> None:
    packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    assert str(operator._schema) == f"aten::{name}{SCHEMAS[name]}"


def test_attention_over_packed_sequences_takes_what_it_is_given() -> None:
    parameters = inspect.signature(varlen_attn).parameters
    first = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(parameters)[:7] == first
    assert parameters["window_size"].default == (-1, -1)
    assert ("enable_gqa" in parameters) == (VERSION >= (2, 12)) == bool(attention.load_packed_attention()[1])


def test_parameters_have_gradients_of_another_type_and_nodes_with_hooks() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(2)
    node, calls = get_gradient_edge(weight).node, []
    node.register_hook(lambda *_: calls.append(1))
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3] and weight.grad.dtype == torch.float32 and calls == [1]


def test_fused_adamw_divides_gradients_by_a_scale() -> None:
    results = []
    for scale in (None, torch.full((), 4.0)):
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.arange(1.0, 4.0) * (1 if scale is None else 4)
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        optimizer.grad_scale = scale
        optimizer.step()
        results.append(weight.detach().clone())
    torch.testing.assert_close(*results)


def test_collectives_of_one_tensor_have_the_names_of_the_version() -> None:
    names = {"reduce_scatter_single", "all_gather_single"}
    assert {name for name in names if hasattr(torch.distributed, name)} == (
        names if VERSION >= (2, 13) else set()
    )


def test_a_missing_c_compiler_is_one_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    path.load_kernels.cache_clear()
    monkeypatch.setattr(path, "find_missing_build_tool", lambda: "Triton needs a C compiler")
    with pytest.raises(UserError, match="device=cuda: Triton needs a C compiler"):
        path.load_kernels()


def test_a_missing_triton_is_one_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    path.load_kernels.cache_clear()
    monkeypatch.setattr(path, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="device=cuda needs the package triton"):
        path.load_kernels()


@pytest.mark.parametrize(("capability", "found"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_gpus_before_ampere_have_no_flash_attention(
    capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    path.has_flash_attention.cache_clear()
    assert path.has_flash_attention(torch.device("cuda:0")) is found
    path.has_flash_attention.cache_clear()
