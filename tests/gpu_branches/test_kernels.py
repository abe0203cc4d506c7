"""Kernels of GPUs, run by Triton's interpreter, against what a CPU computes in float32."""

import importlib.util
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from realrl.families.shape import SWIGLU
from realrl.model import logprobs, rotary
from realrl.model.arithmetic import elementwise
from realrl.model.arithmetic.ops import PLAIN
from realrl.model.group import Group, make_single_rank_group

if importlib.util.find_spec("triton") is None:
    assert sys.platform != "linux", "the development requirements bring Triton"
    pytest.skip("Triton is not for this platform", allow_module_level=True)

from realrl.model.gpu.elementwise import Activate, AddRMSNorm, RMSNorm, RotateHeads, SwiGLU
from realrl.model.gpu.logits import bound_logits, compute_logit_sums, compute_softmax_gradient
from realrl.model.gpu_logprobs import TokenLogprobs
from realrl.model.logprobs import LogprobOptions

# The interpreter computes both sides of a `where`, of which kernels use one.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(
    ours: Callable[..., object],
    reference: Callable[..., object],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Values, and gradients by upstream gradients of every output, against float32 of the same inputs."""
    narrow = [x.to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    got, expected = ours(*narrow), reference(*wide)
    got = got if isinstance(got, tuple) else (got,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    upstream = [draw(*y.shape, seed=5).to(dtype) for y in got]
    torch.autograd.backward(got, upstream)
    torch.autograd.backward(expected, [g.float() for g in upstream])
    for place, (a, b) in enumerate(
        [*zip(got, expected, strict=True), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    ):
        scale = b.abs().max().item()
        tolerance = (1e-5 if dtype == torch.float32 else 2**-7) * max(1.0, scale)
        torch.testing.assert_close(a.float(), b, rtol=0, atol=tolerance, msg=lambda m, p=place: f"{p}: {m}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 64), (3, 1500), (300, 5)])
def test_rms_norm_matches_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    compare(
        lambda x, w: RMSNorm.apply(x, w, EPS),
        lambda x, w: elementwise.rms_norm(x, w, EPS),
        [draw(*shape), draw(shape[1], seed=1)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_read_them_where_they_lie_among_others(dtype: torch.dtype) -> None:
    def heads(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda qkv, w: norm(qkv.view(9, 5, 12)[:, 1:4], w)

    compare(
        heads(lambda x, w: RMSNorm.apply(x, w, EPS)),
        heads(lambda x, w: elementwise.rms_norm(x, w, EPS)),
        [draw(9, 60), draw(12, seed=1)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (300, 33)])
def test_addition_and_norm_match_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    compare(
        lambda x, d, w: AddRMSNorm.apply(x, d, w, EPS),
        lambda x, d, w: elementwise.add_rms_norm(x, d, w, EPS),
        [draw(*shape), draw(*shape, seed=2), draw(shape[1], seed=1)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (2, 2 * 1030)])
@pytest.mark.parametrize("numbers", SWIGLU.values())
def test_swiglu_matches_the_cpu(
    numbers: tuple[float, float, float], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    compare(
        lambda x: SwiGLU.apply(x, numbers),
        lambda x: elementwise.swiglu(x, numbers),
        [draw(*shape) * 6],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_match_the_cpu(activation: str, gated: bool, dtype: torch.dtype) -> None:
    compare(
        lambda x: Activate.apply(x, activation, gated),
        lambda x: elementwise.activate(x, activation, gated=gated),
        [draw(33, 14)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rotated", "dim"), [(3, 2, 4), (5, 5, 12), (40, 33, 128)])
def test_rotation_matches_the_cpu(heads: int, rotated: int, dim: int, dtype: torch.dtype) -> None:
    frequencies = 0.5 ** torch.arange(dim // 2)
    cos, sin = rotary.Rotation(frequencies, None).tables(torch.arange(6) * 3)
    # Rotation works in place, which a leaf that needs a gradient does not allow.
    compare(
        lambda x: RotateHeads.apply(x * 1, cos, sin, rotated),
        lambda x: rotary.apply_rotary_emb(x * 1, cos, sin, rotated),
        [draw(6, heads * dim)],
        dtype,
    )


@pytest.mark.parametrize("columns", [1, 100, 9000])
def test_sums_over_logits_match_torch(columns: int) -> None:
    logits, scale = draw(3, columns) * 30, 0.7
    log_sum, mean = torch.empty(3), torch.empty(3)
    compute_logit_sums(logits, scale, log_sum, mean)
    torch.testing.assert_close(log_sum, (logits * scale).logsumexp(1))
    weights = (logits * scale).softmax(1)
    torch.testing.assert_close(mean, (weights * logits * scale).sum(1))
    factor, gradient = draw(3, seed=3), torch.empty_like(logits)
    compute_softmax_gradient(logits, log_sum, factor, scale, 0.0, gradient)
    torch.testing.assert_close(gradient, -factor[:, None] * weights)


@pytest.mark.parametrize("columns", [1, 100, 9000])
def test_bounded_logits_and_their_gradient_match_torch(columns: int) -> None:
    logits, log_sum, scale, cap = draw(3, columns) * 30, torch.empty(3), 0.7, 5.0
    bounded, wide = logits.clone(), logits.double().requires_grad_()
    bound_logits(bounded, cap)
    expected = cap * torch.tanh(wide / cap)
    torch.testing.assert_close(bounded.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    compute_logit_sums(bounded, scale, log_sum, None)
    factor, gradient = draw(3, seed=3), torch.empty_like(logits)
    compute_softmax_gradient(bounded, log_sum, factor, scale, cap, gradient)
    (-(expected * scale).logsumexp(1) * factor / scale).sum().backward()
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_logits_that_are_not_finite_show_in_their_sum() -> None:
    logits, log_sum = draw(4, 50), torch.empty(4)
    logits[0, 3], logits[1, 7], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    compute_logit_sums(logits, 1.0, log_sum, None)
    assert log_sum.isfinite().tolist() == [False, False, True, True]
    torch.testing.assert_close(log_sum[2:], logits[2:].logsumexp(1))


@pytest.mark.parametrize(
    ("m", "temperature", "with_bias"), [(1, 1.0, False), (1, 0.7, True), (3, 0.7, False)]
)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("size", [7, 100])
def test_log_probabilities_and_gradients_match_the_cpu(
    size: int,
    cap: float | None,
    m: int,
    temperature: float,
    with_bias: bool,
    cuda_rules: None,
) -> None:
    targets, factor = (
        torch.randint(31, (20, m), generator=torch.Generator().manual_seed(1)),
        draw(20, m, seed=2),
    )
    results = []
    on_cpu = ((logprobs._TokenLogprobs, keeps) for keeps in ((False, True) if cap is None else (False,)))
    for function, *keeps in ((TokenLogprobs,), *on_cpu):
        hidden, table = draw(20, 8).requires_grad_(), draw(34, 8, seed=1).requires_grad_()
        bias = draw(34, seed=3).requires_grad_() if with_bias else None
        group = make_single_rank_group()
        options = LogprobOptions(temperature, True, group, 31, PLAIN, size, cap)
        chosen, entropy = function.apply(hidden, table, bias, targets, options, *keeps)
        (chosen * factor).sum().backward()
        grads = [hidden.grad, table.grad, *([] if bias is None else [bias.grad])]
        results.append([chosen, entropy, *grads])
    for on_cpu_too in results[1:]:
        torch.testing.assert_close(results[0], on_cpu_too)


def test_gradients_of_likely_tokens_keep_their_precision_in_bfloat16(cuda_rules: None) -> None:
    """The gradient at a target of probability 0.999 is a thousandth, and no difference of rounded numbers."""
    table = torch.eye(4, 8) * 8
    hidden = (torch.eye(4, 8)[:1] * 1.1).bfloat16().requires_grad_()
    frozen = table.bfloat16()
    options = LogprobOptions(1.0, False, make_single_rank_group(), 4, PLAIN, 10, None)
    chosen, _ = TokenLogprobs.apply(hidden, frozen, None, torch.zeros(1, 1, dtype=torch.int64), options)
    chosen.sum().backward()
    probability = (hidden.detach().float() @ table.T).softmax(1)
    expected = (torch.tensor([[1.0, 0, 0, 0]]) - probability) @ table
    torch.testing.assert_close(hidden.grad.float(), expected, rtol=2**-7, atol=0)


class ReplayedGroup(Group):
    """A rank of a group whose others are computed at other times: results so far, then what this rank gives."""

    results: list[Tensor]
    given: list[Tensor]

    def sum(self, tensor: Tensor) -> Tensor:
        return self._replay(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        return self._replay(tensor)

    def _replay(self, tensor: Tensor) -> Tensor:
        self.given.append(tensor.clone())
        place = len(self.given) - 1
        return tensor.copy_(self.results[place]) if place < len(self.results) else tensor


@pytest.mark.parametrize("cap", [None, 2.0])
def test_tensor_parallel_ranks_have_the_log_probabilities_of_one(cap: float | None, cuda_rules: None) -> None:
    """Of three ranks the last has no rows."""
    targets, factor = (
        torch.randint(31, (20, 1), generator=torch.Generator().manual_seed(1)),
        draw(20, 1, seed=2),
    )
    hidden, table = draw(20, 8).requires_grad_(), draw(31, 8, seed=1).requires_grad_()
    single = make_single_rank_group()
    options = LogprobOptions(0.7, True, single, 31, PLAIN, 7, cap)
    expected = TokenLogprobs.apply(hidden, table, None, targets, options)
    (expected[0] * factor).sum().backward()
    results: list[Tensor] = []

    def run(rank: int, rows: range) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        group, given = ReplayedGroup((0, 1, 2), rank), []
        object.__setattr__(group, "results", results)
        object.__setattr__(group, "given", given)
        states, local = hidden.detach().clone().requires_grad_(), torch.zeros(16, 8)
        local[: len(rows)] = table.detach()[rows.start : rows.stop]
        local.requires_grad_()
        shifted = targets - rows.start
        options = LogprobOptions(0.7, True, group, len(rows), PLAIN, 7, cap)
        chosen, entropy = TokenLogprobs.apply(states, local, None, shifted, options)
        (chosen * factor).sum().backward()
        return given, (chosen, entropy, states.grad, local.grad[: len(rows)])

    # The maximum of sums, their total, the means, and the chosen logits: each needs those before it.
    for combine in (lambda x: x.amax(0), *[lambda x: x.sum(0)] * 3, None):
        ranks = [run(i, rows) for i, rows in enumerate((range(16), range(16, 31), range(31, 31)))]
        if combine is not None:
            results.append(combine(torch.stack([given[len(results)] for given, _ in ranks])))
    for given, (chosen, entropy, *_) in ranks:
        assert len(given) == 4
        torch.testing.assert_close((chosen, entropy), expected)
    torch.testing.assert_close(sum(found[2] for _, found in ranks), hidden.grad)
    torch.testing.assert_close(torch.cat([found[3] for _, found in ranks]), table.grad)
