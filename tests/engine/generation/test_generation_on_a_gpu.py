"""What generation does on a GPU: turns of several steps, graphs of few sizes, steps that never wait."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from realrl.engine.generation import decode_batch
from realrl.engine.generation.call import GenerateCall
from realrl.engine.generation.decode_step import DecodeStep
from realrl.engine.generation.row_buffers import BufferedRows, RowBuffers
from realrl.engine.generation.sampler import Sampler
from realrl.engine.generation.sampling import SamplingNoise, SamplingSeed
from realrl.engine.generation.step_graphs import StepGraphs
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.experts import Mixture
from realrl.families.shape import ModelShape
from realrl.layout.kv_blocks import GPU_STEPS, MAX_DECODE_ROWS, CacheSize, pad_rows
from realrl.model.arithmetic import grouped
from realrl.model.cache import PagedCache
from realrl.recipe.settings import GenerationConfig
from tests.engine.generation.test_shared_prompts import assert_same, draw, make_items, make_model
from tests.engine.test_router_replay import CAPACITIES, make_models, sample, shape_of

WAITING = ("nonzero", "_local_scalar_dense", "masked_select", "unique")
"""Operations whose results have shapes, or are numbers, that the host must wait for."""
NOWHERE = torch.device("meta")
"""A device whose tensors have shapes but no values: what asks for one fails."""


class Graphs:
    """Steps that run as they are, where a GPU would replay a graph."""

    widths: set[int]

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def run(self, rows: BufferedRows, hidden: torch.Tensor | None) -> torch.Tensor:
        Graphs.widths.add(len(rows.tokens))
        return self._step.run(rows, hidden)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> type[Graphs]:
    """The host's side of generation on a GPU, on a CPU."""
    make_call = GenerateCall.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr("realrl.engine.generation.call.count_steps_per_look", lambda cpu: GPU_STEPS)
    monkeypatch.setattr(
        GenerateCall, "of", classmethod(lambda cls, *a, **k: replace(make_call(cls, *a, **k), on_gpu=True))
    )
    monkeypatch.setattr(decode_batch, "StepGraphs", Graphs)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    Graphs.widths = set()
    return Graphs


@pytest.mark.parametrize("kv_capacity", [1, 200, 1 << 20])
@pytest.mark.parametrize("samples", [1, 6])
def test_turns_of_many_steps_sample_what_single_steps_do(
    as_on_a_gpu: type[Graphs], monkeypatch: pytest.MonkeyPatch, samples: int, kv_capacity: int
) -> None:
    model, items = make_model("grouped-queries"), make_items((5, 33, 1, 12))
    got = draw(model, items, samples, kv_capacity=kv_capacity, max_new_tokens=40)
    assert as_on_a_gpu.widths == {pad_rows(rows) for rows in as_on_a_gpu.widths}
    monkeypatch.undo()
    assert_same(got, draw(model, items, 1, max_new_tokens=40))


@pytest.mark.parametrize("kv_capacity", CAPACITIES)
def test_turns_of_many_steps_record_the_experts_of_single_steps(
    as_on_a_gpu: type[Graphs], monkeypatch: pytest.MonkeyPatch, kv_capacity: int
) -> None:
    model, _ = make_models(shape_of("mixtral"))
    got = sample(model, kv_capacity)
    monkeypatch.undo()
    expected = sample(model)
    for key in ("sequences", "routed_experts"):
        torch.testing.assert_close(got[key].values, expected[key].values, rtol=0, atol=0)


def test_the_host_looks_at_tokens_once_per_turn(
    as_on_a_gpu: type[Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    read = RowBuffers.read

    def look(self: RowBuffers, rows: int, steps: int) -> object:
        looks.append(steps)
        return read(self, rows, steps)

    monkeypatch.setattr(RowBuffers, "read", look)
    draw(make_model("one-key-head"), make_items((9,)), 6, max_new_tokens=40)
    assert looks[0] == GPU_STEPS and len(looks) <= 3


DENSE = ModelShape(
    family="qwen3", vocab_size=300, hidden_size=64, intermediate_size=96, layers=2, heads=6, kv_heads=2,
    head_dim=16,
)  # fmt: skip
EXPERTS = DENSE.model_copy(
    update={"family": "qwen3_moe", "intermediate_size": 24, "mixture": Mixture(experts=5, per_token=3)}
)


def make_step(
    device: torch.device, shape: ModelShape = DENSE, experts: int = 0, **sampling: object
) -> tuple[DecodeStep, RowBuffers]:
    model: Model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=device)
    cache = PagedCache(
        CacheSize(100, 16),
        layers=2,
        kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        device=device,
        experts=experts,
    )
    settings = GenerationConfig.model_validate(sampling)
    sampler = Sampler(settings, temperature=1.0, stop_token_ids=(3, 4), device=device)
    buffers = RowBuffers(16, longest_prompt=40, new_tokens=50, steps=GPU_STEPS, device=device, mirrored=True)
    return DecodeStep(model, model.transformer.prepare_decoding(), cache, sampler), buffers


@torch.no_grad()
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"greedy": True},
        {"top_k": 5, "temperature": 0.8},
        {"top_p": 0.9, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_a_decode_step_needs_no_value_on_the_host(
    sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured with tensors that have no values: shapes follow from the number of rows alone."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    step, buffers = make_step(NOWHERE, **sampling)
    rows = buffers.view(8)
    rows.begin_turn(SamplingNoise(SamplingSeed(1, 2, call=1)))
    captured = make_fx(lambda: step.run(rows, None))()
    called = [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]
    assert called.count("realrl.attend_to_blocks.default") == 2
    assert not [name for name in called if any(word in name for word in (*WAITING, "aten.sort"))]
    assert captured.graph.nodes and rows.sampled.shape == (GPU_STEPS, 8)


@torch.no_grad()
def test_a_decode_step_records_experts_without_a_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(grouped, "has_grouped_products", lambda _: True)
    written = []
    for recorded in (0, 3):
        step, buffers = make_step(NOWHERE, EXPERTS, recorded)
        rows = buffers.view(8)
        rows.begin_turn(SamplingNoise(SamplingSeed(1, 2, call=1)))
        captured = make_fx(partial(step.run, rows, None))()
        called = [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]
        assert not [name for name in called if any(word in name for word in WAITING)]
        written.append(sum(name.startswith("aten.index_put") for name in called))
    assert written[1] == written[0] + 2  # once in each layer


@torch.no_grad()
def test_a_decode_step_of_a_mixture_needs_no_value_on_the_host_where_one_kernel_takes_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(grouped, "has_grouped_products", lambda _: True)
    step, buffers = make_step(NOWHERE, EXPERTS)
    rows = buffers.view(8)
    rows.begin_turn(SamplingNoise(SamplingSeed(1, 2, call=1)))
    captured = make_fx(lambda: step.run(rows, None))()
    called = [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]
    assert called.count("aten._grouped_mm.default") == 4
    assert not [name for name in called if any(word in name for word in WAITING)]
    unaligned = EXPERTS.model_copy(update={"intermediate_size": 20})
    for shape, ahead in ((DENSE, True), (EXPERTS, True), (unaligned, False)):
        model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=NOWHERE)
        assert model.transformer.prepare_decoding().runs_ahead == ahead


def test_graphs_are_captured_the_second_time_and_replayed_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[object] = []

    class Captured:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def graph(captured: Captured, *, pool: object, capture_error_mode: str):  # type: ignore[no-untyped-def]
        assert pool == (7, 7) and capture_error_mode == "thread_local"
        log.append("capture")
        yield

    class Step:
        def run(self, rows: object, hidden: torch.Tensor | None) -> torch.Tensor:
            log.append("run")
            assert hidden is not None
            return hidden

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    buffers = RowBuffers(
        4, longest_prompt=1, new_tokens=1, steps=1, device=torch.device("cpu"), mirrored=False
    )
    graphs = StepGraphs(Step())  # type: ignore[arg-type]
    for value in range(3):
        for width in (2, 4):
            out = graphs.run(buffers.view(width), torch.full((width, 3), float(value)))
            assert out.shape == (width, 3) and (out == value).all()
    run, capture, replay = "run", ["capture", "run", "replay"], "replay"
    assert log == [run, run, *capture, *capture, replay, replay]


def test_numbers_of_rows_with_a_graph_are_few_and_near() -> None:
    padded = [pad_rows(rows) for rows in range(1, MAX_DECODE_ROWS + 1)]
    assert padded == sorted(padded) and len(set(padded)) < 25 and padded[-1] == MAX_DECODE_ROWS
    assert all(rows <= p <= max(2 * rows, 8) for rows, p in enumerate(padded, 1))
    assert all(p < 1.26 * rows for rows, p in enumerate(padded, 1) if rows > 32)
