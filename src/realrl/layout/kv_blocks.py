"""Sizes of the paged KV cache: the engine allocates and schedules by them, and the planner counts with them.

A row is a prompt with its continuation. Its keys and values lie in two segments of blocks: those of its prompt but
for the last token, which all rows of the prompt share, and its own, which begin in a fresh block with the last
token of the prompt: that is the first input of a decode step. A segment's last block may be partly filled.
"""

from dataclasses import dataclass
from math import ceil

BLOCK_TOKENS = 16
"""Tokens of a block, as in vLLM: half a block is lost per segment, and the scores of a block fill a vector."""
MAX_DECODE_ROWS = 512
"""Rows that are decoded at a time, at most: logits take memory, and products do not become more efficient."""
GPU_STEPS = 16
"""Decode steps of a GPU after which the host looks at tokens: waiting at every step would leave the device idle."""
REPLACED_TOGETHER = 8
"""Rows are replaced when one in so many of a decode batch has ended: to prefill fewer costs nearly as much."""
EXPECTED_SHARE = 0.5
"""Part of the longest continuation that rows are expected to take when they are admitted.

Where all of them take more, the youngest are preempted and prefilled again later, which costs less than the steps
that are saved by decoding more rows at a time."""
CPU_PREFILL_TOKENS = 4096
"""Tokens of prompts in a forward pass on a CPU, but for a longer prompt alone: activations stay in its caches."""
GPU_PREFILL_TOKENS = 16384
"""Tokens of prompts in a forward pass on a GPU: enough for products at full speed."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a paged KV cache on one rank, and rows that are decoded with it at a time, in all decode batches."""

    blocks: int
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens that the blocks hold, and those of the scratch block, which rows without a place write to."""
        return (self.blocks + 1) * BLOCK_TOKENS


def count_blocks(tokens: int) -> int:
    """Count the blocks of a segment of `tokens`."""
    return -(-tokens // BLOCK_TOKENS)


def count_prompt_blocks(length: int) -> int:
    """Count the blocks that rows of a prompt of `length` tokens share."""
    return count_blocks(length - 1)


def size_cache(
    capacity: int, *, prompt_blocks: float, longest_prompt: int, rows: int, new_tokens: int
) -> CacheSize:
    """Size the cache of a generate call by its `capacity` in tokens.

    `prompt_blocks` are those of all prompts, of which `longest_prompt` is the longest, in tokens; `rows` are to be
    continued by at most `new_tokens` each. The cache holds at least the longest row, and no more than all rows.
    """
    own = count_blocks(new_tokens)
    everything = ceil(prompt_blocks) + rows * own
    blocks = min(everything, max(capacity // BLOCK_TOKENS, count_prompt_blocks(longest_prompt) + own))
    expected = prompt_blocks / rows + count_blocks(ceil(EXPECTED_SHARE * new_tokens))
    most = rows if blocks == everything else max(1, int(blocks / expected))
    return CacheSize(blocks, min(rows, most, MAX_DECODE_ROWS))


def pad_rows(rows: int) -> int:
    """Round up to a number of rows for which a GPU has a graph of its own: above 64 at most an eighth more."""
    if rows <= 8:
        return 1 << max(0, rows - 1).bit_length()
    granularity = max(8, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // granularity) * granularity


def count_graphs(rows: int) -> int:
    """Count the graphs of decode steps of at most so many rows."""
    return len({pad_rows(n) for n in range(1, rows + 1)})


def count_steps_per_look(*, cpu: bool) -> int:
    """Count the decode steps after which the host looks at tokens."""
    return 1 if cpu else GPU_STEPS


def count_prefill_tokens(*, cpu: bool) -> int:
    """Count the tokens of prompts in a forward pass."""
    return CPU_PREFILL_TOKENS if cpu else GPU_PREFILL_TOKENS
