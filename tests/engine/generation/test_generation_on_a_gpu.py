"""What generation does on a GPU: turns of several steps, graphs of few sizes, steps that never wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from realrl.engine.generation import decode_memory, decode_step
from realrl.engine.generation.decode_memory import KeptDecoding, list_addresses
from realrl.engine.generation.decode_step import DecodeStep, StepGraphs
from realrl.engine.generation.row_buffers import BufferedRows, RowBuffers
from realrl.engine.generation.sampler import Sampler
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.adapters import LowRank
from realrl.families.shape import Mixture, ModelShape
from realrl.layout.kv_blocks import GPU_STEPS, MAX_DECODE_ROWS, CacheSize, pad_rows
from realrl.model.arithmetic import grouped
from realrl.model.kv_cache import PagedCache
from realrl.model.matrices import DecodeWeights
from realrl.recipe.generation import GenerationConfig
from tests.engine.generation.test_shared_prompts import assert_same, draw, make_items, make_model
from tests.engine.test_router_replay import CAPACITIES, make_models, sample, shape_of

WAITING = ("nonzero", "_local_scalar_dense", "masked_select", "unique")
"""Operations whose results have shapes, or are numbers, that the host must wait for."""
NOWHERE = torch.device("meta")
"""A device whose tensors have shapes but no values: what asks for one fails."""


class Graphs:
    """Steps that run as they are, where a GPU would replay a graph."""

    widths: set[int]

    def __init__(self, step: DecodeStep, device: torch.device) -> None:
        self._step = step

    def run(self, rows: BufferedRows, hidden: torch.Tensor | None) -> torch.Tensor:
        Graphs.widths.add(len(rows.tokens))
        return self._step.run(rows, hidden)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> type[Graphs]:
    """The host's side of generation on a GPU, on a CPU."""
    monkeypatch.setattr("realrl.engine.generation.decode_batch.is_gpu", lambda _: True)
    monkeypatch.setattr(decode_memory, "StepGraphs", Graphs)
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
    targets = ("experts.gate_up_proj", "experts.down_proj")
    adapted, thin = (
        EXPERTS.model_copy(update={"lora": LowRank(rank=rank, targets=targets)}) for rank in (8, 4)
    )
    for shape, products in ((EXPERTS, 4), (adapted, 12)):
        step, buffers = make_step(NOWHERE, shape)
        rows = buffers.view(8)
        rows.begin_turn(SamplingNoise(SamplingSeed(1, 2, call=1)))
        captured = make_fx(partial(step.run, rows, None))()
        called = [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]
        assert called.count("aten._grouped_mm.default") == products
        assert not [name for name in called if any(word in name for word in WAITING)]
    unaligned = EXPERTS.model_copy(update={"intermediate_size": 20})
    cases = (DENSE, True), (EXPERTS, True), (unaligned, False), (adapted, True), (thin, False)
    for shape, ahead in cases:
        model = make_unsharded_model(shape, "lm", dtype=torch.bfloat16, device=NOWHERE)
        assert model.transformer.prepare_decoding().runs_ahead == ahead


class Cuda:
    """Streams and graphs of CUDA, which only note what happens. Captures fail while there is no `room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[object] = []
        self.room = True
        self.pools = 0
        self.stream = "usual"
        cuda, log = self, self.log

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = f"own of {device}"

            def wait_stream(self, other: str) -> None:
                log.append(f"{self.name} waits for {other}")

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local" and cuda.stream != "usual"
                log.append(f"capture in pool {pool}")

            def capture_end(self) -> None:
                log.append("end")

            def replay(self) -> None:
                assert cuda.stream == "usual"
                log.append("replay")

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            cuda.stream = stream.name
            try:
                yield
            finally:
                cuda.stream = "usual"

        def find_pool() -> int:
            self.pools += 1
            return self.pools

        def give_back() -> None:
            log.append("give back")
            self.room = True

        answers: dict[str, object] = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": on,
            "current_stream": lambda _: self.stream,
            "graph_pool_handle": find_pool,
            "empty_cache": give_back,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        decode_step._find_capture_stream.cache_clear()

    def run(self, rows: object, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run a step: it returns what it gets."""
        if self.stream != "usual" and not self.room:
            raise torch.cuda.OutOfMemoryError("no room")
        self.log.append("run")
        assert hidden is not None
        return hidden


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    yield Cuda(monkeypatch)
    decode_step._find_capture_stream.cache_clear()


def run_graphs(graphs: StepGraphs, values: int = 3, widths: tuple[int, ...] = (2, 4)) -> None:
    cpu = torch.device("cpu")
    buffers = RowBuffers(4, longest_prompt=1, new_tokens=1, steps=1, device=cpu, mirrored=False)
    for value in range(values):
        for width in widths:
            out = graphs.run(buffers.view(width), torch.full((width, 3), float(value)))
            assert out.shape == (width, 3) and (out == value).all()


WAITS = "own of cpu waits for usual"


def test_graphs_are_captured_the_second_time_and_replayed_from_then_on(cuda: Cuda) -> None:
    run_graphs(StepGraphs(cuda, torch.device("cpu")))  # type: ignore[arg-type]
    # The host does not wait, and what torch caches stays.
    capture = [WAITS, "capture in pool 1", "run", "end", "replay"]
    assert cuda.log == ["run", "run", *capture, *capture, "replay", "replay"]


def test_a_graph_without_room_is_captured_again_when_cached_memory_has_been_given_back(cuda: Cuda) -> None:
    graphs = StepGraphs(cuda, torch.device("cpu"))  # type: ignore[arg-type]
    run_graphs(graphs, 1)
    cuda.room = False
    cuda.log.clear()
    run_graphs(graphs, 1, (2,))
    again = [WAITS, "capture in pool 2", "run", "end", "replay"]
    assert cuda.log == [WAITS, "capture in pool 1", "end", "give back", *again]
    cuda.room = False
    cuda.log.clear()
    run_graphs(graphs, 1, (4,))
    # The pool of graphs that are there is taken again.
    assert cuda.log[1] == "capture in pool 2" and again == cuda.log[-5:]


def test_a_capture_that_never_has_room_ends_with_the_error(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = StepGraphs(cuda, torch.device("cpu"))  # type: ignore[arg-type]
    run_graphs(graphs, 1)
    cuda.room = False
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room"):
        run_graphs(graphs, 1)
    assert cuda.log[-1] == "end"


def test_products_run_in_the_stream_of_captures_before_the_first_of_them(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *x: cuda.log.append(f"product on {cuda.stream}") or multiply(*x)
    )
    for _ in range(2):
        run_graphs(StepGraphs(cuda, torch.device("cpu")), 2, (2,))  # type: ignore[arg-type]
    products = [i for i, entry in enumerate(cuda.log) if str(entry).startswith("product")]
    assert [cuda.log[i] for i in products] == ["product on own of cpu"], "one stream for all graphs"
    assert products[0] < cuda.log.index("capture in pool 1")


class Addresses(Graphs):
    """Graphs which notice whether what they know is still where it was."""

    made: ClassVar[list["Addresses"]] = []

    def __init__(self, step: DecodeStep, device: torch.device) -> None:
        super().__init__(step, device)
        self._known: dict[int, list[int]] = {}
        self.made.append(self)

    def run(self, rows: BufferedRows, hidden: torch.Tensor | None) -> torch.Tensor:
        cached, step = rows.cached, self._step
        tables = (cached.prompt_tables, cached.prompt_lengths, cached.own_tables, cached.own_lengths)
        numbers = (rows.tokens, rows.step, rows.noise, rows.sampled, rows.logprobs)
        fixed = (step._cache.k, step._cache.v, step._sampler._stop_token_ids)
        found = [tensor.data_ptr() for tensor in (*tables, *numbers, *fixed)]
        found += list_addresses(step._model)
        assert self._known.setdefault(len(rows.tokens), found) == found
        return super().run(rows, hidden)


@pytest.fixture
def graphs(as_on_a_gpu: type[Graphs], monkeypatch: pytest.MonkeyPatch) -> list[Addresses]:
    monkeypatch.setattr(decode_memory, "StepGraphs", Addresses)
    Addresses.made = []
    return Addresses.made


@torch.no_grad()
@pytest.mark.parametrize("kv_capacity", [200, 1 << 20])
def test_calls_that_leave_their_memory_to_each_other_sample_what_others_do(
    graphs: list[Addresses], kv_capacity: int
) -> None:
    model, kept = make_model("grouped-queries"), KeptDecoding()
    options = {"kv_capacity": kv_capacity, "max_new_tokens": 40}
    made = []
    for lengths, samples in (((5, 33, 1, 12), 6), ((4, 17), 6), ((9, 3, 30), 2), ((33,), 6)):
        items = make_items(lengths, samples)
        got = draw(model, items, samples, kept=kept, **options)
        made.append(len(graphs))
        assert_same(got, draw(model, items, samples, **options))
        graphs.pop()  # those of the call that keeps nothing
        for of in model.sets.values():  # as training does: in place
            of.buffer.data.mul_(1.03)
    assert made == [1, 1, 1, 1]
    assert kept.nbytes > model.shape.layers * 2 * 16 * model.shape.head_dim * 4


def test_memory_of_a_call_grows_to_that_of_a_larger_one(graphs: list[Addresses]) -> None:
    model, kept, sizes = make_model("grouped-queries"), KeptDecoding(), []
    for lengths in ((5, 9), (40, 9), (5, 9), (40, 9, 6, 7), (40, 9)):
        items = make_items(lengths, 2)
        assert_same(draw(model, items, 2, kept=kept), draw(model, items, 2))
        graphs.pop()
        sizes.append(kept.nbytes)
    assert sizes == sorted(sizes) and len(set(sizes)) == len(graphs) == 3


@torch.no_grad()
def test_graphs_are_not_taken_over_by_calls_that_differ_in_what_they_have_in_them(
    graphs: list[Addresses],
) -> None:
    model, kept, items = make_model("grouped-queries"), KeptDecoding(), make_items((5, 9), 2)

    def run(**sampling: object) -> int:
        draw(model, items, 2, kept=kept, **sampling)
        return len(graphs)

    assert [run(), run(), run(greedy=True), run(greedy=True), run()] == [1, 1, 2, 2, 3]
    (held,) = model.sets.values()
    values = held.buffer.data.clone()
    held.free()
    taken = torch.empty_like(values)  # where they have been, in all likelihood
    held.allocate()
    held.buffer.data.copy_(values)
    moved = kept._memory is not None and kept._memory.kind.addresses != list_addresses(model)
    assert run() == 3 + moved
    del taken


def test_weights_that_are_copies_of_the_parameters_are_not_kept(
    graphs: list[Addresses], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept, items = make_model("grouped-queries"), KeptDecoding(), make_items((5, 9), 2)
    prepare = model.transformer.prepare_decoding

    def scaled() -> DecodeWeights:
        weights = prepare()
        weights.follow_parameters = False
        return weights

    monkeypatch.setattr(model.transformer, "prepare_decoding", scaled)
    for count in (1, 2):
        draw(model, items, 2, kept=kept)
        assert len(graphs) == count and kept.nbytes == 0


def test_numbers_of_rows_with_a_graph_are_few_and_near() -> None:
    padded = [pad_rows(rows) for rows in range(1, MAX_DECODE_ROWS + 1)]
    assert padded == sorted(padded) and len(set(padded)) < 25 and padded[-1] == MAX_DECODE_ROWS
    assert all(rows <= p <= max(2 * rows, 8) for rows, p in enumerate(padded, 1))
    assert all(p < 1.26 * rows for rows, p in enumerate(padded, 1) if rows > 32)
