"""Token log-probabilities computed in pieces are those of the whole matrix of logits."""

from collections.abc import Callable

import pytest
import torch
from small_models import SHAPES, pack, random_rows

from realrl.layout import limits
from realrl.model import logprobs
from realrl.model.group import make_single_rank_group
from realrl.model.packing import Packing


@pytest.mark.parametrize(
    ("temperature", "with_bias", "cap"),
    [(1.0, False, None), (0.7, False, 2.0), (0.7, True, None), (1.3, True, 3.0)],
)
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 100])
def test_chunked_logprobs_and_gradients_equal_the_direct_computation(
    rows_per_chunk: int,
    temperature: float,
    with_bias: bool,
    cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab = 31
    monkeypatch.setattr(limits, "CPU_LOGITS", rows_per_chunk * (vocab + 3))
    torch.manual_seed(0)
    hidden, table = torch.randn(20, 8, requires_grad=True), torch.randn(vocab + 3, 8, requires_grad=True)
    padded_bias = torch.randn(vocab + 3, requires_grad=True) if with_bias else None
    # The last rows are padding, as on a TP rank with fewer rows of the vocabulary than others.
    weight, bias = table[:vocab], None if padded_bias is None else padded_bias[:vocab]
    parameters = (hidden, table) if padded_bias is None else (hidden, table, padded_bias)
    targets, factor = torch.randint(vocab, (20, 3)), torch.randn(20, 3)  # some of them twice in a row
    chosen, entropy = logprobs.compute_token_logprobs(
        hidden,
        table,
        targets,
        bias=padded_bias,
        cap=cap,
        temperature=temperature,
        entropy=True,
        group=make_single_rank_group(),
        rows=vocab,
    )
    (chosen * factor).sum().backward()
    grads = tuple(parameter.grad for parameter in parameters)
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    whole = (logits / temperature).log_softmax(-1)
    expected = whole.gather(1, targets)
    expected_grads = torch.autograd.grad((expected * factor).sum(), parameters, retain_graph=True)
    torch.testing.assert_close(chosen, expected)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(1))
    assert not entropy.requires_grad
    torch.testing.assert_close(grads, expected_grads)

    again, tokens, best = logprobs.find_likeliest_tokens(
        hidden,
        weight,
        targets,
        count=5,
        bias=bias,
        cap=cap,
        temperature=temperature,
        group=make_single_rank_group(),
        rows=vocab,
        first=0,
    )
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close((best, tokens), tuple(whole.topk(5)))


def test_each_token_gets_the_probability_its_predecessor_gives_it(twins: Callable) -> None:
    shape = SHAPES["grouped-tied"]
    model, _, _ = twins(shape, "lm")
    rows = random_rows(shape.vocab_size, [4, 1, 9])
    tokens, lengths = pack(rows)
    packing = Packing.of(lengths, "cpu")
    hidden = model(tokens, packing)
    again, likeliest, best = model.find_likeliest(hidden, tokens, packing, count=4, temperature=1.3)
    found, entropy, others = model.compute_logprobs(
        hidden, tokens, packing, temperature=1.3, entropy=True, candidates=likeliest
    )
    assert found.dtype == torch.float32 and entropy.shape == found.shape
    torch.testing.assert_close((again, best), (found, others))
    pieces = [values.split(lengths) for values in (hidden, found, others)]
    for row, piece, logp, top in zip(rows, *pieces, strict=True):
        whole = (model.compute_logits(piece) / 1.3).log_softmax(-1)
        assert logp[0] == 0 and not top[0].any()
        torch.testing.assert_close(logp[1:], whole[:-1].gather(1, row[1:, None]).squeeze(1))
        torch.testing.assert_close(top[1:], whole[:-1].topk(4).values)
    assert entropy[0] == 0 and (entropy[1:4] > 0).all()


def test_a_batch_of_single_tokens_has_only_zeros(twins: Callable) -> None:
    model, _, _ = twins(SHAPES["plain"], "lm")
    tokens, packing = torch.tensor([3, 4]), Packing.of([1, 1], "cpu")
    found, *_ = model.compute_logprobs(model(tokens, packing), tokens, packing, temperature=1.0)
    found.sum().backward()
    assert found.tolist() == [0, 0]
