"""Processor time of the host for operations of a layer, and for a look at sampled tokens.

Where a GPU computes, the host launches kernel after kernel, and looks at tokens every few decode steps; the planner
charges the device for waiting (`Efficiency.look_row_s`, `DeviceKind.kernel_s`). Python, torch's dispatcher and
autograd take the same time on a machine without a GPU: a layer of a model so small that its arithmetic takes
next to no time runs on the CPU, and the scheduler as it is. It lacks what the driver and Triton's launcher take.

    python bench/host_launches.py
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from realrl.engine.generation.row_buffers import RowBuffers
from realrl.engine.generation.scheduler import DecodeRow, Prompt, Scheduler
from realrl.engine.model import make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.layout.kv_blocks import GPU_STEPS, count_prompt_blocks, size_cache
from realrl.model.attention import varlen_attention
from realrl.model.attention_rule import AttentionRule
from realrl.model.mixture.routing import LIKELIEST
from realrl.model.packing import Packing
from realrl.model.parallel.tensor_parallel import TensorParallel
from realrl.planner.cluster.efficiency import Efficiency

TINY = ModelShape(
    vocab_size=64, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=16
)
TOKENS, PROMPT, NEW = 4, 512, 1024
REPEATS, TURNS = 100, 20
STOPS = frozenset({2})


def median_time(run: Callable[[], object]) -> float:
    """Processor seconds of a call, the median of twenty rounds."""
    found = []
    for _ in range(20):
        begin = time.process_time()
        for _ in range(REPEATS):
            run()
        found.append((time.process_time() - begin) / REPEATS)
    return median(found)


def time_layer() -> tuple[float, float, float]:
    """Seconds of a layer forward with and without gradient, and backward."""
    model = make_unsharded_model(TINY, "lm", dtype=torch.float32, device=torch.device("cpu"))
    transformer = model.transformer
    for parameter in transformer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    packing = Packing.of((TOKENS,), model.device)
    tp = TensorParallel(transformer.tensor_group, TOKENS)
    tables = torch.ones(TOKENS, TINY.head_dim // 2), torch.zeros(TOKENS, TINY.head_dim // 2)
    x = torch.ones(TOKENS, TINY.hidden_size, requires_grad=True)

    def attend(qkv: Tensor, rule: AttentionRule) -> Tensor:
        return varlen_attention(qkv, packing, TINY.heads, TINY.kv_heads, rule)

    def forward() -> Tensor:
        output: Tensor = transformer.layers[0](x, tables, attend, tp, transformer._matrices, LIKELIEST)
        return output

    output = forward()
    gradient = torch.ones_like(output)
    with_gradient = median_time(forward)
    backward = median_time(lambda: output.backward(gradient, retain_graph=True))
    with torch.no_grad():
        return with_gradient, median_time(forward), backward


def time_look(rows: int) -> float:
    """Seconds to record the tokens of a turn of so many rows, and to plan the next."""
    waiting = [DecodeRow(i, Prompt(i, PROMPT)) for i in range(rows)]
    size = size_cache(
        1 << 40,
        prompt_blocks=rows * count_prompt_blocks(PROMPT),
        longest_prompt=PROMPT,
        rows=rows,
        new_tokens=NEW,
    )
    scheduler = Scheduler(
        waiting, size, batches=1, new_tokens=NEW, steps=GPU_STEPS, prefill_tokens=rows * PROMPT
    )
    buffers = RowBuffers(
        rows,
        longest_prompt=PROMPT,
        new_tokens=NEW,
        steps=GPU_STEPS,
        device=torch.device("cpu"),
        mirrored=False,
    )
    found = []
    for _ in range(TURNS):
        begin = time.process_time()
        turn = scheduler.plan(0)
        buffers.arrange(turn, [1] * rows, [1] * rows)
        tokens, logprobs = buffers.read(len(turn.rows), turn.steps)
        for row, drawn, scores in zip(turn.rows, tokens, logprobs, strict=True):
            # As `DecodeBatch` does it.
            for token, logprob in zip(drawn, scores, strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                if token in STOPS or len(row.tokens) == NEW:
                    row.done = True
                    break
        found.append(time.process_time() - begin)
    return median(found)


def main() -> None:
    torch.set_num_threads(1)
    forward, without, backward = time_layer()
    e = Efficiency()
    operations = e.forward_operations + e.backward_operations
    print(
        f"a layer forward {forward * 1e6:.0f} µs, without gradient {without * 1e6:.0f} µs, backward"
        f" {backward * 1e6:.0f} µs: {(forward + backward) / operations * 1e6:.1f} µs for each of {operations}"
        f" operations\na look at {GPU_STEPS} tokens of a row "
        + ", ".join(f"{time_look(rows) / rows * 1e6:.2f} µs (of {rows})" for rows in (64, 256, 512))
    )


if __name__ == "__main__":
    main()
