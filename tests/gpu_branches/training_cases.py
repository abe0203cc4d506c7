"""Models of every kind of layer, and mini-batches for them."""

import torch

from realrl.algorithms.base.method import TrainMethod
from realrl.algorithms.distillation import OfflineDistillationConfig
from realrl.algorithms.distillation_loss import DivergenceTrain
from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Candidates
from realrl.families.adapters import LowRank
from realrl.families.built_in.llama import LLAMA4_MIXTURE
from realrl.families.shape import Head, LayerOptions, Mixture, ModelShape

SHAPES = {
    "llama, grouped": ModelShape(
        vocab_size=61, hidden_size=32, intermediate_size=50, layers=2, heads=4, kv_heads=2, head_dim=8
    ),
    "qwen2, tied": ModelShape(
        family="qwen2", vocab_size=67, hidden_size=24, intermediate_size=40, layers=2, heads=3, kv_heads=1,
        head_dim=16, tied_embeddings=True,
    ),
    "qwen3, heads of 12": ModelShape(
        family="qwen3", vocab_size=53, hidden_size=24, intermediate_size=33, layers=2, heads=2, kv_heads=2,
        head_dim=12,
    ),
    "mistral, windows": ModelShape(
        family="mistral", vocab_size=59, hidden_size=24, intermediate_size=40, layers=2, heads=4, kv_heads=2,
        head_dim=8, window=4, windowed_layers=(0,),
    ),
    "gemma2, caps": ModelShape(
        family="gemma2", vocab_size=59, hidden_size=24, intermediate_size=40, layers=2, heads=4, kv_heads=2,
        head_dim=8, tied_embeddings=True, window=4, windowed_layers=(0,),
        layer=LayerOptions(
            norm_offset=True, norm_place="around", activation="gelu_tanh", embedding_scale="root",
            attention_cap=1.0, logit_cap=2.0,
        ),
    ),
    "qwen3, adapters": ModelShape(
        family="qwen3", vocab_size=53, hidden_size=24, intermediate_size=33, layers=2, heads=2, kv_heads=2,
        head_dim=12, lora=LowRank(rank=5, targets=("q_proj", "v_proj", "down_proj"), dora=True),
    ),
    "mixtral, adapters": ModelShape(
        family="mixtral", vocab_size=53, hidden_size=24, intermediate_size=16, layers=2, heads=2, kv_heads=2,
        # All experts: no rounding turns a choice.
        head_dim=8, mixture=Mixture(experts=3, per_token=3),
        lora=LowRank(rank=8, alpha=8.0, targets=("v_proj", "experts.gate_up_proj", "experts.down_proj")),
    ),
    "mixtral, aligned": ModelShape(
        family="mixtral", vocab_size=53, hidden_size=24, intermediate_size=16, layers=2, heads=2, kv_heads=2,
        head_dim=8, mixture=Mixture(experts=4, per_token=2),
    ),
    "qwen3_moe, a loop": ModelShape(
        family="qwen3_moe", vocab_size=53, hidden_size=24, intermediate_size=9, layers=2, heads=2, kv_heads=2,
        # All experts: no rounding turns a choice.
        head_dim=12, mixture=Mixture(experts=5, per_token=5, normalised=False),
    ),
    "llama4, shared": ModelShape(
        family="llama4_text", vocab_size=53, hidden_size=24, intermediate_size=16, layers=2, heads=4, kv_heads=2,
        head_dim=8, unrotated_layers=(1,), mixture=LLAMA4_MIXTURE.model_copy(update={"experts": 3, "per_token": 3}),
    ),
    "gpt_oss, biases": ModelShape(
        family="gpt_oss", vocab_size=53, hidden_size=24, intermediate_size=16, layers=2, heads=4, kv_heads=2,
        head_dim=8, window=4, windowed_layers=(0,), mixture=Mixture(experts=3, per_token=3),
    ),
}  # fmt: skip
SHORT = (4, 7, 2, 6)
LONG = (5, 17, 3, 140)
"""Of which one is too long for scores to be computed whole."""
CANDIDATES = 3


def make_batch(head: Head, shape: ModelShape, lengths: tuple[int, ...]) -> Batch:
    """Rows of these lengths, with what the methods of the head ask for."""
    generator = torch.Generator().manual_seed(5)

    def rows() -> Ragged:
        return Ragged.of([torch.randint(1, shape.vocab_size, (n,), generator=generator) for n in lengths])

    ids = tuple(range(len(lengths)))
    if head == "scalar":
        pairs = Ragged.scalars(torch.ones(len(lengths), dtype=torch.int64))
        return Batch(ids, {"chosen": rows(), "rejected": rows(), "pairs_of_prompt": pairs})
    tokens = rows()
    places = (len(tokens.values), shape.vocab_size)
    teacher = torch.randn(places, generator=generator).log_softmax(1).topk(CANDIDATES)
    mask = Ragged.of([(torch.arange(n) > 0).long() for n in lengths])
    fields = {"teacher_ids": teacher.indices.int(), "teacher_top_logprobs": teacher.values}
    return Batch(
        ids,
        {"tokens": tokens, "loss_mask": mask, **{k: Ragged(v, tokens.lengths) for k, v in fields.items()}},
    )


def list_methods(head: Head) -> list[tuple[TrainMethod, Candidates | None]]:
    """Train methods of a head, with their candidates."""
    if head == "scalar":
        return [(PairMethod(), None)]
    divergence = DivergenceTrain(OfflineDistillationConfig(divergence="jsd"))
    return [(SFTMethod(), None), (divergence, Candidates(CANDIDATES, "teacher_ids"))]
