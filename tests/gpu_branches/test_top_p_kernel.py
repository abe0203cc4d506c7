"""Top-p on a GPU: the kernel in Triton's interpreter, and the memory that sampling takes."""

import pytest
import torch
from torch import Tensor

from realrl.engine.generation.sampler import choose_tokens_on_gpu
from realrl.model.gpu.nucleus import keep_top_p_on_gpu
from tests.allocations import count_allocated


def restrict_by_sorting(probabilities: Tensor, share: float) -> Tensor:
    """The definition of top-p: in descending order, equal ones by their place."""
    ordered, order = probabilities.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    dropped = before >= share * ordered.sum(-1, keepdim=True)
    return probabilities.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("width", [1, 5, 1024, 3001])
def test_the_kernel_keeps_what_sorting_keeps(width: int, share: float) -> None:
    generator = torch.Generator().manual_seed(width)
    probabilities = (3 * torch.randn(4, width, generator=generator)).softmax(-1)
    kept = keep_top_p_on_gpu(probabilities, share)
    assert torch.equal(kept, restrict_by_sorting(probabilities, share))


def test_of_equal_probabilities_the_kernel_keeps_the_first() -> None:
    probabilities = torch.full((3, 2048), 2.0**-11)
    probabilities[1, ::2] = 0.0
    probabilities[2, 7:2000:3] *= 2
    for share in (0.125, 0.25, 0.75):
        kept = keep_top_p_on_gpu(probabilities, share)
        assert torch.equal(kept, restrict_by_sorting(probabilities, share)), share
    assert int((keep_top_p_on_gpu(probabilities, 0.25)[0] > 0).sum()) == 512


def test_tokens_without_probability_are_never_kept() -> None:
    logits = torch.full((2, 1500), -torch.inf)
    logits[0, [3, 1400]] = torch.tensor([1.0, 2.0])
    logits[1, 1499] = 0.0
    kept = keep_top_p_on_gpu(logits.softmax(-1), 0.95)
    assert kept.nonzero().tolist() == [[0, 3], [0, 1400], [1, 1499]]
    empty = torch.zeros(2, 1500)
    assert torch.equal(keep_top_p_on_gpu(empty, 0.9), empty)


def test_a_row_is_restricted_the_same_in_every_batch() -> None:
    probabilities = torch.randn(5, 2000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    together = keep_top_p_on_gpu(probabilities, 0.8)
    for row in range(5):
        assert torch.equal(keep_top_p_on_gpu(probabilities[row : row + 1].clone(), 0.8)[0], together[row])


@pytest.mark.parametrize(("width", "most"), [(128 * 300, 0.5), (128 * 300 - 1, 4.5)])
def test_a_choice_of_tokens_makes_no_copy_in_float64(width: int, most: float) -> None:
    """Bytes per probability: a copy to float64 would take 8, and padding to whole blocks takes 4."""
    probabilities, noise = torch.rand(8, width), torch.rand(8, dtype=torch.float64)
    assert count_allocated(lambda: choose_tokens_on_gpu(probabilities, noise)) < most * probabilities.numel()
