"""Attention over keys and values in blocks, with kernels for CPU and GPU. Decode steps and exact runs use it.

In exact runs, decode steps, prefills and training use the same kernel. A query's result then depends only on the
query, its keys and its values, bit for bit.

If ranks divide a cache (`CachePart`), each of them attends to its own keys. `merge_parts` merges their outputs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realrl.layout.kv_blocks import WHOLE_CACHE, CachePart
from realrl.model.attention_rule import CAUSAL, AttentionRule
from realrl.model.cpu.exact_attention import attend_runs_bfloat16, attend_runs_float32
from realrl.model.cpu.paged_attention import attend_bfloat16, attend_float32
from realrl.model.gpu.path import load_kernels, on_gpu
from realrl.model.group import Group, all_gather

RUN_QUERIES = 16
"""Maximum number of queries in a run (neighbouring rows that share keys), unless more query heads share a key. It
is the smallest tile of a GPU's tensor cores."""

_LN_2 = 0.6931471805599453

_PROMPTS_PER_THREAD = 4
"""If there are at least this many prompts per thread, threads take whole prompts, because waiting for the last
thread then costs little."""


@dataclass(frozen=True, eq=False)
class CachePlaces:
    """Where tokens lie in the cache."""

    blocks: Tensor
    """Block of each token. [N] int64"""
    offsets: Tensor
    """Position within the block, among its tokens on all ranks. [N] int64"""


@dataclass(frozen=True, eq=False)
class KeyRuns:
    """Blocks of the keys that N rows see. A run is a range of neighbouring rows that share keys."""

    shared_tables: Tensor
    """Blocks of the keys that the rows of a run share. [runs, any] int64"""
    shared_lengths: Tensor
    """How many of the shared keys each row sees. [N] int64"""
    own_tables: Tensor
    """Blocks of own keys, which follow the shared keys. [tables, any] int64"""
    own_numbers: Tensor
    """Index of each row's table of own keys; on a GPU, it is the same for all rows of a run. [N] int64"""
    own_lengths: Tensor
    """How many own keys each row sees. [N] int64"""
    starts: Tensor
    """Index of the first row of each run, then N. [runs + 1] int64"""
    most: int
    """Maximum number of rows in a run."""
    longest: int
    """Upper bound on the keys that a row sees; known on the host."""
    part: CachePart = WHOLE_CACHE
    """Part of the keys that this rank holds. Lengths count the keys of all ranks."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Block tables of B rows that are decoded, as attention reads them.

    Entries of a table beyond a row's length may name any existing block. Rows that share a prompt are neighbours.
    """

    prompt_tables: Tensor
    """[B, blocks of the longest prompt] int64"""
    prompt_lengths: Tensor
    """Tokens in the prompt's segment. [B] int64"""
    own_tables: Tensor
    """[B, blocks of the longest continuation] int64"""
    own_lengths: Tensor
    """Tokens in the row's own segment, without the token that is decoded now. [B] int64"""
    prompt_starts: Tensor | None = None
    """Index of the first row of each prompt, then B; on the host. [prompts + 1] int64"""
    most: int = 0
    """Maximum number of rows that share a prompt."""
    part: CachePart = WHOLE_CACHE
    """Part of the cache that this rank holds. Lengths count the tokens of all ranks."""

    @property
    def newest(self) -> CachePlaces:
        """Places of the tokens that are decoded now."""
        number = (self.own_lengths // self.part.block_tokens).unsqueeze(-1)
        blocks = self.own_tables.gather(1, number).squeeze(-1)
        return CachePlaces(blocks, self.own_lengths % self.part.block_tokens)

    @property
    def runs(self) -> KeyRuns:
        """Keys that each row sees, including the newest key. On a CPU, a run has all rows of a prompt; on a GPU, it
        has one row."""
        own_lengths = self.own_lengths + 1
        numbers = torch.arange(len(own_lengths) + 1, device=own_lengths.device)
        if self.prompt_starts is None or on_gpu(own_lengths):
            starts = numbers
            tables, longest = self.prompt_tables, 0
        else:
            starts = self.prompt_starts
            tables = self.prompt_tables.index_select(0, starts[:-1])
            longest = int((self.prompt_lengths + own_lengths).max())
        return KeyRuns(
            shared_tables=tables,
            shared_lengths=self.prompt_lengths,
            own_tables=self.own_tables,
            own_numbers=numbers[:-1],
            own_lengths=own_lengths,
            starts=starts,
            most=self.most,
            longest=longest,
            part=self.part,
        )


Attended = tuple[Tensor, Tensor]
"""Output of attention to the keys of a rank [B, heads * D], in float32 if ranks divide the keys, and the log2 of
the sum of the exponentials of each query's scores [B, heads] float32, -inf if the rank holds none of its keys."""


@torch.library.custom_op("realrl::attend_to_blocks", mutates_args=("k", "v"), device_types="cuda")
def attend_to_blocks(
    qkv: Tensor, k: Tensor, v: Tensor, prompt_tables: Tensor, prompt_lengths: Tensor, own_tables: Tensor,
    own_lengths: Tensor, heads: int, window: int, cap: float, sinks: Tensor | None, ranks: int, index: int,
) -> Attended:  # fmt: skip
    """Run `attend_to_cache` on a GPU. It is registered as an operator of torch, so that tracers know the shapes of
    its results.

    prompt_tables, own_tables: [B, blocks]; prompt_lengths, own_lengths: [B]; window, cap (0 for none) and sinks as
    in `AttentionRule`; ranks and index as in `CachePart`.
    """
    # Triton comes only with builds of torch for GPUs.
    from realrl.model.gpu.paged_attention import launch_attention

    tables = prompt_tables, prompt_lengths, own_tables, own_lengths
    return launch_attention(qkv.contiguous(), k, v, *tables, heads, window, cap, sinks, ranks, index)


@attend_to_blocks.register_fake
def _(
    qkv: Tensor, k: Tensor, v: Tensor, prompt_tables: Tensor, prompt_lengths: Tensor, own_tables: Tensor,
    own_lengths: Tensor, heads: int, window: int, cap: float, sinks: Tensor | None, ranks: int, index: int,
) -> Attended:  # fmt: skip
    dtype = find_output_dtype(qkv.dtype, ranks)
    out = qkv.new_empty(len(qkv), heads * k.shape[3], dtype=dtype)
    return out, qkv.new_empty(len(qkv), heads, dtype=torch.float32)


def find_output_dtype(dtype: torch.dtype, ranks: int) -> torch.dtype:
    """Find the type of a rank's output. If outputs are merged, they are rounded only afterwards."""
    return dtype if ranks == 1 else torch.float32


def attend_to_cache(
    qkv: Tensor, k: Tensor, v: Tensor, rows: CachedRows, heads: int, rule: AttentionRule = CAUSAL
) -> Attended:
    """Store the newest token of each row, and attend from it to all tokens of its row that this rank holds.

    qkv: [B, (heads + 2 kv_heads) * D], rotated; k, v: [blocks, kv_heads, BLOCK_TOKENS, D]
    """
    rule = _count_sinks_once(rule, rows.part)
    if qkv.device.type == "cpu":
        return _attend_on_cpu(qkv, k, v, rows, heads, rule)
    tables = rows.prompt_tables, rows.prompt_lengths, rows.own_tables, rows.own_lengths
    part = rows.part
    found: Attended = attend_to_blocks(
        qkv, k, v, *tables, heads, *rule.bounds, rule.sinks, part.ranks, part.index
    )
    return found


def _count_sinks_once(rule: AttentionRule, part: CachePart) -> AttentionRule:
    """Leave sinks to the first of the ranks that divide keys."""
    return rule if part.index == 0 else replace(rule, sinks=None)


def _attend_on_cpu(
    qkv: Tensor, k: Tensor, v: Tensor, rows: CachedRows, heads: int, rule: AttentionRule
) -> Attended:
    assert rows.prompt_starts is not None, "kernels on a CPU work prompt by prompt"
    kv_heads, dim = k.shape[1], k.shape[3]
    out, sums = torch.empty(len(qkv), heads * dim), torch.empty(len(qkv), heads)
    kernel = attend_bfloat16 if k.dtype == torch.bfloat16 else attend_float32
    prompts = len(rows.prompt_starts) - 1
    tables = rows.prompt_tables, rows.prompt_lengths, rows.own_tables, rows.own_lengths
    sizes = heads, kv_heads, dim, rows.most
    claim = _claim_heads(prompts, kv_heads)
    pools = _view_addresses(k), _view_addresses(v)
    kernel(
        prompts * kv_heads, qkv.float(), *pools, *tables, rows.prompt_starts, *sizes, *rule.for_kernel(heads),
        rows.part.ranks, rows.part.index, out, sums, claim=claim,
    )  # fmt: skip
    return out.to(find_output_dtype(qkv.dtype, rows.part.ranks)), sums


def _view_addresses(pool: Tensor) -> Tensor:
    """View a pool as its first element. CPU kernels know the layout of pools, and need only their address."""
    first = pool.as_strided((1,), (1,))
    return first.view(torch.int16) if pool.dtype == torch.bfloat16 else first


def _claim_heads(prompts: int, kv_heads: int) -> int:
    """Return the number of a prompt's key/value heads that a thread takes at a time.

    The heads lie side by side in memory, so a thread takes all of them unless that leaves other threads idle.
    """
    return kv_heads if prompts >= _PROMPTS_PER_THREAD * torch.get_num_threads() else 1


def count_run_rows(heads: int, kv_heads: int) -> int:
    """Return the number of rows per run when sequences are prefilled or trained on."""
    return max(1, RUN_QUERIES // (heads // kv_heads))


def attend_to_runs(
    qkv: Tensor, k: Tensor, v: Tensor, runs: KeyRuns, heads: int, rule: AttentionRule = CAUSAL
) -> Attended:
    """Attend from each row to the keys that it sees and that this rank holds.

    qkv: [N, (heads + 2 kv_heads) * D], only queries are read; k, v: [blocks, kv_heads, BLOCK_TOKENS, D], as in a
    layer of a `PagedCache`
    """
    kv_heads, dim, part = k.shape[1], k.shape[3], runs.part
    rule = _count_sinks_once(rule, part)
    tables = (
        runs.shared_tables,
        runs.shared_lengths,
        runs.own_tables,
        runs.own_numbers,
        runs.own_lengths,
        runs.starts,
    )
    sums = torch.empty(len(qkv), heads, device=qkv.device)
    if on_gpu(qkv):
        out = qkv.new_empty(len(qkv), heads * dim, dtype=find_output_dtype(qkv.dtype, part.ranks))
        launch = load_kernels().exact.launch_run_attention
        launch(
            qkv.contiguous(),
            k,
            v,
            *tables,
            heads,
            *rule.bounds,
            rule.sinks,
            part.ranks,
            part.index,
            out,
            sums,
        )
        return out, sums
    out = torch.empty(len(qkv), heads * dim)
    kernel = attend_runs_bfloat16 if k.dtype == torch.bfloat16 else attend_runs_float32
    sizes = heads, kv_heads, dim, runs.most, runs.longest
    pools = _view_addresses(k), _view_addresses(v)
    pieces = (len(runs.starts) - 1) * kv_heads
    kernel(
        pieces, qkv.float(), *pools, *tables, *sizes, *rule.for_kernel(heads), part.ranks, part.index, out,
        sums, claim=1,
    )  # fmt: skip
    return out.to(find_output_dtype(qkv.dtype, part.ranks)), sums


def merge_parts(found: Attended, group: Group, dtype: torch.dtype) -> Tensor:
    """Merge what the ranks of a group have found for the same queries, each in its own part of the keys. All ranks
    get the same result, bit for bit. -> [B, heads * D] `dtype`"""
    outputs, sums = found
    if group.size == 1:
        return outputs
    width = outputs.shape[1]
    own = torch.cat((outputs, sums), 1)
    buffer = own.new_empty(group.size, *own.shape)
    all_gather(buffer.view(-1, own.shape[1]), own, group)
    weights = torch.softmax(buffer[:, :, width:] * _LN_2, 0)
    each = buffer[:, :, :width].view(*weights.shape, width // weights.shape[2])
    return each.mul_(weights.unsqueeze(-1)).sum(0).flatten(1).to(dtype)
