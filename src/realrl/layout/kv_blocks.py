"""Sizes of the paged KV cache. The engine uses them to allocate and to schedule, and the planner uses them for its
estimates.

A row is a prompt with its continuation. Its keys and values are in two segments of blocks. The first segment holds
the prompt without its last token, and all rows of the prompt share it. The second segment belongs to the row alone.
It starts in a new block with the last token of the prompt, because that token is the first input of a decode step.
The last block of a segment may be partly filled.
"""

from dataclasses import dataclass
from math import ceil

BLOCK_TOKENS = 16
"""Tokens per block, as in vLLM. On average, half a block per segment stays empty. The attention scores of a block
fill one vector of a CPU kernel."""
MAX_DECODE_ROWS = 512
"""Maximum rows in a decode batch. More would take memory for logits without making matrix products more
efficient."""
GPU_STEPS = 16
"""Number of decode steps that a GPU runs before the host reads their tokens. Reading the tokens of every step would
leave the GPU idle."""
REPLACED_TOGETHER = 8
"""Finished rows are replaced once 1 / REPLACED_TOGETHER of a batch's rows have finished. A prefill of fewer rows
costs nearly as much."""
EXPECTED_SHARE = 0.5
"""Expected length of a continuation, as a fraction of the longest, when rows are admitted.

If rows become longer, the youngest rows are preempted and prefilled again later. This costs less than the decode
steps that larger batches save.
"""
CPU_PREFILL_TOKENS = 4096
"""Prompt tokens in a forward pass on a CPU; a single longer prompt may exceed this number. The activations of this
many tokens stay in the caches."""
GPU_PREFILL_TOKENS = 16384
"""Prompt tokens in a forward pass on a GPU, enough for matrix products at full speed."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a paged KV cache on one rank: its blocks, and the maximum number of rows that use it at a time, over
    all decode batches."""

    blocks: int
    rows: int
    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block. CP ranks divide them, and each rank stores `BLOCK_TOKENS` of them."""

    @property
    def tokens(self) -> int:
        """Tokens that a rank stores: its part of all blocks, and of the scratch block, which unused rows of a batch
        write to."""
        return (self.blocks + 1) * BLOCK_TOKENS


def count_blocks(tokens: int, *, block_tokens: int = BLOCK_TOKENS) -> int:
    return -(-tokens // block_tokens)


def count_prompt_blocks(length: int, *, block_tokens: int = BLOCK_TOKENS) -> int:
    """Count the blocks that the rows of a prompt share."""
    return count_blocks(length - 1, block_tokens=block_tokens)


def size_cache(
    capacity: int,
    *,
    prompt_blocks: float,
    longest_prompt: int,
    rows: int,
    new_tokens: int,
    block_tokens: int = BLOCK_TOKENS,
) -> CacheSize:
    """Size the cache of a generate call that may hold `capacity` tokens.

    `prompt_blocks` counts the blocks of all prompts. `longest_prompt` is in tokens. `rows` is the number of rows;
    each is continued by at most `new_tokens` tokens. The cache holds at least the longest row, and at most all
    rows. `block_tokens`: tokens of a block, which CP ranks divide.
    """
    own = count_blocks(new_tokens, block_tokens=block_tokens)
    longest = count_prompt_blocks(longest_prompt, block_tokens=block_tokens) + own
    everything = ceil(prompt_blocks) + rows * own
    blocks = min(everything, max(capacity // block_tokens, longest))
    # A cache that cannot hold all rows admits as many as fit at their expected length.
    expected = prompt_blocks / rows + count_blocks(
        ceil(EXPECTED_SHARE * new_tokens), block_tokens=block_tokens
    )
    most = rows if blocks == everything else max(1, int(blocks / expected))
    return CacheSize(blocks, min(rows, most, MAX_DECODE_ROWS), block_tokens)


def pad_rows(rows: int) -> int:
    """Round up to a batch size for which a GPU captures a graph. Above 64 rows, this adds at most an eighth."""
    if rows <= 8:
        return 1 << max(0, rows - 1).bit_length()
    granularity = max(8, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // granularity) * granularity


def count_graphs(rows: int) -> int:
    """Count the graphs of decode steps with at most `rows` rows."""
    return len({pad_rows(n) for n in range(1, rows + 1)})


def count_steps_per_look(*, cpu: bool) -> int:
    """Return the number of decode steps after which the host reads the tokens."""
    return 1 if cpu else GPU_STEPS


def count_prefill_tokens(*, cpu: bool) -> int:
    """Return the number of prompt tokens in a forward pass."""
    return CPU_PREFILL_TOKENS if cpu else GPU_PREFILL_TOKENS
