"""Constants of the roofline model: fractions of peak performance, memory traffic, host overheads.

The planner prefers times from a profile and from the tables of `planner/operators`. These constants cover
everything else. Each constant names its source, and none depends on model, plan or cluster. Only `matmul` was
fitted. Its sources allow 0.65 to 0.8, and a comparison with ReaL's paper (docs/notes/other-systems.md) chose the
lower end. docs/notes/constants.md lists all sources.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peak performance, memory traffic per operation, and host overheads."""

    matmul: float = 0.65
    """Fraction of peak FLOP/s that large matmuls achieve. The memory traffic of the operands is added, so small
    matmuls are slower. In isolation, 8192³ products in bfloat16 reach 250 of 312 TFLOP/s on an A100 and 650 to 700
    of 989 on an H100. During training, clocks are lower and gaps remain: the largest GPT runs of Megatron-LM (arXiv
    2104.04473, table 1) reach 0.44 to 0.52 of the peak with everything included."""
    memory: float = 0.85
    """Fraction of memory bandwidth that streaming kernels achieve. STREAM-like tests give 85 to 92 % on A100 and
    H100."""
    attention: float = 0.4
    """Fraction of peak FLOP/s that causal attention achieves, forward and backward. FlashAttention-2 (arXiv
    2307.08691, figure 5) reaches 0.3 at 512 and 0.6 at 16k tokens with heads of 128 on an A100."""
    flash2_slower: float = 1.65
    """Seconds of torch's attention relative to FlashAttention 3. torch lacks FlashAttention 3, with which the
    operator tables of H100 and H200 were measured. The measured ratio is 1.5 to 2.0 forward, 1.5 to 1.75 backward
    (arXiv 2407.08608, abstract and section 4.1)."""
    least_kernel_s: float = 2e-6
    """Seconds from the start of the smallest kernel of a GPU to the start of the next. The fastest operators in
    `operators/measured` take 2.5 µs on an H100 and 4 µs on an A100."""
    score_bytes: float = 84.0
    """Bytes of memory traffic per attention score in the forward pass, if scores are stored in memory.
    `model/gpu/scored_attention.py` writes and reads float32 numbers in a product, a scale, a cap, a mask, a softmax
    and a cast."""
    score_backward_bytes: float = 184.0
    """Bytes of memory traffic per attention score in the backward pass: the forward pass again, the slope of the
    cap, and the gradient of a softmax."""
    link: float = 0.85
    """Fraction of link bandwidth that large messages achieve. All-reduce in nccl-tests has a bus bandwidth of
    230 to 235 of 300 GB/s on 8 A100, and 360 to 380 of 450 on 8 H100. InfiniBand of 200 Gbit/s carries 22 to 24
    of 25 GB/s."""
    exact_forward: float = 1.1
    """Seconds of an exact forward pass (`exact` of a recipe) relative to an ordinary one, in decode steps and in
    training. It lies between the ratios of a generate call and of a train step on a CPU
    (docs/notes/measurements.md). On a GPU it is a guess."""
    host_link: float = 0.8
    """Fraction of PCIe bandwidth that copies from and to pinned memory achieve: about 25 of 32 GB/s with PCIe 4."""
    host_bytes_per_s: float = 3.5e9
    """Bandwidth of gloo messages between host memories, in bytes per second. Calls exchange their rows this way.

    It was measured with torch 2.13 between two processes of a machine. Messages between nodes are assumed to be no
    faster."""
    overlap: float = 0.8
    """Fraction of compute time that can hide communication. The kernels of communication occupy a part of the
    device."""

    normal_passes: float = 9.0
    """Hidden vectors that a layer reads or writes in its forward pass outside matmuls: a norm (2), a sum with its
    norm in one kernel (4), and an addition to the residual stream (3). `tests/gpu_branches/test_counted_work.py`
    checks this count, and the counts below, against the operations of the engine."""
    normal_backward_passes: float = 10.0
    """Hidden vectors that a layer reads or writes in its backward pass outside matmuls: two norms (4 and 3), and
    the sum of two gradients (3)."""
    copied_passes: float = 4.0
    """Hidden vectors read or written forward to copy the values that TP ranks sum, in both blocks of a layer."""
    rotary_passes: float = 2.0
    """Query and key vectors read or written by rotary embedding, in place."""
    rotary_backward_passes: float = 4.0
    """Query, key and value vectors read or written backward: gradients are joined (2) and rotated back (2)."""
    head_norm_passes: float = 8.0
    """Query, key and value vectors read or written by copies in the backward pass of head norms. The gradients of
    the norms are counted separately."""
    attention_passes: float = 1.0
    """Query, key, value and output vectors that attention reads or writes, if no table has its time. The backward
    pass takes twice this number."""
    activation_passes: float = 3.0
    """Vectors of the feed-forward dimension read or written by SwiGLU: gate, up and their product."""
    activation_backward_passes: float = 5.0
    """Vectors of the feed-forward dimension read or written by SwiGLU's backward pass: the output's gradient, gate
    and up, and the gradients of gate and up."""
    router_passes: float = 6.0
    """Float32 numbers that are read or written per expert and token, forward and backward alike: a cast, a softmax,
    and a choice."""
    expert_spread: float = 0.3
    """Standard deviation of the load of an expert in a layer, divided by its mean. Assumed, for routers that are
    trained to balance."""
    expert_sync_operations: int = 8
    """Kernels that the host launches while a GPU waits, because the host has first read how many rows EP ranks
    exchange in a layer."""
    logit_bytes: float = 4.0
    """Bytes of traffic per logit forward, on a GPU, to read its float32 value for sums. Here and below, the time of
    the product covers writing this value."""
    logit_backward_bytes: float = 8.0
    """Bytes of traffic per logit backward, on a GPU: the logit is read, and its gradient is written. A product that
    computes the logit again is counted separately."""
    cpu_logit_bytes: float = 30.0
    """Bytes of traffic per logit forward, on a CPU: a cast to float32, a scaling, and a log-softmax in two
    passes."""
    cpu_logit_backward_bytes: float = 50.0
    """Bytes of traffic per logit backward, on a CPU: the forward pass again, an exponential, a scaling and a
    cast."""
    sampled_logit_bytes: float = 32.0
    """Bytes of traffic per logit of a sampled token, all in float32: a sum (4), a scaling (8), log-probabilities
    (8), probabilities (8), and sums of blocks (4). Vocabularies that are not multiples of 128 are also padded
    (8)."""
    gathered_logit_bytes: float = 8.0
    """Bytes of traffic to put logits of several TP ranks side by side."""
    minimum_bytes: float = 8.0
    """Bytes of traffic per logit to forbid stop tokens in the first `min_new_tokens` tokens."""
    top_k_bytes: float = 38.0
    """Bytes of traffic per logit to keep the k likeliest tokens: `likeliest_bytes`, and 14 to mask all other
    tokens."""
    top_p_bytes: float = 40.0
    """Bytes of traffic per logit for `top_p`. The kernel reads a row eight times to find the smallest probability
    that stays. Then it reads and writes the row once (8)."""
    likeliest_bytes: float = 24.0
    """Bytes of traffic per logit to select the likeliest tokens: a radix select reads float32 numbers four times,
    and two more passes collect the result."""
    gradient_bytes: float = 4.0
    """Bytes of traffic per parameter of a matrix and micro-batch to accumulate gradients. The product reads the
    float32 sum, and writes the new sum in place of a separate result."""
    apart_gradient_bytes: float = 10.0
    """`gradient_bytes` if the product writes a separate gradient that is added afterwards, as in bfloat16 on a
    CPU."""
    clear_bytes: float = 4.0
    """Bytes of traffic per parameter of a rank to zero gradients, once per optimizer step."""
    update_bytes: float = 42.0
    """Bytes of traffic per parameter of an optimizer shard. The norm reads gradients (4), AdamW reads and writes
    its state (28) and writes clipped gradients (4), and parameters are cast to bfloat16 (6)."""

    cpu_fp8_widening: float = 9.0
    """Seconds to widen an fp8 matrix on a CPU relative to an int8 matrix. torch has a vectorised conversion only
    for int8 (docs/notes/measurements.md)."""

    forward_operations: int = 10
    """Kernels launched for a layer forward, also in decode steps: four products, attention, two norms, rotation,
    SwiGLU and an addition."""
    backward_operations: int = 21
    """Kernels launched for a layer backward."""
    head_norm_operations: int = 3
    """Additional kernels forward if the heads of queries and keys have norms."""
    head_norm_backward_operations: int = 12
    """Additional kernels backward if the heads of queries and keys have norms."""
    expert_operations: int = 20
    """Additional kernels of a mixture of experts forward: its router, the choice and order of experts, and the sum
    of their outputs."""
    expert_exchange_operations: int = 12
    """Additional kernels of EP ranks forward: numbers of rows to exchange, and the order of rows that arrive."""
    expert_backward_operations: int = 24
    """Additional kernels of a mixture of experts backward."""
    expert_bias_operations: int = 5
    """Additional kernels forward if the experts have biases."""
    expert_bias_backward_operations: int = 14
    """Additional kernels backward if the experts have biases."""
    decode_operations: int = 10
    """Kernels of a layer in a decode step."""
    merge_operations: int = 6
    """Additional kernels of a layer in a decode step of CP ranks: a copy of the attention output with its
    log-sum-exp for the all-gather, two for the weights of all ranks, and three to weigh outputs, add them up and
    round the sum."""
    sampling_operations: int = 35
    """Kernels of embedding, head and sampling in a decode step, bookkeeping included."""
    minimum_operations: int = 4
    """Additional kernels for `min_new_tokens`."""
    top_k_operations: int = 3
    """Additional kernels for `top_k`."""
    top_p_operations: int = 1
    """Additional kernels for `top_p`."""
    decode_graphs: bool = True
    """Whether a GPU launches a decode step as one CUDA graph, instead of kernel by kernel."""
    graph_kernel_s: float = 0.5e-6
    """Seconds between two kernels of a CUDA graph: 3.4 instead of 2.9 µs per kernel on a V100 (A. Gray, "Getting
    started with CUDA graphs", NVIDIA technical blog, 2019)."""
    look_operations: int = 41
    """Kernels and copies launched when the host looks at the sampled tokens of a GPU between decode steps."""
    look_row_s: float = 3.2e-6
    """Host seconds per row to record the tokens of several decode steps and to plan the next steps
    (docs/notes/constants.md)."""
    collective_host_s: float = 40e-6
    """Host seconds per collective: enqueueing it from Python, and the skew between the hosts."""
