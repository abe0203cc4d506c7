"""Prefill passes: packed tokens, where their keys and values are stored, and which keys they see."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realrl.data.batch import copy_to_device
from realrl.engine.generation.scheduler import SCRATCH, RowPrefill
from realrl.layout import limits
from realrl.layout.kv_blocks import CachePart
from realrl.model.group import Group
from realrl.model.packing import Packing, count_own_tokens
from realrl.model.paged_attention import CachePlaces, KeyRuns
from realrl.model.prefill import EvenShare, Prefill


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """Forward pass over T tokens of sequences that are about to be continued."""

    tokens: Tensor
    """Tokens that this rank computes. [n] int64"""
    prefill: Prefill

    @classmethod
    def of(
        cls, prefills: Sequence[RowPrefill], device: torch.device, *, run_rows: int, group: Group
    ) -> "PrefillPass":
        """Pack the tokens of `prefills`. In parts of sequences, up to `run_rows` neighbouring tokens read keys
        together. The ranks of `group` divide the cache and the tokens."""
        whole = [prefill for prefill in prefills if not prefill.first]
        parts = [prefill for prefill in prefills if prefill.first]
        ordered, part = whole + parts, CachePart(group.size, group.index)
        packing = Packing.of([prefill.length for prefill in whole], device, group=group) if whole else None
        positions = np.concatenate([np.arange(prefill.first, prefill.length) for prefill in ordered])
        places = np.concatenate([_find_places(prefill, part.block_tokens) for prefill in ordered])
        blocks, offsets = np.divmod(places, part.block_tokens)
        arrays = [positions, blocks, offsets]
        if part.ranks > 1:
            own = np.flatnonzero(offsets % part.ranks == part.index)
            arrays += [own, blocks[own], offsets[own] // part.ranks]
        host = [torch.cat([_read_tokens(prefill) for prefill in ordered]), *map(torch.from_numpy, arrays)]
        tokens, positions_there, blocks_there, offsets_there, *stored = copy_to_device(host, device)
        share = EvenShare(sum(prefill.tokens for prefill in parts), group)

        def select(values: Tensor) -> Tensor:
            """Select the values of the tokens that this rank computes."""
            of_whole, of_parts = values.split([len(values) - share.tokens, share.tokens])
            own = share.select(of_parts)
            return own if packing is None else torch.cat((packing.select(of_whole), own))

        if part.ranks > 1:
            tokens, positions_there = select(tokens), select(positions_there)
        return cls(
            tokens,
            Prefill(
                positions_there,
                CachePlaces(blocks_there, offsets_there),
                packing,
                _find_runs(parts, run_rows, device, part) if parts else [],
                share,
                (stored[0], CachePlaces(*stored[1:])) if stored else None,
            ),
        )


def count_computed_tokens(prefills: Sequence[RowPrefill], ranks: int) -> int:
    """Count the tokens that each of `ranks` ranks computes in a pass; see `Prefill`."""
    whole = sum(prefill.tokens for prefill in prefills if not prefill.first)
    parts = sum(prefill.tokens for prefill in prefills if prefill.first)
    return count_own_tokens(whole, ranks) + -(-parts // ranks)


def _read_tokens(prefill: RowPrefill) -> Tensor:
    """Read the tokens that are prefilled. [length - first]"""
    parts = [as_tensor(tokens, torch.int64) for tokens in (prefill.row.prompt.tokens, prefill.row.tokens)]
    return torch.cat(parts)[prefill.first : prefill.length]


def _find_places(prefill: RowPrefill, block_tokens: int) -> np.ndarray:
    """Find the cache places (block * block_tokens + offset) of the tokens that are prefilled. [length - first]
    int64"""
    row = prefill.row
    shared = row.prompt.length - 1
    prompt, own = list_places(row.prompt.blocks, block_tokens), list_places(row.blocks, block_tokens)
    return np.concatenate([prompt[:shared], own[: prefill.length - shared]])[prefill.first :]


def _find_runs(
    parts: Sequence[RowPrefill], run_rows: int, device: torch.device, part_of_cache: CachePart
) -> list[KeyRuns]:
    """Find the keys that the tokens of parts see. A run has neighbouring tokens of one part. If ranks divide the
    cache, the runs are divided into groups of at most `MERGED_ROWS` / ranks tokens."""
    prompts = [part.row.prompt for part in parts]
    # The prompt is in the cache as a whole, so each of the tokens is behind it.
    assert all(part.first >= part.row.prompt.length - 1 for part in parts), "a part begins behind its prompt"
    tokens = [part.tokens for part in parts]
    numbers = np.arange(len(parts)).repeat(tokens)
    shared = np.array([prompt.length - 1 for prompt in prompts])[numbers]
    seen = np.concatenate([np.arange(part.first, part.length) for part in parts]) + 1
    within = np.concatenate([np.arange(count) for count in tokens])
    prompt_tables = _as_table([prompt.blocks for prompt in prompts])
    own_tables = _as_table([part.row.blocks for part in parts])
    most = len(numbers) if part_of_cache.ranks == 1 else -(-limits.MERGED_ROWS // part_of_cache.ranks)
    found = []
    for first in range(0, len(numbers), most):
        rows = slice(first, first + most)
        begins = within[rows] % run_rows == 0
        begins[0] = True
        starts = np.flatnonzero(begins)
        tables = [prompt_tables[numbers[rows][starts]], own_tables]
        of_rows = [shared[rows], numbers[rows], (seen - shared)[rows], np.append(starts, len(begins))]
        shared_tables, own_tables_there, *there = copy_to_device(
            [torch.from_numpy(of) for of in (*tables, *of_rows)], device
        )
        found.append(
            KeyRuns(
                shared_tables=shared_tables,
                shared_lengths=there[0],
                own_tables=own_tables_there,
                own_numbers=there[1],
                own_lengths=there[2],
                starts=there[3],
                most=run_rows,
                longest=int(seen[rows].max()),
                part=part_of_cache,
            )
        )
    return found


def _as_table(blocks: Sequence[Sequence[int]]) -> np.ndarray:
    """Write lists of blocks as the rows of a table. [N, most blocks] int64"""
    table = np.full((len(blocks), max(1, *map(len, blocks))), SCRATCH, dtype=np.int64)
    for row, listed in zip(table, blocks, strict=True):
        row[: len(listed)] = listed
    return table


def list_places(blocks: Sequence[int], block_tokens: int) -> np.ndarray:
    """List the cache places (block * block_tokens + offset) in a list of blocks. [block_tokens * blocks] int64"""
    return (np.asarray(blocks, dtype=np.int64)[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)


def as_tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """View the numbers of an array as a tensor. [N]"""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
