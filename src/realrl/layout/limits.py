"""Limits of how much is computed, sent or kept at a time. The engine obeys these limits, and the planner uses them
for its estimates."""

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_ELEMENTS = 2**24
"""Elements in one collective: 64 MiB of float32. That is enough for full bandwidth, and small enough that several
buckets overlap with computation."""

MERGED_ROWS = 4096
"""Maximum number of rows that ranks that divide the KV cache gather at a time in a prefill, each with the results
of one rank for a token."""

GATHER_STAGES = 4
"""Groups of buckets that are updated and all-gathered in turn; each all-gather runs during the next update.

An update reads and writes 34 bytes of device memory per parameter of a rank's part. An all-gather receives 2 bytes
per parameter of all parts, over links that are several times slower. With four groups, at least three quarters of
the shorter operation overlap with the longer one. The host launches only four updates rather than one per bucket.
"""

CPU_LOGITS = 2**20
"""Logits computed at a time on a CPU; this many fit its caches."""
CPU_KEPT_LOGITS = 2**24
"""Log-probabilities of a micro-batch that are kept for the backward pass on a CPU: 64 MiB. If there are more,
logits are computed again."""
GPU_LOGITS = 2**28
"""Maximum logits computed at a time on a GPU: 1 GiB of float32. For each chunk, the gradient of the whole embedding
table is read and written. With chunks of this size, this takes less time than the matrix products."""
GPU_LOGIT_ROWS = 128
"""Logit rows on a GPU come in multiples of 128, the height of the tiles of its matrix products."""

GPU_SCORES = 2**24
"""Attention scores computed at a time on a GPU if no kernel supports a layer's options: 64 MiB of float32."""

KERNEL_ELEMENTS = 2**13
"""Elements of an operand that a CPU thread handles at a time in an elementwise kernel. They stay in the thread's
first-level cache, together with the other operands. The work divides well among threads."""

LANES = 16
"""Numbers per vector in compiled CPU kernels; weights that the kernels multiply by are packed in panels of this
many rows."""

ADDED_ELEMENTS = 2**20
"""Elements of a matrix's gradient that are computed at a time if the product cannot add to existing values."""

CPU_WIDENED = 2**18
"""Numbers of a quantised matrix that are widened at a time on a CPU; this many fit its caches."""

CHUNKS_PER_STAGE = 2
"""Micro-batches that a pipeline gets per stage, or more."""

LEAST_SHARED = 1 / 8
"""Common beginnings of sequences are computed once if that saves this share of their tokens. Attention then needs
copies of keys and values, which may take an eighth of the memory of a layer's activations."""

SENDS_PER_STAGE = 4
"""Messages that a pipeline stage may have in flight, per stage of the pipeline. If there are more, the stage waits
for the oldest message, which has very likely arrived, and frees its buffer."""


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """Sizes of the messages of a reallocation, and how many may be in flight."""

    message_bytes: int
    """Maximum bytes of one message; a single longer row may exceed it."""
    alone_bytes: int
    """A contiguous run of at least this many bytes gets a message of its own, because it need not be packed."""
    posted_messages: int
    """Messages that are posted at a time, as one group of operations."""
    posted_groups: int
    """Number of groups that may be in flight."""
    staged_messages: int
    """Nothing more is posted while more packed messages than this are in flight."""
    one_per_peer: bool
    """Whether a group has at most one message to each peer and one from each peer. If so, all messages of a group
    have the same index n: each is the n-th message between its two ranks."""

    @property
    def staging_buffers(self) -> int:
        """Buffers for packed messages that a rank keeps: the most that can be in use at once."""
        return self.staged_messages + self.posted_messages

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return self.staging_buffers * self.message_bytes


CPU_MESSAGES = MessageLimits(
    message_bytes=8 << 20,
    alone_bytes=1 << 20,
    posted_messages=4,
    posted_groups=16,
    staged_messages=4,
    one_per_peer=False,
)
"""Messages over gloo. They are small, so that staging buffers are small and packing overlaps with sending."""

GPU_MESSAGES = MessageLimits(
    message_bytes=64 << 20,
    alone_bytes=16 << 20,
    posted_messages=4,
    posted_groups=2,
    staged_messages=0,
    one_per_peer=True,
)
"""Messages over NCCL. They are large, because the host takes tens of microseconds to post a message, and NVLink
moves more than 8 MiB in this time.

Groups of a communicator run one after the other, so more groups in flight would not overlap. NCCL's kernels process
a large group in the order of the distance between peers. If a group has only the n-th message of each peer, the
messages are in this order anyway.
"""


def bucket_count(elements: int) -> int:
    """Count the buckets of equal size in a flat buffer."""
    return max(1, round(elements / BUCKET_ELEMENTS))


def pad_elements(elements: int, replicas: int) -> int:
    """Pad elements so that every bucket divides evenly among `replicas` ranks, which store the same elements."""
    multiple = replicas * bucket_count(elements)
    return -(-elements // multiple) * multiple


def count_logit_rows(columns: int, *, cpu: bool) -> int:
    """Count the rows in a chunk of logits that is computed at a time; each row has `columns` logits."""
    if cpu:
        return max(1, CPU_LOGITS // columns)
    return max(1, GPU_LOGITS // columns // GPU_LOGIT_ROWS) * GPU_LOGIT_ROWS


def count_kept_logit_rows(columns: int, *, cpu: bool) -> int:
    """Count the rows of the largest micro-batch that keeps its logits for the backward pass. On a GPU, this is one
    chunk."""
    return CPU_KEPT_LOGITS // columns if cpu else count_logit_rows(columns, cpu=False)


def message_limits(*, cpu: bool) -> MessageLimits:
    """Find the message limits of a reallocation between CPU processes or between GPUs."""
    return CPU_MESSAGES if cpu else GPU_MESSAGES


_MULTIPLE = 8
"""Lengths are rounded up to multiples of 8, so that there are few buckets."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded at the end to `length` each. GPU attention uses buckets if its kernel
    for packed sequences does not support a layer."""

    sequences: tuple[int, ...]
    """Indices of the sequences."""
    length: int

    @property
    def tokens(self) -> int:
        """Tokens, including padding."""
        return len(self.sequences) * self.length


def bucket_lengths(lengths: Sequence[int]) -> tuple[Bucket, ...]:
    """Group sequences by length, longest first, so that padding stays small."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[tuple[int, list[int]]] = []
    shortest = 0
    for i in order:
        if not groups or lengths[i] < shortest:
            longest = -(-lengths[i] // _MULTIPLE) * _MULTIPLE
            shortest = min(longest - _MULTIPLE, longest * 3 // 4) + 1
            groups.append((longest, []))
        groups[-1][1].append(i)
    return tuple(Bucket(tuple(sequences), length) for length, sequences in groups)
