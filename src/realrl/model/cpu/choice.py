"""Choice of tokens by their probabilities, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from realrl.model.cpu.rows import Work, as_float64, claim, int_row, row, row_kernel
from realrl.model.cpu.vectors import LANES, add, add_halves, load_vector

_BLOCK = 8 * LANES
"""Number of neighbouring tokens in a block. Probabilities are summed within blocks first; cumulative sums run over
blocks."""


@row_kernel(outputs=1, strict=True)
def _choose(work: Work) -> None:
    """Choose a token per row: probabilities [B, V], noise [B, 1] (float64, passed as int64 bits) -> tokens [B, 1]
    int64."""
    first, last = claim(work)
    while first < last:
        for i in range(first, last):
            probabilities = row(work, 0, i)
            vocabulary = len(probabilities)
            whole = vocabulary // _BLOCK
            until = np.empty(whole + 1, np.float64)
            total = 0.0
            for block in range(whole):
                part = load_vector(probabilities, block * _BLOCK)
                for at in range(LANES, _BLOCK, LANES):
                    part = add(part, load_vector(probabilities, block * _BLOCK + at))
                total += np.float64(add_halves(part))
                until[block] = total
            for token in range(whole * _BLOCK, vocabulary):
                total += np.float64(probabilities[token])
            until[whole] = total
            threshold = as_float64(int_row(work, 1, i)[0]) * total
            block = 0
            while block < whole and not until[block] > threshold:
                block += 1
            reached = until[block - 1] if block else 0.0
            chosen = -1
            for token in range(block * _BLOCK, min((block + 1) * _BLOCK, vocabulary)):
                if probabilities[token] > 0.0:
                    chosen = token
                    reached += np.float64(probabilities[token])
                    if reached > threshold:
                        break
            if chosen < 0:  # rounding has led past the last positive probability
                chosen = vocabulary - 1
                while chosen > 0 and not probabilities[chosen] > 0.0:
                    chosen -= 1
            int_row(work, 2, i)[0] = chosen
        first, last = claim(work)


def choose_tokens_on_cpu(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Compute `sampler.choose_tokens`. probabilities: [B, V] float32, noise: [B] float64 -> [B] int64"""
    tokens = torch.empty(len(noise), 1, dtype=torch.int64)
    _choose(len(noise), probabilities, noise.contiguous().view(torch.int64).unsqueeze(-1), tokens)
    return tokens.squeeze(-1)
