"""Kernels and traffic of the planner's cost model are those that the engine launches on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from realrl.engine.generation.decode_step import DecodeStep
from realrl.engine.generation.row_buffers import RowBuffers
from realrl.engine.generation.sampler import Sampler
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import LayerOptions, Mixture, ModelShape
from realrl.layout.kv_blocks import CacheSize
from realrl.model.attention import varlen_attention
from realrl.model.kv_cache import PagedCache
from realrl.model.packing import Packing
from realrl.model.routing import LIKELIEST
from realrl.model.tensor_parallel import TensorParallel
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.roofline import Roofline
from realrl.planner.cost.timing import Timing
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.workload import UNRESTRICTED, Sampling
from realrl.recipe.generation import GenerationConfig
from tests.forked import run_forked
from tests.gpu_branches.fake_gpu import Device, fake_gpu

WIDE = ModelShape(
    vocab_size=32768, hidden_size=512, intermediate_size=1024, layers=2, heads=8, kv_heads=2, head_dim=64
)
SHAPES = {
    "llama": WIDE,
    "head norms": WIDE.model_copy(update={"family": "qwen3"}),
    "mixture": WIDE.model_copy(
        update={
            "family": "qwen3_moe",
            "intermediate_size": 256,
            "mixture": Mixture(experts=8, per_token=2),
        }
    ),
}
SHAPES["mixture with biases"] = SHAPES["mixture"].model_copy(
    update={"layer": LayerOptions(qk_norm="heads", mlp_bias=True)}
)
TOKENS = 8192
SAMPLINGS = {
    "plain": (GenerationConfig(), UNRESTRICTED),
    "minimum": (GenerationConfig(min_new_tokens=4), Sampling(minimum=True)),
    "top_k": (GenerationConfig(top_k=50), Sampling(top_k=True)),
    "top_p": (GenerationConfig(top_p=0.9), Sampling(top_p=True)),
}
ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
VIEWING = (
    *("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "split", "narrow"),
    *("split_with_sizes", "as_strided", "alias", "detach", "unsqueeze", "squeeze", "unbind", "device"),
)
PRODUCTS = frozenset(
    ["mm", "addmm", "_grouped_mm", "add_grouped_gradient", "_varlen_attn", "_varlen_attn_backward"]
)
SELECTING = frozenset(["index_select", "gather", "embedding"])
"""Operations that read as much of their operand as they give."""


class CountingDevice:
    """Kernels that are launched on a device that is not there, and the bytes that they read and write."""

    def __init__(self) -> None:
        self.kernels = 0
        self.traffic = 0
        self._dispatch = Device.__torch_dispatch__

    def install(self) -> None:
        def dispatch(device: Device, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = self._dispatch(device, func, types, args, kwargs)
            there = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, FakeTensor)]
            name = str(func).split(".")[1]
            if (there or (kwargs or {}).get("device") == device.device) and name not in ALLOCATING + VIEWING:
                self.kernels += 1
                if name not in PRODUCTS:
                    self.traffic += _count_bytes(name, there, found)
            return found

        Device.__torch_dispatch__ = dispatch  # type: ignore[method-assign]

    def count(self, run: Callable[[], Any]) -> tuple[int, int]:
        """Run something; its kernels and bytes."""
        self.kernels = self.traffic = 0
        run()
        return self.kernels, self.traffic


def size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _count_bytes(name: str, operands: list[Tensor], found: Any) -> int:
    outputs = [x for x in tree_leaves(found) if isinstance(x, FakeTensor)]
    size = sum(map(size_of, outputs))
    if name in SELECTING or name == "copy_":
        return 2 * size
    if name == "keep_top_p":  # eight reads select, and the ninth restricts
        return 10 * size_of(operands[0])
    if name == "rotate_heads":  # in place; tables are small
        qkv = operands[0]
        kept = qkv.shape[1] * WIDE.kv_heads // (WIDE.heads + 2 * WIDE.kv_heads)
        return 2 * len(qkv) * (qkv.shape[1] - kept) * qkv.element_size()
    if name == "add_biases":  # in place; biases are small
        return 2 * size_of(operands[0])
    return size + sum(map(size_of, operands))


def make_model(shape: ModelShape, gpu: Device) -> Model:
    model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=gpu.device)
    for parameter in model.transformer.parameters():
        parameter.requires_grad_(True)
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    return model


def count_layer(model: Model, device: CountingDevice, gpu: Device) -> list[tuple[int, int]]:
    """Kernels and traffic of a layer forward and backward."""
    transformer, shape = model.transformer, model.shape
    packing = Packing.of((TOKENS,), gpu.device)
    tp = TensorParallel(transformer.tensor_group, TOKENS)
    x = torch.empty(TOKENS, shape.hidden_size, dtype=torch.bfloat16, device=gpu.device, requires_grad=True)
    tables = [torch.empty(TOKENS, shape.head_dim // 2, device=gpu.device) for _ in range(2)]
    outputs: list[Tensor] = []

    def run() -> None:
        def attend(qkv: Tensor, rule: Any) -> Tensor:
            return varlen_attention(qkv, packing, shape.heads, shape.kv_heads, rule)

        layer = transformer.layers[0]
        outputs.append(layer(x, tuple(tables), attend, tp, transformer._matrices, LIKELIEST))

    forward = device.count(run)
    gradient = torch.empty_like(outputs[0])
    return [forward, device.count(lambda: outputs[0].backward(gradient))]


def estimate(shape: ModelShape) -> Roofline:
    """The planner's model of a device on which a byte of traffic takes a second, and nothing else any."""
    device = replace(DEVICES["h100"], memory_bytes_per_s=1.0)
    efficiency = Efficiency(memory=1.0, least_kernel_s=0.0)
    return Roofline(device=device, efficiency=efficiency, sizes=LocalSizes(shape, "lm", 1), dtype="bfloat16")


def check_layers(_: int) -> None:
    device = CountingDevice()
    device.install()
    for name, shape in SHAPES.items():
        with fake_gpu() as gpu:
            (forward, moved), (backward, moved_back) = count_layer(make_model(shape, gpu), device, gpu)
        roofline = estimate(shape)
        timing = Timing(
            device=DEVICES["h100"], efficiency=Efficiency(), sizes=roofline.sizes, dtype="bfloat16"
        )
        e = timing.efficiency
        assert forward == e.forward_operations + timing._optional_operations, name
        assert forward == timing.decode_operations, name
        assert backward == timing._backward_operations, name
        assert roofline._elementwise(TOKENS) == pytest.approx(moved, rel=0.02), name
        assert roofline._elementwise_backward(TOKENS) == pytest.approx(moved_back, rel=0.03), name


def check_decoding(_: int) -> None:
    device, rows = CountingDevice(), 256
    device.install()
    with fake_gpu() as gpu, torch.no_grad():
        model = make_model(WIDE, gpu)
        cache = PagedCache(
            CacheSize(64, rows), layers=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=gpu.device
        )
        buffers = RowBuffers(
            rows, longest_prompt=9, new_tokens=32, steps=4, device=gpu.device, mirrored=False
        )
        buffers._device = {name: x.to(gpu.device) for name, x in buffers._host.items()}
        view = buffers.view(rows)
        noise = SamplingNoise(SamplingSeed(1, 2, 3, 4))
        looked, _ = device.count(lambda: view.begin_turn(noise))
        # Six copies to the device, and two back.
        assert looked + 8 == Efficiency().look_operations
        weights = model.transformer.prepare_decoding()
        roofline = estimate(WIDE)
        for name, (config, sampling) in SAMPLINGS.items():
            sampler = Sampler(config, temperature=1.0, stop_token_ids=(1,), device=gpu.device)
            step = DecodeStep(model, weights, cache, sampler)
            kernels, _ = device.count(lambda step=step: step.run(view, None))
            layers = 2 * roofline.efficiency.decode_operations
            assert kernels - layers == roofline.count_sampling_operations(sampling), name
            logits = torch.empty(rows, WIDE.vocab_size, device=gpu.device)
            uniform = torch.empty(rows, dtype=torch.float64, device=gpu.device)
            place = torch.empty(rows, dtype=torch.int64, device=gpu.device)
            _, moved = device.count(lambda: sampler.sample(logits, place, uniform))  # noqa: B023
            per_logit = moved / logits.numel()
            assert expect_sampled_bytes(sampling) == pytest.approx(per_logit, rel=0.02), name


def expect_sampled_bytes(sampling: Sampling) -> float:
    e = Efficiency()
    # A selection by torch reads more than its operands once.
    top_k = (e.top_k_bytes - e.likeliest_bytes + 4) * sampling.top_k
    return e.sampled_logit_bytes + e.minimum_bytes * sampling.minimum + top_k + e.top_p_bytes * sampling.top_p


def test_kernels_and_traffic_of_layers_are_those_that_the_engine_launches() -> None:
    run_forked(check_layers, 1)


def test_kernels_and_traffic_of_sampling_are_those_that_the_engine_launches() -> None:
    run_forked(check_decoding, 1)
