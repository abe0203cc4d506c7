"""Sizes of what is computed, sent or kept at a time: the engine works by them, and the planner counts with them."""

BUCKET_ELEMENTS = 2**24
"""Gradients or parameters in one collective: 64 MiB of float32, enough for full bandwidth, and few enough that
several buckets can overlap with computation."""

CPU_LOGITS = 2**20
"""Logits computed at a time on a CPU: what its caches hold."""
GPU_LOGITS = 2**26
"""Logits computed at a time on a GPU: 256 MiB of float32."""

SENDS_PER_STAGE = 4
"""Messages that a pipeline stage may have under way, for each stage of the pipeline: the buffers of older ones have
surely arrived, and are freed."""

COMPACTION_SHARE = 0.8
"""Share of a decode batch's rows that may be unfinished when finished ones are removed. Removing them copies the
key/value cache, which does not pay while most rows still run."""

POSTED_MESSAGES = 4
"""Messages that a reallocation posts at a time."""
POSTED_BATCHES = 16
"""Times that many messages that may be under way."""
STAGED_MESSAGES = 4
"""Packed messages under way above which nothing more is posted."""
STAGING_BUFFERS = STAGED_MESSAGES + POSTED_MESSAGES
"""Buffers for packed messages that a rank can have in use at once, and keeps."""


def bucket_count(elements: int) -> int:
    """Count the buckets of equal size that a flat buffer is divided into."""
    return max(1, round(elements / BUCKET_ELEMENTS))


def max_logits(*, cpu: bool) -> int:
    """Logits computed at a time on a kind of device."""
    return CPU_LOGITS if cpu else GPU_LOGITS
