"""Constants of the roofline model: fractions of peak performance, memory traffic, host overheads.

They are used wherever nothing has been measured, by a profile or by the tables of `planner/operators`. Each names
its source; none depends on model, plan or cluster.
The sources of `matmul` allow 0.65 to 0.8; it was set to the lower end after a comparison with ReaL's paper
(docs/notes/other-systems.md). The other constants were not fitted. docs/notes/constants.md lists all sources.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peak performance, memory traffic per operation, and host overheads."""

    matmul: float = 0.65
    """Fraction of peak FLOP/s that large matmuls achieve; the memory traffic of their operands is added, so that
    small ones are slower. Alone, 8192³ products in bfloat16 reach 250 of 312 TFLOP/s on an A100
    and 650 to 700 of 989 on an H100; during training clocks are lower and gaps remain: the largest GPT runs of
    Megatron-LM (arXiv 2104.04473, table 1) reach 0.44 to 0.52 of the peak with everything included."""
    memory: float = 0.85
    """Fraction of memory bandwidth that streaming kernels achieve; STREAM-like tests give 85 to 92 % on A100 and
    H100."""
    attention: float = 0.4
    """Fraction of peak FLOP/s that causal attention achieves, forward and backward. FlashAttention-2 (arXiv
    2307.08691, figure 5) reaches 0.3 at 512 and 0.6 at 16k tokens with heads of 128 on an A100."""
    flash2_slower: float = 1.65
    """Seconds of torch's attention relative to tables that were measured with FlashAttention 3, which torch has
    not: 1.5 to 2.0 forward, 1.5 to 1.75 backward (arXiv 2407.08608, abstract and section 4.1)."""
    least_kernel_s: float = 2e-6
    """Seconds from the start of a kernel of a GPU to that of the next, however little it does; the least of
    thousands of operators that `operators/measured` tabulates is 2.5 µs on an H100, 4 µs on an A100."""
    score_bytes: float = 84.0
    """Bytes of traffic per score that is computed in memory, forward, counted by the operations of
    `model/gpu/scored_attention.py`: float32 numbers written and read by a product, a scale, a cap, a mask, a
    softmax and a cast."""
    score_backward_bytes: float = 184.0
    """The same backward: those of forward again, the slope of the cap, and the gradient of a softmax."""
    link: float = 0.85
    """Fraction of link bandwidth that large messages achieve: all-reduce in nccl-tests has a bus bandwidth of
    230 to 235 of 300 GB/s on 8 A100 and 360 to 380 of 450 on 8 H100; 200 Gbit/s InfiniBand carries 22 to 24 of
    25 GB/s."""
    exact_forward: float = 1.1
    """Seconds of an exact forward pass relative to another one, products and attention together, in decode steps as
    in training: between a generate call and the forward pass of a train step, as measured on a CPU
    (docs/notes/measurements.md). Nothing was measured on a GPU, of which this is a guess."""
    host_link: float = 0.8
    """Fraction of PCIe bandwidth that copies from and to pinned memory achieve: about 25 of 32 GB/s with PCIe 4."""
    host_bytes_per_s: float = 3.5e9
    """Bandwidth of gloo messages between host memories, in bytes per second: rows exchanged between calls.

    Measured with torch 2.13 between two processes of a machine; a connection between nodes is no faster."""
    overlap: float = 0.8
    """Fraction of compute that can overlap communication, whose kernels occupy a part of the device."""

    normal_passes: float = 9.0
    """Hidden vectors that a layer reads or writes in its forward pass outside matmuls: a norm (2), a sum with its
    norm in one kernel (4) and an addition to the residual stream (3). These and the counts below are those of the
    operations that `tests/gpu_branches/test_counted_work.py` sees."""
    normal_backward_passes: float = 10.0
    """The same backward: two norms (4 and 3), and the sum of two gradients (3)."""
    copied_passes: float = 4.0
    """Hidden vectors read or written to copy what TP ranks sum, for both blocks of a layer, forward."""
    rotary_passes: float = 2.0
    """Query and key vectors read or written by rotary embedding, in place."""
    rotary_backward_passes: float = 4.0
    """Query, key and value vectors read or written backward: gradients put together (2), and rotated back (2)."""
    head_norm_passes: float = 8.0
    """Query, key and value vectors that norms of heads copy backward, beside the gradients of these norms."""
    attention_passes: float = 1.0
    """Query, key, value and output vectors read or written by attention itself, where no table has its time; twice
    as many backward."""
    activation_passes: float = 3.0
    """Vectors of the feed-forward dimension read or written by SwiGLU: gate, up and their product."""
    activation_backward_passes: float = 5.0
    """The same backward: the gradient, gate and up, and the gradients of both."""
    router_passes: float = 6.0
    """Numbers in float32 that are read or written per expert and token, forward as backward: a cast, a softmax,
    and a choice."""
    logit_bytes: float = 4.0
    """Bytes of traffic per logit forward, on a GPU: float32 numbers that sums read. A product writes them, here and
    below, in float32 instead of the model's type."""
    logit_backward_bytes: float = 8.0
    """Bytes of traffic per logit backward, on a GPU: read, beside those of a product that computes it once more,
    and its gradient written."""
    cpu_logit_bytes: float = 30.0
    """Bytes of traffic per logit forward, on a CPU: a cast to float32, a scaling, and a log-softmax in two
    passes."""
    cpu_logit_backward_bytes: float = 50.0
    """Bytes of traffic per logit backward, on a CPU: those of forward again, and exponential, scaling and cast."""
    sampled_logit_bytes: float = 32.0
    """Bytes of traffic per logit of a sampled token, all in float32: summed (4), scaled (8), log-probabilities (8),
    probabilities (8), and sums of blocks (4). Vocabularies that are not multiples of 128 are also padded (8)."""
    gathered_logit_bytes: float = 8.0
    """Bytes of traffic to put logits of several TP ranks side by side."""
    minimum_bytes: float = 8.0
    """Bytes of traffic per logit where the end of a sequence is not sampled before some tokens."""
    top_k_bytes: float = 38.0
    """Bytes of traffic per logit to keep the k likeliest tokens: `likeliest_bytes`, and 14 to leave out others."""
    top_p_bytes: float = 40.0
    """Bytes of traffic per logit to keep the tokens that together have a probability: the kernel reads a row eight
    times to select the least probability, and once more to write the restricted row (8)."""
    likeliest_bytes: float = 24.0
    """Bytes of traffic per logit to select the likeliest tokens: a radix select reads float32 numbers four times,
    and collects what it has found in two further passes."""
    gradient_bytes: float = 4.0
    """Bytes of traffic per parameter of a matrix and micro-batch to accumulate gradients: the product reads the
    sum, and writes it instead of a result of its own, in float32."""
    apart_gradient_bytes: float = 10.0
    """The same where products give gradients of their own, which are added afterwards: in bfloat16 on a CPU."""
    clear_bytes: float = 4.0
    """Bytes of traffic per parameter of a rank to zero gradients, once per optimizer step."""
    update_bytes: float = 42.0
    """Bytes of traffic per parameter of an optimizer shard: the norm reads gradients (4); AdamW reads and writes
    (28), and writes clipped gradients (4); cast to bfloat16 (6)."""

    cpu_fp8_widening: float = 9.0
    """Seconds to widen an fp8 matrix on a CPU relative to an int8 one, whose conversion alone torch has for vectors
    (docs/notes/measurements.md)."""

    forward_operations: int = 10
    """Kernels launched for a layer forward, in decode steps, too: four products, attention, two norms, rotation,
    SwiGLU and an addition."""
    backward_operations: int = 21
    """Kernels launched for a layer backward."""
    head_norm_operations: int = 3
    """Kernels besides where heads of queries and keys have norms, forward."""
    head_norm_backward_operations: int = 12
    """The same backward."""
    expert_operations: int = 20
    """Kernels of a mixture besides, forward: its router, the choice and order of experts, and the sum of what they
    give."""
    expert_backward_operations: int = 24
    """The same backward."""
    decode_operations: int = 10
    """Kernels of a layer in a decode step."""
    sampling_operations: int = 35
    """Kernels of embedding, head and sampling in a decode step, bookkeeping included."""
    minimum_operations: int = 4
    """Kernels besides where the end of a sequence is not sampled before some tokens."""
    top_k_operations: int = 3
    """Kernels besides to keep the k likeliest tokens."""
    top_p_operations: int = 1
    """Kernels besides to keep the tokens that together have a probability."""
    decode_graphs: bool = True
    """Whether a GPU launches a decode step as one CUDA graph, instead of kernel by kernel."""
    graph_kernel_s: float = 0.5e-6
    """Seconds between two kernels of a CUDA graph: 3.4 instead of 2.9 µs per kernel on a V100 (A. Gray, "Getting
    started with CUDA graphs", NVIDIA technical blog, 2019)."""
    look_operations: int = 41
    """Kernels and copies launched where the host looks at tokens between decode steps of a GPU."""
    look_row_s: float = 3.2e-6
    """Host seconds per row to record the tokens of a turn and to plan the next (docs/notes/constants.md)."""
    collective_host_s: float = 40e-6
    """Host seconds per collective: enqueueing it from Python, and the skew between the hosts."""

    pass_chunks_per_stage: int = 2
    """Approximate number of micro-batches per pipeline stage of train and inference calls."""
