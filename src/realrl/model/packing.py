"""Packed batches: positions of sequences, and their layout for attention that needs padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from realrl.data.batch import copy_to_device
from realrl.data.prefixes import Prefix
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.layout.limits import Bucket, bucket_lengths
from realrl.model.arithmetic.copies import Copies
from realrl.model.group import Group, all_gather
from realrl.model.paged_attention import CachePlaces, KeyRuns


@dataclass(frozen=True, eq=False)
class PaddedHeads:
    """Index tensors that convert between packed heads and padded heads, for buckets of sequences.

    A row is one head of one token. Padded rows are ordered (bucket, query | key | value, sequence, head, position).
    `pad_input_index` maps padded rows to packed rows [T * (heads + 2 kv_heads)], and `unpad_input_index` maps
    packed rows to padded rows. Padding maps to an arbitrary row, which the causal mask hides. Padded rows of
    attention's output are ordered (bucket, sequence, head, position). `pad_output_index` maps them to packed output
    rows [T * heads], and `unpad_output_index` maps these back. `output_padding` lists the padded output rows that
    hold only padding.
    """

    heads: int
    kv_heads: int
    buckets: tuple[Bucket, ...]
    pad_input_index: Tensor
    unpad_input_index: Tensor
    pad_output_index: Tensor
    output_padding: Tensor
    unpad_output_index: Tensor

    @property
    def output_rows(self) -> list[int]:
        """Number of padded rows of attention's output for each bucket."""
        return [b.tokens * self.heads for b in self.buckets]

    @property
    def input_rows(self) -> list[int]:
        """Numbers of padded query, key and value rows of all buckets, in one list."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        return [b.tokens * n for b in self.buckets for n in counts]


@dataclass(frozen=True, eq=False)
class BlockedKeys:
    """Arrangement of packed tokens in blocks, as in a KV cache, and the keys that each token sees."""

    count: int
    """Number of blocks."""
    places: CachePlaces
    runs: KeyRuns


@dataclass(frozen=True, eq=False)
class Spans:
    """B packed sequences, and the queries among their T tokens: the last tokens of each sequence.

    cu_queries, cu_keys: [B + 1] int32, the first query and the first token of each sequence, and their numbers.
    """

    queries: tuple[int, ...]
    """Number of queries of each sequence, at least 1."""
    keys: tuple[int, ...]
    """Number of tokens of each sequence."""
    cu_queries: Tensor
    cu_keys: Tensor
    _padded: dict[tuple[int, int], PaddedHeads] = field(default_factory=dict)
    _blocked: dict[int, BlockedKeys] = field(default_factory=dict)

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device | str) -> "Spans":
        starts = [_find_starts(torch.tensor(lengths)).int() for lengths in (queries, keys)]
        cu_queries, cu_keys = copy_to_device(starts, torch.device(device))
        return cls(tuple(queries), tuple(keys), cu_queries, cu_keys)

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """`cu_queries` and `cu_keys` as int64."""
        return self.cu_queries.long(), self.cu_keys.long()

    @cached_property
    def others(self) -> "Spans":
        """All sequences but the first."""
        return Spans.of(self.queries[1:], self.keys[1:], self.cu_keys.device)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens in the padded layout, including padding; 0 if no layout has been computed."""
        layout = next(iter(self._padded.values()), None)
        return 0 if layout is None else sum(bucket.tokens for bucket in layout.buckets)

    def pad_heads(self, heads: int, kv_heads: int) -> PaddedHeads:
        """Compute the padded layout for these numbers of heads; the result is cached. All tokens must be
        queries."""
        assert self.queries == self.keys, "a padded layout has whole sequences"
        key = (heads, kv_heads)
        if key not in self._padded:
            self._padded[key] = _compute_padded_heads(self.keys, heads, kv_heads, self.cu_keys.device)
        return self._padded[key]

    def arrange_blocks(self, run_rows: int) -> BlockedKeys:
        """Arrange keys in blocks; up to `run_rows` neighbouring queries of a sequence read them together. The
        result is cached."""
        if run_rows not in self._blocked:
            self._blocked[run_rows] = _arrange_blocks(self, run_rows)
        return self._blocked[run_rows]


@dataclass(frozen=True, eq=False)
class Piece:
    """Neighbouring packed tokens, and the tokens that they may see: those from the start of the first token's
    sequence to the last token."""

    first_key: int
    """Packed place of the first token that they may see."""
    stop: int
    """Packed place after the last token."""
    spans: Spans


class TokenShare:
    """Tokens of one of several ranks that divide the T tokens of packed sequences among themselves.

    The packed tokens are cut into 2n equal pieces for n ranks. Rank i has piece i and piece 2n - 1 - i. A token's
    attention costs as much as it has earlier tokens, so this pairing balances long sequences (Llama 3, arXiv
    2407.21783, section 3.3.2; ring-flash-attention calls it zigzag). A last sequence of padding makes the pieces
    equal. Its tokens have the packed places from T on.
    """

    gathered: Tensor
    """Packed place of each token of all ranks, rank by rank. [count * ranks]"""
    order: Tensor
    """Inverse of `gathered`: the index in it of each packed place. [count * ranks]"""
    places: Tensor
    """Packed place of each token of this rank. [count]"""
    positions: Tensor
    """Position of each of these tokens in its sequence. [count]"""
    rows: Tensor
    """Sequence of each of these tokens; padding has the number after the last sequence. [count]"""
    real: Tensor
    """Index of those of these tokens that are not padding. [N]"""
    predicting: Tensor
    """Index of those of these tokens that predict a next token of their sequence. [M]"""
    targets: Tensor
    """Packed places of the tokens that they predict. [M]"""

    def __init__(self, lengths: Sequence[int], device: torch.device | str, group: Group) -> None:
        """`group`: the ranks that divide the tokens."""
        self.group = group
        index, ranks = group.index, group.size
        self.tokens = sum(lengths)
        self.count = count_own_tokens(self.tokens, ranks)
        """Number of tokens of each rank, padding included."""
        padding = self.count * ranks - self.tokens
        self.padded_lengths = (*lengths, padding) if padding else tuple(lengths)
        """Lengths of all sequences, padding included."""
        self.pieces = tuple(
            _cut_piece(self.padded_lengths, number * self.piece_tokens, self.piece_tokens, device)
            for number in _list_pieces(index, ranks)
        )
        """This rank's two pieces, in the order of its tokens."""
        starts = torch.tensor([number for rank in range(ranks) for number in _list_pieces(rank, ranks)])
        gathered = (starts[:, None] * self.piece_tokens + torch.arange(self.piece_tokens)).flatten()
        sizes = torch.tensor(self.padded_lengths)
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        positions = torch.arange(len(rows)) - _find_starts(sizes)[rows]
        places = gathered[index * self.count :][: self.count]
        following = F.pad(positions[1 : self.tokens] > 0, (0, len(rows) - self.tokens + 1))[places]
        predicting = following.nonzero().squeeze(-1)
        tensors = [
            gathered,
            torch.empty_like(gathered).index_copy_(0, gathered, torch.arange(len(gathered))),
            places,
            positions[places],
            rows[places],
            (places < self.tokens).nonzero().squeeze(-1),
            predicting,
            places[predicting] + 1,
        ]
        copies = copy_to_device(tensors, torch.device(device))
        self.gathered, self.order, self.places, self.positions, self.rows = copies[:5]
        self.real, self.predicting, self.targets = copies[5:]

    @property
    def piece_tokens(self) -> int:
        return self.count // 2

    def gather(self, own: Tensor) -> Tensor:
        """Gather rows of all ranks in packed order, without gradient; padding comes last. [count, C] -> [count *
        ranks, C]"""
        buffer = own.new_empty(self.group.size * len(own), own.shape[1])
        all_gather(buffer, own.contiguous(), self.group)
        return buffer.index_select(0, self.order)

    def select(self, values: Tensor, padding: int = 0) -> Tensor:
        """Select the values of this rank's tokens. [T, ...] -> [count, ...]"""
        missing = sum(self.padded_lengths) - self.tokens
        if missing:
            values = F.pad(values, (*(0, 0) * (values.dim() - 1), 0, missing), value=padding)
        return values.index_select(0, self.places)


def count_own_tokens(tokens: int, ranks: int) -> int:
    """Count the tokens of each of `ranks` ranks that divide packed sequences of `tokens` tokens, padding
    included."""
    return tokens if ranks == 1 else 2 * -(-tokens // (2 * ranks))


def _list_pieces(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _cut_piece(lengths: Sequence[int], start: int, count: int, device: torch.device | str) -> Piece:
    """Cut `count` neighbouring tokens out of packed sequences, from the packed place `start` on."""
    stop, begin, first_key = start + count, 0, start
    queries: list[int] = []
    keys: list[int] = []
    for length in lengths:
        end = begin + length
        if begin < stop and end > start:
            if not queries:
                first_key = begin
            queries.append(min(end, stop) - max(begin, start))
            keys.append(min(end, stop) - begin)
        begin = end
    return Piece(first_key, stop, Spans.of(queries, keys, device))


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Packed tokens of sequences some of which begin alike: U of T tokens.

    They consist of parts. A common beginning is one part, and then the rest of each sequence that begins so. Any
    other sequence is one part.
    """

    kept: Tensor
    """The token of the whole sequences that each packed token is. [U]"""
    whole: Copies
    """The packed token of each token of the whole sequences. [T]"""
    spans: Spans
    """The parts. Their queries are their own tokens, and their keys begin with those of the common beginning."""
    keys: Copies
    """The packed token of each key of `spans`. [K]"""
    predicting: Copies
    """The packed tokens that predict `Packing.target_indices`."""
    parts: Tensor
    """Part of each packed token. [U]"""
    members: Tensor
    """Which parts each sequence consists of, 1 or 0. [B, parts] float64"""


@dataclass(frozen=True, eq=False)
class Packing:
    """B sequences stored back to back, T tokens in all. If some begin alike, passes may compute their common tokens
    only once (`common`), U tokens in all. Otherwise U is T.

    positions: [U], position of each computed token within its sequence. cu_seqlens: [B + 1] int32, the start of
    each sequence among the T tokens, and T. target_indices: computed tokens except the first of each sequence.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    positions: Tensor
    cu_seqlens: Tensor
    target_indices: Tensor
    share: TokenShare | None = None
    """Tokens of this rank, if context-parallel ranks divide the tokens."""
    common: SharedTokens | None = None
    """The computed tokens, if common beginnings are computed once."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        *,
        group: Group | None = None,
        prefixes: Sequence[Prefix] = (),
    ) -> "Packing":
        """Pack sequences with these lengths, each at least 1. The context-parallel ranks of `group` divide the
        tokens. Common beginnings, `prefixes`, are computed once."""
        divided = group is not None and group.size > 1
        assert len(lengths) > 0 and min(lengths) > 0, "a packing has sequences, and each of them tokens"
        assert not prefixes or not divided, "context-parallel ranks do not share common beginnings"
        sizes = torch.tensor(lengths)
        starts = _find_starts(sizes)
        positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(sizes)
        layout = _Parts.of(lengths, starts.tolist(), prefixes) if prefixes else None
        if layout is not None:
            positions = positions[layout.kept]
        # Every token except the first of its sequence is the target of a prediction.
        targets = positions.nonzero().squeeze(-1)
        tensors = [positions, starts.int(), targets]
        positions, cu_seqlens, target_indices = copy_to_device(tensors, torch.device(device))
        return cls(
            lengths=tuple(lengths),
            positions=positions,
            cu_seqlens=cu_seqlens,
            target_indices=target_indices,
            share=TokenShare(lengths, device, group) if group is not None and divided else None,
            common=None if layout is None else layout.move(targets, device),
        )

    @cached_property
    def starts(self) -> Tensor:
        """Index of the first token of each sequence, then T. [B + 1] int64"""
        return self.cu_seqlens.long()

    @cached_property
    def spans(self) -> Spans:
        """The sequences, of which all tokens are queries."""
        return Spans(self.lengths, self.lengths, self.cu_seqlens, self.cu_seqlens)

    @cached_property
    def rows(self) -> Tensor:
        """Index of each token's sequence. [T]"""
        sizes = torch.tensor(self.lengths)
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        return copy_to_device([rows], self.positions.device)[0]

    def select(self, values: Tensor, padding: int = 0) -> Tensor:
        """Select the values of the tokens that this rank computes. [T, ...] -> [U, ...]

        If CP ranks divide the tokens, there are `share.count` values, `padding` among them.
        """
        if self.share is not None:
            return self.share.select(values, padding)
        return values if self.common is None else values.index_select(0, self.common.kept)


@dataclass(frozen=True)
class _Parts:
    """`SharedTokens` in host memory."""

    kept: Tensor
    whole: Tensor
    queries: Sequence[int]
    """Number of tokens of each part."""
    keys: Sequence[Tensor]
    """Packed tokens of the keys of each part."""
    of_sequences: Sequence[Sequence[int]]
    """The parts of each sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], starts: Sequence[int], prefixes: Sequence[Prefix]) -> "_Parts":
        begins = {prefix.rows.start: prefix for prefix in prefixes}
        kept: list[Tensor] = []
        keys: list[Tensor] = []
        queries: list[int] = []
        of_sequences: list[list[int]] = []
        packed, stop = 0, 0
        common, of_common = torch.arange(0), 0

        def add(start: int, before: Tensor, count: int) -> Tensor:
            """Add a part with the tokens from `start` on, behind others of its sequence. Returns its keys."""
            nonlocal packed
            kept.append(torch.arange(start, start + count))
            keys.append(torch.cat((before, torch.arange(packed, packed + count))))
            queries.append(count)
            packed += count
            return keys[-1]

        whole = []
        for row, length in enumerate(lengths):
            prefix = begins.get(row)
            if prefix is not None:
                of_common, stop = len(keys), prefix.rows.stop
                common = add(starts[row], common[:0], prefix.tokens)
            elif row >= stop:
                common = common[:0]
            of_sequences.append([of_common, len(keys)] if len(common) else [len(keys)])
            whole.append(add(starts[row] + len(common), common, length - len(common)))
        return cls(torch.cat(kept), torch.cat(whole), queries, keys, of_sequences)

    def move(self, targets: Tensor, device: torch.device | str) -> SharedTokens:
        """Make `SharedTokens` on a device. `targets`: packed tokens that others predict."""
        count = len(self.kept)
        members = torch.zeros(len(self.of_sequences), len(self.keys), dtype=torch.float64)
        for row, of_row in enumerate(self.of_sequences):
            members[row, of_row] = 1
        parts = torch.arange(len(self.keys)).repeat_interleave(torch.tensor(self.queries))
        kept, parts, members = copy_to_device([self.kept, parts, members], torch.device(device))
        return SharedTokens(
            kept=kept,
            whole=Copies.of(self.whole, count, device),
            spans=Spans.of(self.queries, [len(of_part) for of_part in self.keys], device),
            keys=Copies.of(torch.cat([*self.keys]), count, device),
            predicting=Copies.of(self.whole[self.kept[targets] - 1], count, device),
            parts=parts,
            members=members,
        )


def _arrange_blocks(spans: Spans, run_rows: int) -> BlockedKeys:
    lengths, queries = torch.tensor(spans.keys), torch.tensor(spans.queries)
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    starts = _find_starts(lengths)
    positions = torch.arange(int(starts[-1])) - starts[sequences]
    of_query = torch.arange(len(lengths)).repeat_interleave(queries)
    query_starts = _find_starts(queries)
    numbers = torch.arange(int(query_starts[-1])) - query_starts[of_query]
    seen = numbers + (lengths - queries + 1)[of_query]
    counts = -(-lengths // BLOCK_TOKENS)
    first_blocks = _find_starts(counts)
    first_rows = (numbers % run_rows == 0).nonzero().squeeze(-1)
    tables = first_blocks[of_query[first_rows], None] + torch.arange(int(counts.max()))
    blocks, offsets, tables, seen, no_table, none, runs = copy_to_device(
        [
            first_blocks[sequences] + positions // BLOCK_TOKENS,
            positions % BLOCK_TOKENS,
            tables,
            seen,
            torch.zeros((1, 1), dtype=torch.int64),
            torch.zeros_like(seen),
            torch.cat((first_rows, query_starts[-1:])),
        ],
        spans.cu_keys.device,
    )
    return BlockedKeys(
        count=int(first_blocks[-1]),
        places=CachePlaces(blocks, offsets),
        runs=KeyRuns(
            shared_tables=tables,
            shared_lengths=seen,
            own_tables=no_table,
            own_numbers=none,
            own_lengths=none,
            starts=runs,
            most=run_rows,
            longest=max(spans.keys),
        ),
    )


def _compute_padded_heads(
    all_lengths: tuple[int, ...], heads: int, kv_heads: int, device: torch.device
) -> PaddedHeads:
    buckets = bucket_lengths(all_lengths)
    lengths = torch.tensor(all_lengths)
    starts = _find_starts(lengths)
    total = heads + 2 * kv_heads
    input_rows: list[Tensor] = []
    input_valid: list[Tensor] = []
    output_rows: list[Tensor] = []
    output_valid: list[Tensor] = []
    for bucket in buckets:
        sequences = torch.tensor(bucket.sequences)
        steps = torch.arange(bucket.length)
        inside = (steps < lengths[sequences, None])[:, None]
        token = torch.where(inside, starts[sequences, None, None] + steps, 0)
        for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
            head = torch.arange(first, first + count)[:, None]
            input_rows.append((token * total + head).flatten())
            input_valid.append(inside.expand(-1, count, -1).flatten())
        output_rows.append((token * heads + torch.arange(heads)[:, None]).flatten())
        output_valid.append(input_valid[-3])  # same as for the queries

    def invert(index: Tensor, valid: Tensor, size: int) -> Tensor:
        where = valid.nonzero().squeeze(-1)
        return torch.empty(size, dtype=torch.int64).index_copy_(0, index[where], where)

    tokens = int(starts[-1])
    pad_input, is_input = torch.cat(input_rows), torch.cat(input_valid)
    pad_output, is_output = torch.cat(output_rows), torch.cat(output_valid)
    index = {
        "pad_input_index": pad_input,
        "unpad_input_index": invert(pad_input, is_input, tokens * total),
        "pad_output_index": pad_output,
        "output_padding": (~is_output).nonzero().squeeze(-1),
        "unpad_output_index": invert(pad_output, is_output, tokens * heads),
    }
    copies = copy_to_device([*index.values()], device)
    return PaddedHeads(heads, kv_heads, buckets, **dict(zip(index, copies, strict=True)))


def _find_starts(lengths: Tensor) -> Tensor:
    """Find the start of each sequence, and the end of the last. [B] -> [B + 1] int64"""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
