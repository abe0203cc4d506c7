"""Arithmetic of calls, as model FLOPs utilisation counts it."""

from realrl.dataflow.call import Call, Kind
from realrl.families.shape import Head, ModelShape
from realrl.planner.workload.workload import CallWork, Workload
from realrl.program.memory import Stored


def call_flops(call: Call, model: Stored | None, workload: Workload) -> float:
    """Operations of a call in a step; 0 of a function, which has no model.

    Of matrices 2 per parameter and token, and attention, which causality halves: 2 * s² per layer and element of a
    token's queries; twice as much backward. Embeddings are looked up and count nothing, nor what is computed again.
    As in PaLM (arXiv 2204.02311, appendix B), which does not halve attention. While generating, the head computes
    only tokens to be drawn.
    """
    if model is None:
        return 0.0
    work = workload.work(call)
    if call.kind is Kind.GENERATE:
        return work.sequences * _generated(model, work)
    rounds = 3 if call.kind is Kind.TRAIN else 1
    tokens, squares = work.mean, work.mean_square
    return rounds * work.passes * work.sequences * _forward(model, tokens, tokens, squares)


def _generated(model: Stored, work: CallWork) -> float:
    """Of a sequence; every token but the last passes through the layers."""
    lengths = [prompt + answer for prompt, answer in zip(work.lengths, work.answers, strict=True)]
    drawn = sum(work.answers) / len(work.answers)
    tokens = sum(lengths) / len(lengths)
    return _forward(model, tokens, drawn, sum(n * n for n in lengths) / len(lengths))


def _forward(model: Stored, tokens: float, scored: float, squares: float) -> float:
    shape = model.shape
    attention = 2 * squares * shape.heads * shape.head_dim
    layers = shape.layers * (2 * tokens * layer_products(shape) + attention)
    return layers + 2 * scored * shape.hidden_size * _outputs(shape, model.head)


def layer_products(shape: ModelShape) -> int:
    """Parameters of the matrices of a layer."""
    rotated = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.hidden_size * (rotated + 3 * shape.intermediate_size)


def _outputs(shape: ModelShape, head: Head) -> int:
    return shape.vocab_size if head == "lm" else 1
