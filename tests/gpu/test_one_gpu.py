"""Training, sampling, memory and offloading on one GPU, against a CPU and against predictions."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Head, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.measure.step_timer import count_allocations
from tests.gpu.devices import on_one_device
from tests.gpu_branches.training_cases import LONG, SHAPES, list_methods, make_batch

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
SMALL = ModelShape(
    vocab_size=3000, hidden_size=256, intermediate_size=700, layers=4, heads=8, kv_heads=2, head_dim=32
)
LARGE = ModelShape(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, layers=6, heads=16, kv_heads=4, head_dim=128
)
"""Large enough that what libraries and kernels hold besides is a small part."""


def make(shape: ModelShape, head: Head, dtype: torch.dtype, device: torch.device) -> Model:
    model = make_unsharded_model(shape, head, dtype=dtype, device=device)
    initialise(model.parameters, model.layout.specs, shape, 1)
    return model


def train(model: Model, recompute: bool = False) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Metrics of a step of every method of the head, and the parameters after them."""
    trainer = Trainer(model, OptimizerConfig(grad_clip=0.5, eps=1e-4))
    batch = make_batch(model.head, model.shape, LONG)
    found = [
        trainer.train(
            batch,
            method,
            [[0, 1], [2, 3]],
            TrainOptions(max_tokens=150, recompute=recompute, candidates=candidates),
            lr=1e-2,
        ).result()
        for method, candidates in list_methods(model.head)
    ]
    return found, model.sets["base"].buffer.data.float().cpu()


@on_one_device
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "head"), [*((name, "lm") for name in SHAPES), ("llama, grouped", "scalar")])
def test_training_matches_the_cpu_in_float32(name: str, head: Head, dtype: torch.dtype, device: str) -> None:
    shape, tolerance = SHAPES[name].model_copy(update={"init_std": 0.2}), TOLERANCES[dtype]
    expected, parameters = train(make(shape, head, torch.float32, CPU))
    for recompute in (False, True):
        got, ours = train(make(shape, head, dtype, torch.device(device)), recompute)
        for a, b in zip(got, expected, strict=True):
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
        difference = torch.linalg.vector_norm(ours - parameters[: len(ours)])
        assert difference <= tolerance * torch.linalg.vector_norm(parameters)


def sample(model: Model, prompts: Ragged, positions: list[int], kv_capacity: int) -> dict[int, list[int]]:
    """Sampled sequences of some prompts."""
    whole = Batch(tuple(range(len(prompts))), {"prompts": prompts})
    texts = generate(
        model,
        whole.select(positions),
        "prompts",
        sampling=GenerationConfig(max_new_tokens=20, min_new_tokens=3),
        stop_token_ids=(3,),
        seed=SamplingSeed(1, 2),
        kv_capacity=kv_capacity,
    )
    return dict(zip(texts.ids, (row.tolist() for row in texts["sequences"].rows()), strict=True))


@on_one_device
def test_samples_in_float32_do_not_depend_on_the_batch(device: str) -> None:
    model = make(SMALL.model_copy(update={"init_std": 0.1}), "lm", torch.float32, torch.device(device))
    # Rounding differs with the batch: of 4,000 tokens of other prompts, two were others on one CPU.
    random = torch.Generator().manual_seed(1)
    lengths = (7, 30, 2, 19, 11, 25, 4, 16)
    prompts = Ragged.of([torch.randint(4, 3000, (n,), generator=random) for n in lengths])
    together = sample(model, prompts, list(range(8)), 10_000)
    assert sample(model, prompts, [5, 2, 7, 0, 1, 6, 4, 3], 120) == together
    alone = {i: sample(model, prompts, [i], 10_000)[i] for i in range(8)}
    assert alone == together


def find_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Most bytes that `run` has allocated at a time."""
    if device.type == "cpu":
        with count_allocations() as found:
            run()
        assert found.peak is not None
        return found.peak
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


@on_one_device
@pytest.mark.parametrize("recompute", [False, True])
def test_training_allocates_the_predicted_memory(device: str, recompute: bool) -> None:
    place, lengths = torch.device(device), (512,) * 8
    on_cpu = device == "cpu"
    shape, dtype = (SMALL, torch.float32) if on_cpu else (LARGE, torch.bfloat16)
    spec = "cpu:1x1" if on_cpu else "h100:1x1"
    strategy = Strategy(micro_batch_tokens=2048, recompute=recompute)
    stored = StoredModel(shape, "lm", "float32" if on_cpu else "bfloat16", True)
    call = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
    workload = Workload(len(lengths), lengths, (0,), 0)
    need = MemoryModel(ClusterSpec.parse(spec)).call(call, stored, Placement(Mesh(0, 1), strategy), workload)
    expected = sum(size for name, size in need.dynamic.items() if name != "fragmentation")
    trainer = Trainer(make(shape, "lm", dtype, place), OptimizerConfig())
    batch = make_batch("lm", shape, lengths)
    ((method, _), *_) = list_methods("lm")
    step = partial(
        trainer.train, batch.select(range(8)), method, [list(range(8))],
        TrainOptions(max_tokens=2048, recompute=recompute), lr=0.0,
    )  # fmt: skip
    step()  # libraries allocate what they keep
    assert find_peak(place, step) == pytest.approx(expected, rel=0.1)


@on_one_device
def test_offloaded_training_goes_on_as_if_it_had_stayed(device: str) -> None:
    place, shape = torch.device(device), SHAPES["llama, grouped"]
    batch = make_batch("lm", shape, LONG)
    ((method, _), *_) = list_methods("lm")
    results = []
    for offload in (False, True):
        model = make(shape, "lm", torch.float32, place)
        trainer, parameters = Trainer(model, OptimizerConfig()), model.sets["base"].memory
        for _ in range(3):
            trainer.train(batch, method, [[0, 1, 2, 3]], TrainOptions(max_tokens=1000), lr=1e-2)
            if offload:
                for memory in (parameters, trainer.memory):
                    memory.offload()
                    assert memory.nbytes == 0
                    memory.load()
        results.append(model.sets["base"].buffer.data.cpu())
    # Additions to rows of the embedding come in any order on a GPU.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
