"""Our decoder computes what transformers computes."""

from collections.abc import Callable

import pytest
import torch
from small_models import find_theirs, pack, padded, random_rows, read_whole

from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.layout.shard import Shard
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing
from realrl.model.transformer import Transformer

LENGTHS = [5, 30, 12, 1, 140, 9, 30]
"""More than one bucket, a lone token, and one sequence long enough for the flash kernel."""


def test_logits_of_a_packed_batch_equal_those_of_each_sequence_in_transformers(
    shape: ModelShape, twins: Callable
) -> None:
    ours, _, theirs = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, LENGTHS)
    tokens, lengths = pack(rows)
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu")))
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("lengths", [[8, 8, 8], [16], [3, 3]], ids=str)
def test_logits_of_batches_of_equal_lengths_equal_those_of_transformers(
    lengths: list[int], shape: ModelShape, twins: Callable
) -> None:
    ours, _, theirs = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, lengths)
    tokens, _ = pack(rows)
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu")))
        expected = theirs(torch.stack(rows)).logits.flatten(0, 1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_scalar_head_at_the_last_token_is_the_score_of_the_sequence_classifier(
    shape: ModelShape, twins: Callable
) -> None:
    if shape.family in ("granite", "llama4_text", "glm4_moe"):
        pytest.skip("transformers has no such class")
    ours, _, theirs = twins(shape, "scalar")
    rows = random_rows(shape.vocab_size, LENGTHS)
    tokens, lengths = pack(rows)
    ids, mask = padded(rows)
    with torch.no_grad():
        packing = Packing.of(lengths, "cpu")
        values = ours.compute_values(ours(tokens, packing), packing)
        expected = theirs(ids, attention_mask=mask).logits.squeeze(-1)
    last = torch.tensor(lengths).cumsum(0) - 1
    torch.testing.assert_close(values[last], expected, atol=1e-4, rtol=0)


def test_gradients_equal_those_of_transformers(shape: ModelShape, twins: Callable) -> None:
    ours, _, theirs = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, LENGTHS)
    tokens, lengths = pack(rows)
    packing = Packing.of(lengths, "cpu")
    logprobs, *_ = ours.compute_logprobs(ours(tokens, packing), tokens, packing, temperature=1.0)
    loss = -logprobs.sum() / len(tokens)
    loss.backward()
    expected = torch.zeros(())
    for row in rows:
        chosen = theirs(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])
        expected = expected - chosen.sum() / len(tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    specs = {spec.name: spec for spec in model_tensors(shape, "lm")}
    for name, parameter in ours.named_parameters():
        parts = [specs[source] for source in ours.sources[name]]
        if parts[0].parameter == "router_correction":  # transformers has a buffer, which no gradient changes
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
            continue
        wanted = torch.cat([read_whole(find_theirs(reference, p.file_name), p) for p in parts])
        scale = wanted.abs().max().item()
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-4 * scale, rtol=1e-4, msg=name)


def test_a_sequence_is_not_changed_by_its_neighbours(shape: ModelShape, twins: Callable) -> None:
    ours, _, _ = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, [7, 20, 13])
    tokens, lengths = pack(rows)
    with torch.no_grad():
        together = ours(tokens, Packing.of(lengths, "cpu")).split(lengths)
        for row, hidden in zip(rows, together, strict=True):
            alone = ours(row, Packing.of([len(row)], "cpu"))
            torch.testing.assert_close(hidden, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_kernel_of_the_gpu_agrees_with_the_cpu(shape: ModelShape, twins: Callable) -> None:
    ours, buffer, _ = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, LENGTHS)
    tokens, lengths = pack(rows)
    expected = ours.compute_logits(ours(tokens, Packing.of(lengths, "cpu"))).log_softmax(-1)
    on_gpu = Transformer(
        Shard(shape, "lm"), lambda *names: buffer.fused(*names).bfloat16().cuda(), make_single_rank_group()
    )
    hidden = on_gpu(tokens.cuda(), Packing.of(lengths, "cuda"))
    logprobs = on_gpu.compute_logits(hidden).log_softmax(-1).cpu()
    assert (logprobs.exp() - expected.exp()).abs().mean() < 1e-2
    hidden.sum().backward()
    assert all(
        parameter.grad.isfinite().all() for name, parameter in on_gpu.named_parameters() if name != "lm_head"
    )
