"""What of a device's and a network's peak figures is achieved, and what the host adds.

These are the constants of the roofline, used wherever nothing has been measured. Each says where it comes from;
none depends on model, plan or cluster. Within what its sources leave open, 0.65 to 0.8, `product` was chosen at
the lower end after a look at `bench/reference_table.py`; the others were not touched for it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peaks, counts of passes over memory, and times of the host."""

    matmul: float = 0.65
    """Of the peak, by the arithmetic of large matrix products; what their operands cost in memory traffic is
    added, so that small ones are slower. Alone, 8192³ products in bfloat16 reach 250 of 312 TFLOP/s on an A100
    and 650 to 700 of 989 on an H100; during training clocks are lower and gaps remain: the largest GPT runs of
    Megatron-LM (arXiv 2104.04473, table 1) are at 0.44 to 0.52 of the peak with everything included."""
    memory: float = 0.85
    """Of memory bandwidth, by streaming kernels; STREAM-like tests give 85 to 92 % on A100 and H100."""
    attention: float = 0.4
    """Of the peak, by causal attention, forward and backward. FlashAttention-2 (arXiv 2307.08691, figure 5)
    reaches 0.3 at 512 and 0.6 at 16k tokens with heads of 128 on an A100."""
    link: float = 0.85
    """Of a link's bandwidth, by large messages: all-reduce in nccl-tests has a bus bandwidth of 230 to 235 of
    300 GB/s on 8 A100 and 360 to 380 of 450 on 8 H100; 200 Gbit/s InfiniBand carries 22 to 24 of 25 GB/s."""
    host_link: float = 0.8
    """Of PCIe, by copies from and to pinned memory: about 25 of 32 GB/s with PCIe 4."""
    host_bytes_per_s: float = 3.5e9
    """Of what one process sends others from host memory, in bytes per second: rows that calls exchange go over
    gloo. Measured with torch 2.13 between two processes of a machine; a connection between nodes has no more."""
    overlap: float = 0.8
    """Of computation, that hides communication which goes on meanwhile: its kernels take a part of the device."""

    normal_passes: float = 10.0
    """Hidden vectors that a layer reads or writes forward outside its products: two norms (2 each) and two
    additions to the residual stream (3 each)."""
    rotary_passes: float = 9.0
    """The same in vectors of queries and keys, for the rotation (roll, multiply, multiply and add)."""
    attention_passes: float = 1.0
    """The same in vectors of queries, keys, values and output, for attention's own reading and writing."""
    activation_passes: float = 5.0
    """The same in inner vectors of the feed-forward block, for silu (2) and product (3)."""
    backward_passes: float = 2.0
    """Traffic outside products backward, relative to forward: a gradient for each value read again."""
    logit_bytes: float = 30.0
    """Traffic per logit forward: written in 2 bytes, made 4, scaled, log-softmax in two passes."""
    logit_backward_bytes: float = 50.0
    """Backward: the same again, and exponential, scaling and conversion."""
    sampled_logit_bytes: float = 60.0
    """Traffic per logit of a sampled token: softmax and probabilities in 4 bytes, cumulative sum in 8."""
    gradient_bytes: float = 10.0
    """Traffic per parameter and micro-batch to add a gradient of 2 bytes to one of 4."""
    clear_bytes: float = 4.0
    """Traffic per parameter of a rank and optimizer step, to clear the gradient."""
    update_bytes: float = 54.0
    """Traffic per parameter of a rank's shard: norm (12), clipping (8), AdamW (28), copy to 2 bytes (6)."""

    forward_operations: int = 20
    """Operations that the host hands the device for a layer forward; backward takes twice as many."""
    decode_operations: int = 28
    """The same for a layer of one decoding step, where the cache is written besides."""
    sampling_operations: int = 30
    """The same for head and sampling of one step, with the bookkeeping of what has ended."""
    collective_host_s: float = 40e-6
    """Time of the host per collective: enqueueing it from Python, and the skew of the hosts, each of which
    arrives at its own time."""

    generation_chunks_per_stage: int = 1
    """Continuations that generation is split into, about, per pipeline stage (`engine.model.Model.split`).
    As many as there are stages are under way at once, so that more than one per stage run one after the
    other."""
    pass_chunks_per_stage: int = 2
    """Micro-batches that other calls are split into, about, per pipeline stage."""
