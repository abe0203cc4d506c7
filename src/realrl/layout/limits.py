"""Sizes of what is computed, sent or kept at a time: the engine works by them, and the planner counts with them."""

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_ELEMENTS = 2**24
"""Gradients or parameters in one collective: 64 MiB of float32, enough for full bandwidth, and few enough that
several buckets can overlap with computation."""

GATHER_STAGES = 4
"""Groups of buckets that are updated and all-gathered one after the other, each all-gather during the next update.

An update reads and writes 34 bytes of device memory per parameter of a rank's part; an all-gather brings 2 bytes
per parameter of all parts, over links that are several times slower. With four groups at most a quarter of the
shorter one is not hidden, and the host launches four updates, not one per bucket."""

CPU_LOGITS = 2**20
"""Logits computed at a time on a CPU: what its caches hold."""
CPU_KEPT_LOGITS = 2**24
"""Log-probabilities of a micro-batch that are kept for the backward pass on a CPU, 64 MiB; of more, logits are
computed again."""
GPU_LOGITS = 2**28
"""Logits computed at a time on a GPU, at most: 1 GiB of float32. Each time, the gradient of the whole table is read
and written, which then takes less time than the products."""
GPU_LOGIT_ROWS = 128
"""Rows of logits of a GPU come in multiples of these, which tiles of its products have."""

GPU_SCORES = 2**24
"""Scores of attention computed at a time on a GPU where no kernel takes a layer's rule: 64 MiB of float32."""

KERNEL_ELEMENTS = 2**13
"""Elements of one operand that a thread of a CPU takes at a time in an elementwise kernel: they stay in its first
cache, together with the other operands, and work is divided well among threads."""

LANES = 16
"""Numbers of a vector in compiled kernels of a CPU; weights that they multiply by are packed in as many rows."""

ADDED_ELEMENTS = 2**20
"""Elements of a matrix's gradient that are computed at a time where the product cannot add to what is there."""

CPU_WIDENED = 2**18
"""Numbers of a quantised matrix that are widened at a time on a CPU: what its caches hold."""

SENDS_PER_STAGE = 4
"""Messages that a pipeline stage may have under way, for each stage of the pipeline: the buffers of older ones have
surely arrived, and are freed."""


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """Sizes of the messages of a reallocation, and how many are under way."""

    message_bytes: int
    """Maximum bytes of one message, unless a single row has more."""
    alone_bytes: int
    """Bytes from which a contiguous run gets a message of its own, because it need not be packed."""
    posted_messages: int
    """Messages that are posted at a time, as one group of operations."""
    posted_groups: int
    """Groups that may be under way."""
    staged_messages: int
    """Packed messages under way above which nothing more is posted."""
    one_per_peer: bool
    """Whether a group has at most one message to, and one from, each peer: the n-th of each."""

    @property
    def staging_buffers(self) -> int:
        """Buffers for packed messages that a rank can have in use at once, and keeps."""
        return self.staged_messages + self.posted_messages

    @property
    def staging_bytes(self) -> int:
        """Bytes of those buffers."""
        return self.staging_buffers * self.message_bytes


CPU_MESSAGES = MessageLimits(
    message_bytes=8 << 20,
    alone_bytes=1 << 20,
    posted_messages=4,
    posted_groups=16,
    staged_messages=4,
    one_per_peer=False,
)
"""Messages over gloo: small, so that staging buffers are, and packing goes on while others are under way."""

GPU_MESSAGES = MessageLimits(
    message_bytes=64 << 20,
    alone_bytes=16 << 20,
    posted_messages=4,
    posted_groups=2,
    staged_messages=0,
    one_per_peer=True,
)
"""Messages over NCCL: posting one takes the host tens of microseconds, in which NVLink carries more than 8 MiB.

The groups of a communicator run one after the other, so that more of them under way do not overlap. NCCL's kernels
go through large groups by the distance of peers; with the n-th message of each peer alone in a group, that is the
order of messages anyway."""


def bucket_count(elements: int) -> int:
    """Count the buckets of equal size that a flat buffer is divided into."""
    return max(1, round(elements / BUCKET_ELEMENTS))


def count_logit_rows(columns: int, *, cpu: bool) -> int:
    """Count the rows of logits, of so many columns each, that are computed at a time: a chunk."""
    if cpu:
        return max(1, CPU_LOGITS // columns)
    return max(1, GPU_LOGITS // columns // GPU_LOGIT_ROWS) * GPU_LOGIT_ROWS


def count_kept_logit_rows(columns: int, *, cpu: bool) -> int:
    """Count the rows of a micro-batch up to which logits are kept for the backward pass: on a GPU one chunk."""
    return CPU_KEPT_LOGITS // columns if cpu else count_logit_rows(columns, cpu=False)


def message_limits(*, cpu: bool) -> MessageLimits:
    """Sizes of the messages of a reallocation between devices of a kind."""
    return CPU_MESSAGES if cpu else GPU_MESSAGES


_MULTIPLE = 8
"""Lengths are rounded up to multiples of it, so that there are few buckets."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded at their ends to `length` each."""

    sequences: tuple[int, ...]
    """Indices of the sequences."""
    length: int

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
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
