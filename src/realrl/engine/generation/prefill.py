"""Prefill passes: packed tokens, where their keys and values are stored, and which keys they see."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realrl.data.batch import copy_to_device
from realrl.engine.generation.scheduler import SCRATCH, RowPrefill
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.model.packing import Packing, Prefill
from realrl.model.paged_attention import CachePlaces, KeyRuns


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """Forward pass over T tokens of sequences that are about to be continued."""

    tokens: Tensor
    """[T] int64"""
    prefill: Prefill

    @classmethod
    def of(cls, prefills: Sequence[RowPrefill], device: torch.device, *, run_rows: int) -> "PrefillPass":
        """Pack the tokens of `prefills`. In parts of sequences, up to `run_rows` neighbouring tokens read keys
        together."""
        whole = [prefill for prefill in prefills if not prefill.first]
        parts = [prefill for prefill in prefills if prefill.first]
        ordered = whole + parts
        positions = np.concatenate([np.arange(prefill.first, prefill.length) for prefill in ordered])
        places = np.concatenate([_find_places(prefill) for prefill in ordered])
        blocks, offsets = np.divmod(places, BLOCK_TOKENS)
        host = [torch.cat([_read_tokens(prefill) for prefill in ordered])]
        host += [torch.from_numpy(of) for of in (positions, blocks, offsets)]
        tokens, positions_there, blocks_there, offsets_there = copy_to_device(host, device)
        return cls(
            tokens,
            Prefill(
                positions_there,
                CachePlaces(blocks_there, offsets_there),
                Packing.of([prefill.length for prefill in whole], device) if whole else None,
                _find_runs(parts, run_rows, device) if parts else None,
            ),
        )


def _read_tokens(prefill: RowPrefill) -> Tensor:
    """Read the tokens that are prefilled. [length - first]"""
    parts = [as_tensor(tokens, torch.int64) for tokens in (prefill.row.prompt.tokens, prefill.row.tokens)]
    return torch.cat(parts)[prefill.first : prefill.length]


def _find_places(prefill: RowPrefill) -> np.ndarray:
    """Find the cache places (block * BLOCK_TOKENS + offset) of the tokens that are prefilled. [length - first]
    int64"""
    row = prefill.row
    shared = row.prompt.length - 1
    prompt, own = list_places(row.prompt.blocks), list_places(row.blocks)
    return np.concatenate([prompt[:shared], own[: prefill.length - shared]])[prefill.first :]


def _find_runs(parts: Sequence[RowPrefill], run_rows: int, device: torch.device) -> KeyRuns:
    """Find the keys that the tokens of parts see. A run has neighbouring tokens of one part."""
    prompts = [part.row.prompt for part in parts]
    # The prompt is in the cache as a whole, so each of the tokens is behind it.
    assert all(part.first >= part.row.prompt.length - 1 for part in parts), "a part begins behind its prompt"
    tokens = [part.tokens for part in parts]
    numbers = np.arange(len(parts)).repeat(tokens)
    shared = np.array([prompt.length - 1 for prompt in prompts])[numbers]
    seen = np.concatenate([np.arange(part.first, part.length) for part in parts]) + 1
    within = np.concatenate([np.arange(count) for count in tokens])
    starts = np.flatnonzero(within % run_rows == 0)
    tables = [_as_table([prompt.blocks for prompt in prompts])[numbers[starts]]]
    tables += [_as_table([part.row.blocks for part in parts])]
    rows = [shared, numbers, seen - shared, np.append(starts, len(numbers))]
    shared_tables, own_tables, shared_lengths, own_numbers, own_lengths, run_starts = copy_to_device(
        [torch.from_numpy(of) for of in (*tables, *rows)], device
    )
    return KeyRuns(
        shared_tables=shared_tables,
        shared_lengths=shared_lengths,
        own_tables=own_tables,
        own_numbers=own_numbers,
        own_lengths=own_lengths,
        starts=run_starts,
        most=run_rows,
        longest=max(part.length for part in parts),
    )


def _as_table(blocks: Sequence[Sequence[int]]) -> np.ndarray:
    """Write lists of blocks as the rows of a table. [N, most blocks] int64"""
    table = np.full((len(blocks), max(1, *map(len, blocks))), SCRATCH, dtype=np.int64)
    for row, listed in zip(table, blocks, strict=True):
        row[: len(listed)] = listed
    return table


def list_places(blocks: Sequence[int]) -> np.ndarray:
    """List the cache places (block * BLOCK_TOKENS + offset) in a list of blocks. [BLOCK_TOKENS * blocks] int64"""
    return (np.asarray(blocks, dtype=np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def as_tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """View the numbers of an array as a tensor. [N]"""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
