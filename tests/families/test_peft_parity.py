"""Low-rank adapters compute, and learn, what those of PEFT do."""

import re
from collections.abc import Iterable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer
from realrl.engine.model import make_unsharded_model
from realrl.families.adapters import ADAPTERS, LowRank
from realrl.families.registry import model_tensors
from realrl.families.tensors import TensorSpec
from realrl.huggingface.tensor_conversion import join_tensors
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer
from tests.families.test_greedy_sampling import sample, sample_theirs
from tests.model.small_models import SHAPES, find_theirs, make_theirs, pack, random_rows, read_whole

CASES = {
    "all": ("plain", LowRank(rank=3, alpha=6.0)),
    "some, rank-stabilised": (
        "qwen3",
        LowRank(rank=5, targets=("q_proj", "v_proj", "down_proj"), rslora=True),
    ),
    "norms apart": ("qwen2", LowRank(rank=4, dora=True)),
    "norms apart, of some": ("llama3", LowRank(rank=4, targets=("v_proj", "up_proj"), dora=True)),
    "fused": ("phi3", LowRank(rank=4)),
    "fused by heads": ("gpt_neox", LowRank(rank=4)),
    "transposed": ("gpt2", LowRank(rank=4)),
    "interleaved": ("glm4", LowRank(rank=4, dora=True)),
    "dense layers of a mixture": ("qwen3_moe-dense", LowRank(rank=4, targets=("k_proj", "v_proj"))),
    "shared experts": ("glm4_moe", LowRank(rank=4, targets=("q_proj", "o_proj"))),
    "experts": (
        "qwen3_moe",
        LowRank(rank=3, targets=("v_proj", "experts.gate_up_proj", "experts.down_proj")),
    ),
    "experts alone, rank-stabilised": (
        "mixtral",
        LowRank(rank=2, targets=("experts.gate_up_proj", "experts.down_proj"), rslora=True),
    ),
    "one matrix of experts": ("glm4_moe", LowRank(rank=4, targets=("k_proj", "experts.down_proj"))),
    "the other matrix of experts": (
        "qwen3_moe-dense",
        LowRank(rank=4, targets=("q_proj", "experts.gate_up_proj")),
    ),
    "transposed experts with biases": ("gpt_oss", LowRank(rank=3, targets=("all-linear",))),
    "experts with outputs for inputs": (
        "llama4",
        LowRank(rank=3, targets=("o_proj", "experts.gate_up_proj", "experts.down_proj")),
    ),
}


def make_pair(name: str, lora: LowRank) -> tuple[FlatBuffer, tuple[TensorSpec, ...], PeftModel]:
    """The weights of our model with adapters, and the model of PEFT with the same random weights."""
    torch.manual_seed(0)
    shape = SHAPES[name].model_copy(update={"lora": lora})
    tensors = model_tensors(shape, "lm")
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    theirs = get_peft_model(make_theirs(SHAPES[name], "lm"), make_settings(tensors, lora))
    state = name_as_in_files(theirs)
    with torch.no_grad():
        for tensor in tensors:
            buffer[tensor.name].normal_(std=0.2)
        for key, values in join_tensors(tensors, buffer).items():
            find_theirs(state, key).copy_(values)
    return buffer, tensors, theirs.eval()


def make_settings(tensors: Iterable[TensorSpec], lora: LowRank) -> LoraConfig:
    adapted = [(t, t.name.split(".")[-3]) for t in tensors if t.name.endswith("lora_A.weight")]
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted({name for t, name in adapted if t.expert is None}),
        target_parameters=sorted({f"experts.{name}" for t, name in adapted if t.expert is not None}),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def name_as_in_files(theirs: PeftModel) -> dict[str, Tensor]:
    """Parameters by the names that files have for them, but for those of `RENAMED`."""
    found = {}
    for name, values in (*theirs.named_parameters(remove_duplicate=False), *theirs.named_buffers()):
        # The adapters of experts may be in a module named `base_layer`.
        name = re.sub(r"\.base_layer(?!\.lora_)", "", name.removeprefix("base_model.model."))
        name = name.replace(".default", "")
        name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        found[name] = values
    return found


def score(theirs: PeftModel, row: Tensor) -> Tensor:
    return theirs(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_peft(case: str) -> None:
    name, lora = CASES[case]
    buffer, tensors, theirs = make_pair(name, lora)
    shard = Shard(SHAPES[name].model_copy(update={"lora": lora}), "lm")
    ours = Transformer(shard, buffer.fused, make_single_rank_group())
    rows = random_rows(50, [5, 30, 12, 1])
    tokens, lengths = pack(rows)
    packing = Packing.of(lengths, "cpu")
    specs = {spec.name: spec for spec in tensors}
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(specs[ours.sources[name][0]].parameter in ADAPTERS)
    logprobs, *_ = ours.compute_logprobs(ours(tokens, packing), tokens, packing, temperature=1.0)
    expected = torch.cat([torch.cat((torch.zeros(1), score(theirs, row))) for row in rows])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    logprobs.sum().backward()
    expected.sum().backward()
    reference = name_as_in_files(theirs)
    compared = 0
    for name, parameter in ours.named_parameters():
        parts = [specs[source] for source in ours.sources[name]]
        if parts[0].parameter not in ADAPTERS:
            assert parameter.grad is None
            continue
        wanted = torch.cat([read_whole(reference[p.file_name].grad, p) for p in parts])
        scale = wanted.abs().max().item()
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-4 * scale, rtol=1e-4, msg=name)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("case", [case for case in CASES if "experts" in case])
def test_greedy_answers_are_those_of_peft(case: str) -> None:
    name, lora = CASES[case]
    buffer, tensors, theirs = make_pair(name, lora)
    shape = SHAPES[name].model_copy(update={"lora": lora})
    ours = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    for spec in tensors:
        ours.parameters[spec.name].copy_(buffer[spec.name])
    prompts = random_rows(50, [5, 17, 1, 9, 12, 3])
    expected = sample_theirs(theirs, prompts)
    assert sample(ours, prompts, ()) == expected
    with theirs.disable_adapter():
        assert sample_theirs(theirs, prompts) != expected


def test_a_rank_that_no_adapted_matrix_can_have_is_refused() -> None:
    shape = SHAPES["qwen3"]
    widest = {"q_proj": shape.heads * shape.head_dim, "k_proj": shape.kv_heads * shape.head_dim}
    for target, rows in widest.items():
        highest = min(rows, shape.hidden_size)
        for rank in (highest, highest + 1):
            adapted = shape.model_copy(update={"lora": LowRank(rank=rank, targets=(target,))})
            if rank == highest:
                assert model_tensors(adapted, "lm")
                continue
            with pytest.raises(UserError, match=f"lora.rank={rank} is above {highest}, the highest rank"):
                model_tensors(adapted, "lm")


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_embeddings_and_head_are_refused_with_the_ways_out(target: str) -> None:
    shape = SHAPES["plain"].model_copy(update={"lora": LowRank(targets=("q_proj", target))})
    with pytest.raises(UserError) as caught:
        model_tensors(shape, "lm")
    assert str(caught.value) == (
        f"lora.targets: {target} cannot have adapters; train the whole model (lora=null), or choose from"
        " q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"
    )


def test_matrices_of_experts_have_names_of_their_own() -> None:
    shape = SHAPES["mixtral"].model_copy(update={"lora": LowRank(rank=2, targets=("q_proj", "w1"))})
    with pytest.raises(UserError) as caught:
        model_tensors(shape, "lm")
    assert str(caught.value) == (
        "lora.targets: the model has no matrix w1; it has q_proj, k_proj, v_proj, o_proj, experts.gate_up_proj and"
        " experts.down_proj"
    )
    everything = LowRank.model_validate({"rank": 2, "targets": "all-linear"})
    adapted = {
        spec.parameter
        for spec in model_tensors(SHAPES["glm4_moe"].model_copy(update={"lora": everything}), "lm")
        if spec.parameter in ADAPTERS
    }
    matrices = ("qkv", "out", "gate_up", "down", "experts_gate_up", "experts_down")
    assert adapted == {f"{matrix}_lora_{factor}" for matrix in matrices for factor in "ab"}
    by_default = model_tensors(SHAPES["glm4_moe"].model_copy(update={"lora": LowRank(rank=2)}), "lm")
    assert not [spec for spec in by_default if spec.parameter in ADAPTERS and spec.expert is not None]


def test_a_rank_above_the_width_of_experts_is_refused() -> None:
    shape = SHAPES["qwen3_moe"]
    lora = LowRank(rank=shape.intermediate_size + 1, targets=("experts.down_proj",))
    with pytest.raises(UserError, match=f"is above {shape.intermediate_size}, the highest rank"):
        model_tensors(shape.model_copy(update={"lora": lora}), "lm")
