"""FLOPs of calls as model FLOPs utilisation (MFU) counts them, without recomputation and other overhead."""

from realrl.dataflow.call import Call, Kind
from realrl.families.adapters import LORA_A, LORA_B, STACKS_A, STACKS_B
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import count_matrix_weights, estimate_attention_cost
from realrl.plan.placement import Strategy
from realrl.planner.workload.batching import find_load
from realrl.planner.workload.windows import average_squares
from realrl.planner.workload.workload import CallWork, Workload
from realrl.program.memory import StoredModel


def count_flops(call: Call, model: StoredModel | None, workload: Workload, strategy: Strategy) -> float:
    """Count the FLOPs of a call in a step (see `count_pass_flops`). A function has no model, so it has 0.

    A prompt counts once for samples that are computed together under `strategy`.
    """
    if model is None:
        return 0.0
    work = workload.work(call)
    if call.kind is Kind.GENERATE:
        return work.sequences * _generated(model, work)
    load = find_load(work, strategy, estimate_attention_cost(model.shape))
    tokens, squares = load.tokens / load.sequences, load.squares / load.sequences
    each = count_pass_flops(model, call.kind, tokens=tokens, scored=tokens, squares=squares)
    return work.passes * work.sequences * each


def count_pass_flops(
    model: StoredModel, kind: Kind, *, tokens: float, scored: float, squares: float
) -> float:
    """Count the FLOPs of a call of kind `kind` that passes `tokens` tokens through a model.

    The head computes outputs for `scored` tokens. `squares` is the sum of squared sequence lengths. A matmul takes
    2 FLOPs per parameter and token. Causal attention over s tokens takes 2 * s² FLOPs per layer and element of the
    query dimension. Sliding windows take fewer (`average_squares`). The backward pass of trained layers takes twice
    the FLOPs of their forward pass. A fully trained model of N parameters therefore takes 6 * N * T FLOPs for T
    tokens, plus attention. Embedding look-ups and recomputation do not count. The count follows PaLM (arXiv
    2204.02311, appendix B), except that PaLM does not halve attention for the causal mask.
    """
    operations = _forward(model, tokens, scored, squares)
    if kind is not Kind.TRAIN:
        return operations
    if not model.part.adapters:
        return operations + 2 * _forward(model, tokens, scored, squares, layers=model.part.last_layers)
    # A frozen matrix needs only the gradient of its input, so its backward pass takes the FLOPs of its forward
    # pass. Attention has no matrices, and its backward pass takes twice the FLOPs of its forward pass.
    frozen = tokens * count_matrix_weights(model.shape)
    frozen += scored * count_head_weights(model.shape, "lm") if model.head == "lm" else 0
    return operations + 2 * operations - 2 * frozen


def _generated(model: StoredModel, work: CallWork) -> float:
    """Count the FLOPs per generated sequence. The head counts only sampled tokens. A prompt counts once for all its
    samples."""
    pairs = list(zip(work.lengths, work.answers, strict=True))
    spared = 1 - 1 / work.samples
    drawn = sum(work.answers) / len(pairs)
    tokens = sum(prompt + answer - spared * prompt for prompt, answer in pairs) / len(pairs)
    squares = sum((prompt + answer) ** 2 - spared * prompt**2 for prompt, answer in pairs) / len(pairs)
    return count_pass_flops(model, Kind.GENERATE, tokens=tokens, scored=drawn, squares=squares)


def _forward(
    model: StoredModel, tokens: float, scored: float, squares: float, *, layers: int | None = None
) -> float:
    """Count the forward FLOPs of the head and of the last `layers` layers. None means all layers."""
    shape = model.shape
    seen = float(average_squares(shape, tokens, squares, layers=layers))
    count = shape.layers if layers is None else layers
    attention = count * 2 * seen * shape.heads * shape.head_dim
    matrices = count_matrix_weights(shape, layers) + count_adapter_weights(shape, layers)
    return 2 * tokens * matrices + attention + 2 * scored * count_head_weights(shape, model.head)


def count_adapter_weights(shape: ModelShape, last: int | None = None) -> int:
    """Count the parameters of the adapters of all layers, or of the `last` layers, that a token passes through."""
    if shape.lora is None:
        return 0
    first = 0 if last is None else shape.layers - last
    factors = {*LORA_A.values(), *LORA_B.values(), *STACKS_A.values(), *STACKS_B.values()}
    specs = [
        spec
        for spec in model_tensors(shape, "lm")
        if spec.parameter in factors and spec.layer is not None and spec.layer >= first
    ]
    mixture = shape.mixture
    of_experts = sum(spec.numel for spec in specs if spec.expert is not None)
    used = 0 if mixture is None else of_experts * mixture.per_token // mixture.experts
    return sum(spec.numel for spec in specs) - of_experts + used


def count_head_weights(shape: ModelShape, head: Head) -> int:
    """Count the parameters of the head's matrix, which is the embedding table if the two are tied."""
    return shape.hidden_size * (shape.vocab_size if head == "lm" else 1)
