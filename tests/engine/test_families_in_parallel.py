"""Every family under tensor, sequence and pipeline parallelism computes what transformers computes."""

import os
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.registry import model_tensors
from realrl.families.shape import Mixture, ModelShape
from realrl.layout.layout import build_layout
from realrl.model.packing import Packing
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from tests.model.small_models import find_theirs, make_theirs, random_rows, read_whole

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3", "gpt_oss")
WINDOWED = ("gemma2", "gemma3_text", "olmo3", "gpt_oss")
"""Families whose first and last layers see a few tokens only, fewer than most sequences have."""
PLACEMENTS = {
    "one rank": Placement(Mesh(0, 1), Strategy()),
    "tensor": Placement(Mesh(0, 2), Strategy(tp=2)),
    "sequence": Placement(Mesh(0, 2), Strategy(tp=2, sequence_parallel=True)),
    "pipeline": Placement(Mesh(0, 2), Strategy(pp=2, micro_batch_tokens=40)),
    "context": Placement(Mesh(0, 2), Strategy(cp=2)),
    "experts, tensor": Placement(Mesh(0, 2), Strategy(tp=2, ep=2)),
    "experts, sequence": Placement(Mesh(0, 2), Strategy(tp=2, ep=2, sequence_parallel=True)),
}
LENGTHS = [9, 17, 4, 23]
EPSILON = 1e-4
"""Large, because without it Adam divides rounding differences of tiny gradients by their own size."""
CONFIG = OptimizerConfig(weight_decay=0.1, grad_clip=0.5, eps=EPSILON)
LR = 0.01
END, NEW_TOKENS = 3, 6

Figures = dict[str, Tensor]


def shape_of(family: str) -> ModelShape:
    """Each of two tensor-parallel ranks has two of three key/value heads, read by unequal groups of queries."""
    return ModelShape(
        family=family,
        vocab_size=61,
        hidden_size=24,
        intermediate_size=33,
        layers=3,
        heads=6,
        kv_heads=3,
        head_dim=6,
        tied_embeddings=family in ("qwen2", "gemma2", "gemma3_text"),
        window=7 if family in WINDOWED else None,
        windowed_layers=(0, 2) if family in WINDOWED else (),
        windowed_rope_theta=100.0 if family == "gemma3_text" else None,
        mixture=Mixture(experts=4, per_token=2) if family == "gpt_oss" else None,
    )


def rows() -> list[Tensor]:
    return random_rows(61, LENGTHS)


def reference(family: str) -> tuple[Figures, Figures]:
    """Weights, and what transformers and torch compute with them: logits and log-probabilities, gradients, an
    optimizer step, and greedy continuations."""
    torch.manual_seed(0)
    theirs = make_theirs(shape_of(family), "lm").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    parameters = dict(theirs.named_parameters())

    def named_as_ours(tensors: Figures) -> Figures:
        specs = model_tensors(shape_of(family), "lm")
        return {spec.name: read_whole(find_theirs(tensors, spec.file_name), spec).clone() for spec in specs}

    weights = named_as_ours({name: parameter.detach() for name, parameter in parameters.items()})
    logits = [theirs(row[None]).logits[0] for row in rows()]
    nll = [
        -x[:-1].log_softmax(-1).gather(1, row[1:, None]).sum() for x, row in zip(logits, rows(), strict=True)
    ]
    found = {"logits": torch.cat(logits).detach(), "nll": torch.stack(nll).detach()}
    for i, row in enumerate(rows()):
        found[f"continuation {i}"] = continued(theirs, row)
    (sum(nll) / (sum(LENGTHS) - len(LENGTHS))).backward()
    gradients = named_as_ours({name: parameter.grad for name, parameter in parameters.items()})
    found |= {f"gradient of {name}": values for name, values in gradients.items()}
    found["norm"] = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).detach()
    # Biases of experts are vectors, which transformers stacks.
    vectors = [p for name, p in parameters.items() if p.dim() == 1 or name.endswith("bias")]
    matrices = [p for name, p in parameters.items() if p.dim() > 1 and not name.endswith("bias")]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=LR, betas=CONFIG.betas, eps=EPSILON, weight_decay=0.1).step()
    updated = named_as_ours({name: parameter.detach() for name, parameter in parameters.items()})
    found |= {f"updated {name}": values for name, values in updated.items()}
    return weights, found


@torch.no_grad()
def continued(theirs: torch.nn.Module, row: Tensor) -> Tensor:
    for _ in range(NEW_TOKENS):
        logits = theirs(row[None]).logits[0, -1]
        logits[END] = -torch.inf
        row = torch.cat((row, logits.argmax()[None]))
    return row


def compare(name: str, got: Tensor, expected: Tensor, where: str) -> None:
    scale = max(1.0, expected.abs().max().item()) if expected.is_floating_point() else 1.0
    torch.testing.assert_close(
        got, expected, rtol=0, atol=1e-4 * scale, msg=lambda m: f"{where}: {name}: {m}"
    )


def check(model: Model, weights: Figures, expected: Figures, where: str) -> None:
    """Compare all that this rank has with the reference."""
    regions = {local.region.tensor: local.region for local in model.layout.tensors(model.rank)}
    for name, region in regions.items():
        model.parameters[name][: region.size[0]] = weights[name][region.slices]
    tokens = Ragged.of(rows())
    mask = torch.ones_like(tokens.values)
    mask[list(tokens.offsets[:-1])] = 0
    batch = Batch(tuple(range(len(LENGTHS))), {"tokens": tokens, "loss_mask": Ragged(mask, tokens.lengths)})
    budget = model.layout.placement.strategy.micro_batch_tokens

    if model.groups.pipeline.size == 1 and not model.sequence_parallel:
        with torch.no_grad():
            packing = Packing.of(LENGTHS, CPU)
            logits = model.transformer.compute_logits(model.forward(tokens, packing, None))
        compare("logits", logits, expected["logits"], where)
    scored, _ = model.infer(batch, SFTMethod(), budget)
    if model.shard.last:
        compare("nll", scored["nll"].values, expected["nll"], where)
    sampling = GenerationConfig(greedy=True, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    texts = generate(
        model, batch, "tokens", sampling=sampling, stop_token_ids=(END,), seed=SamplingSeed(1, 1), kv_capacity=200
    )  # fmt: skip
    if model.shard.last:
        for i, row in enumerate(texts["sequences"].rows()):
            compare("continuation", row, expected[f"continuation {i}"], where)

    trainer = Trainer(model, CONFIG)
    step, gradients = trainer.optimizer.step, {}

    def noted(lr: float, *, summed: Mapping[str, Tensor], **options: float) -> float:
        for name in regions:
            local = trainer.gradients[name]
            gradients[name] = summed.get(name, local).view_as(local).clone()
        return step(lr, summed=summed, **options)

    trainer.optimizer.step = noted  # type: ignore[method-assign]
    metrics = trainer.train(
        batch, SFTMethod(), [list(range(len(LENGTHS)))], TrainOptions(max_tokens=budget), lr=LR
    ).result()
    compare("norm", torch.tensor(metrics["grad_norm"]), expected["norm"], where)
    for name, region in regions.items():
        for what, values in (("gradient of", gradients[name]), ("updated", model.parameters[name])):
            if what == "gradient of" and model.groups.copies.size > 1:
                continue  # each of these ranks has a part of the gradient
            wanted = expected[f"{what} {name}"][region.slices]
            compare(f"{what} {name}", values[: region.size[0]], wanted, where)


def run_rank(rank: int, references: dict[str, tuple[Figures, Figures]], store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    process = Process(rank, 2, CPU, dist.new_group(backend="gloo"))
    groups = process.groups(list_rank_sets(PLACEMENTS.values()))
    for family, (name, placement) in product(FAMILIES, PLACEMENTS.items()):
        divides_experts = placement.strategy.ep > 1
        if rank in placement.ranks and (shape_of(family).mixture is not None or not divides_experts):
            model = Model(
                build_layout(shape_of(family), "lm", placement),
                rank,
                select_groups(placement, rank, groups),
                dtype=torch.float32,
                device=CPU,
            )
            check(model, *references[family], where=f"{family}, {name}, rank {rank}")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def test_every_family_and_strategy_computes_what_transformers_does() -> None:
    """Logits, log-probabilities, greedy tokens, gradients, their norm, and an optimizer step."""
    references = {family: reference(family) for family in FAMILIES}
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(run_rank, args=(references, str(Path(scratch) / "store")), nprocs=2)
