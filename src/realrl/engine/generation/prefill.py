"""Prefill passes: packed sequences, and the cache places of their keys and values."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.engine.generation.scheduler import RowPrefill
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.model.packing import Packing
from realrl.model.paged_attention import CachePlaces


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """Forward pass over the T tokens of sequences that are about to be continued."""

    tokens: Tensor
    """[T] int64"""
    packing: Packing
    places: CachePlaces

    @classmethod
    def of(cls, prefills: Sequence[RowPrefill], prompts: Ragged, device: torch.device) -> "PrefillPass":
        """Pack the sequences of `prefills`. `prompts` has all prompts, on the host, in the order of their
        numbers."""
        lengths = [prefill.length for prefill in prefills]
        tokens = torch.cat([_read_tokens(prefill, prompts) for prefill in prefills])
        places = np.concatenate([_find_places(prefill) for prefill in prefills])
        source = None
        if any(prefill.first for prefill in prefills):
            starts = np.cumsum([0, *lengths])
            source = torch.from_numpy(
                np.concatenate([starts[i] + np.arange(p.first, p.length) for i, p in enumerate(prefills)])
            ).to(device)
        blocks, offsets = (torch.from_numpy(part).to(device) for part in np.divmod(places, BLOCK_TOKENS))
        return cls(tokens.to(device), Packing.of(lengths, device), CachePlaces(source, blocks, offsets))


def _read_tokens(prefill: RowPrefill, prompts: Ragged) -> Tensor:
    """Read a sequence that is prefilled: its prompt and the tokens generated so far, without the newest token."""
    row = prefill.row
    prompt = prompts.row(row.prompt.number)
    return torch.cat([prompt, as_tensor(row.tokens, torch.int64)])[: prefill.length]


def _find_places(prefill: RowPrefill) -> np.ndarray:
    """Find the cache places (block * BLOCK_TOKENS + offset) of the tokens that are stored. [length - first]
    int64"""
    row = prefill.row
    shared = row.prompt.length - 1
    prompt, own = list_places(row.prompt.blocks), list_places(row.blocks)
    return np.concatenate([prompt[:shared], own[: prefill.length - shared]])[prefill.first :]


def list_places(blocks: Sequence[int]) -> np.ndarray:
    """List the cache places (block * BLOCK_TOKENS + offset) in a list of blocks. [BLOCK_TOKENS * blocks] int64"""
    return (np.asarray(blocks, dtype=np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def as_tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """View the numbers of an array as a tensor. [N]"""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
