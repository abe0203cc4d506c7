"""One rank of a placement without its peers: messages from them are zeros, so that its allocations are real."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from realrl.algorithms.base.method import InferenceMethod, TrainMethod
from realrl.algorithms.distillation import OfflineDistillationConfig
from realrl.algorithms.distillation_loss import DivergenceInference, DivergenceTrain, TopTeacher
from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Candidates
from realrl.engine.dtypes import find_torch_dtype
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model
from realrl.engine.parallel_groups import ParallelGroups
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.huggingface.initial_weights import initialise
from realrl.layout.layout import build_layout
from realrl.model import group as collectives
from realrl.model.arithmetic.ops import Products
from realrl.model.group import Group
from realrl.plan.placement import Placement
from realrl.plan.pool import Share
from realrl.program.memory import StoredModel
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.measure.step_timer import count_allocations

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Sent:
    """A message, or a collective, on its way, which keeps what it sends."""

    tensor: torch.Tensor | None = None

    def wait(self) -> None:
        """It has arrived."""


Messages = Counter[tuple[str, int]]
"""Kind and bytes of collectives and messages -> how many there were."""


@contextmanager
def nobody_else() -> Iterator[Messages]:
    """Collectives and messages that involve only this rank, counted.

    Bytes are those of what is summed or sent, of the result of an all-gather, and of the input of a reduce-scatter.
    """
    found: Messages = Counter()

    def count(kind: str, tensor: torch.Tensor) -> None:
        found[kind, tensor.numel() * tensor.element_size()] += 1

    def gathered(buffer: torch.Tensor, part: torch.Tensor, **_: Any) -> None:
        count("all_gather", buffer)
        buffer.view(-1, *part.shape)[:] = part

    def scattered(output: torch.Tensor, buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        count("reduce_scatter", buffer)
        output.copy_(buffer[: len(output)])

    def arrived(buffer: torch.Tensor, *_: Any, **__: Any) -> Sent:
        count("receive", buffer)
        buffer.zero_()
        return Sent()

    def sent(tensor: torch.Tensor, *_: Any, **__: Any) -> Sent:
        count("send", tensor)
        return Sent()

    def exchanged(output: torch.Tensor, tensor: torch.Tensor, *_: Any, **__: Any) -> Sent:
        count("all_to_all", tensor)
        output.copy_(tensor)
        return Sent(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanged)
        patch.setattr(dist, "all_reduce", lambda tensor, *_, **__: count("all_reduce", tensor))
        patch.setattr(dist, "broadcast", lambda tensor, *_, **__: count("broadcast", tensor))
        patch.setattr(dist, "isend", sent)
        patch.setattr(dist, "irecv", arrived)
        patch.setattr(collectives, "_all_gather", gathered)
        patch.setattr(collectives, "_reduce_scatter", scattered)
        patch.setattr("realrl.engine.training.trainer.broadcast_metrics", lambda metrics, *_: metrics)
        # Tokens on a fake device have no values, so they would all seem equal.
        patch.setattr("realrl.engine.model.can_share_prompts", lambda *_: False)
        # A rank that is alone has only its own outputs, so it divides every micro-batch with its peers.
        patch.setattr(
            "realrl.engine.micro_batches.divide_pool",
            lambda tokens, costs, ranks, *_: [Share(range(ranks), [*range(len(tokens))])],
        )
        patch.setattr("realrl.engine.model.gather_outputs", lambda found, *_: found)
        yield found


@dataclass(frozen=True)
class Sequences:
    """Random rows for a model, all of them at once where it is trained or asked."""

    batch: Batch
    train: TrainMethod
    infer: InferenceMethod
    candidates: Candidates | None = None

    def distil(self, candidates: Candidates) -> "Sequences":
        """The same rows, whose distributions are compared with a teacher's, or are the teacher's."""
        if candidates.ids is None:
            return replace(self, infer=TopTeacher(), candidates=candidates)
        places = (len(self.batch["tokens"].values), candidates.count)
        ids = torch.arange(candidates.count, dtype=torch.int32).expand(places).contiguous()
        numbers = {"teacher_ids": ids, "teacher_top_logprobs": torch.full(places, -9.0)}
        lengths = self.batch["tokens"].lengths
        batch = self.batch.with_fields(**{name: Ragged(of, lengths) for name, of in numbers.items()})
        config = OfflineDistillationConfig(divergence="jsd")
        return Sequences(batch, DivergenceTrain(config), DivergenceInference(config), candidates)

    @classmethod
    def of(cls, lengths: tuple[int, ...], model: StoredModel, samples: int = 1) -> "Sequences":
        """Rows of these lengths, each `samples` times; for a scalar head, two after each other are a pair."""
        generator = torch.Generator().manual_seed(1)
        rows = Ragged.of(
            [torch.randint(4, model.shape.vocab_size, (n,), generator=generator) for n in lengths]
        )
        rows = rows.select([i // samples for i in range(len(rows) * samples)])
        if model.head == "lm":
            masks = Ragged.of([(torch.arange(n) > 0).long() for n in rows.lengths])
            batch = Batch(tuple(range(len(rows))), {"tokens": rows, "loss_mask": masks})
            return cls(batch, SFTMethod(), SFTMethod())
        pairs = {"chosen": range(0, len(rows), 2), "rejected": range(1, len(rows), 2)}
        fields = {name: rows.select(which) for name, which in pairs.items()}
        fields["pairs_of_prompt"] = Ragged.scalars(torch.ones(len(rows) // 2, dtype=torch.int64))
        return cls(Batch(tuple(range(len(rows) // 2)), fields), PairMethod(), PairMethod())


class LoneRank:
    """A rank that holds its shard of a model, and counts what it allocates besides."""

    def __init__(
        self, model: StoredModel, placement: Placement, rank: int, device: torch.device = CPU
    ) -> None:
        self.placement = placement
        strategy, folded = placement.strategy, placement.for_experts()
        tensor = _group(strategy.tp, placement.index(rank, "tp"))
        pipeline = _group(strategy.pp, placement.stage(rank))
        self.model = Model(
            build_layout(model.shape, model.head, placement),
            rank,
            ParallelGroups.of_single_rank(
                data=_group(strategy.dp, placement.item_index(rank)),
                context=_group(strategy.cp, placement.index(rank, "cp")),
                copies=_group(strategy.copies, placement.copy_index(rank)),
                tensor=tensor,
                experts=_group(strategy.ep, folded.index(rank, "ep")),
                expert_copies=_group(folded.strategy.copies, folded.copy_index(rank)),
                pipeline=pipeline,
                reverse_pipeline=pipeline,
                embedding=pipeline if strategy.pp > 1 else None,
            ),
            dtype=find_torch_dtype(model.dtype),
            device=device,
            part=model.part,
            products=Products(bfloat16=model.dtype == "mixed", packed=True),
        )
        regions = {local.region.tensor: local.region for local in self.model.layout.tensors(rank)}
        specs = [spec for spec in self.model.layout.specs if spec.name in regions]
        if device == CPU:
            initialise(self.model.parameters, specs, model.shape, 1, regions)
        self.trainer = Trainer(self.model, OptimizerConfig())

    def peak(self, run: Callable[[], object]) -> int:
        """Most bytes that `run` allocates and has not given back."""
        with nobody_else(), count_allocations() as found:
            run()
        assert found.peak is not None
        return found.peak

    def train(self, sequences: Sequences, *, updates: bool = False) -> None:
        """A step on everything, but for the update unless asked for."""
        strategy = self.placement.strategy

        def forget(optimizer: ShardedAdamW, lr: float, **_: object) -> float:
            optimizer.discard()
            return 0.0

        with pytest.MonkeyPatch.context() as patch:
            if not updates:
                patch.setattr(ShardedAdamW, "step", forget)
            self.trainer.train(
                sequences.batch,
                sequences.train,
                [list(range(len(sequences.batch)))],
                TrainOptions(
                    max_tokens=strategy.micro_batch_tokens,
                    recompute=strategy.recompute,
                    zero_bubble=strategy.zero_bubble,
                    candidates=sequences.candidates,
                ),
                lr=0.0,
            )

    def infer(self, sequences: Sequences) -> None:
        """An inference call."""
        self.model.infer(
            sequences.batch,
            sequences.infer,
            self.placement.strategy.micro_batch_tokens,
            candidates=sequences.candidates,
        )

    def generate(self, sequences: Sequences, new_tokens: int, samples: int = 1) -> None:
        """Continuations of all sequences, of which `samples` after each other are equal."""
        generate(
            self.model,
            sequences.batch,
            "tokens",
            sampling=GenerationConfig(max_new_tokens=new_tokens),
            stop_token_ids=(3,),
            seed=SamplingSeed(1, 1),
            kv_capacity=self.placement.strategy.micro_batch_tokens,
            samples=samples,
        )


def _group(size: int, index: int) -> Group:
    """A group whose other members never come."""
    return Group(tuple(range(size)), index, object() if size > 1 else None)  # type: ignore[arg-type]
