"""A shared block is computed while ranks that divide experts exchange tokens, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from realrl.families.shape import Mixture, ModelShape
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.program.memory import StoredModel
from tests.planner.lone_rank import LoneRank, Sequences, nobody_else

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 14, "layers": 2, "heads": 4, "kv_heads": 2,
    "head_dim": 6, "init_std": 0.2,
}  # fmt: skip
SHAPES = {
    "llama4": ModelShape(
        family="llama4_text",
        mixture=Mixture(
            experts=8, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=1
        ),
        **SIZES,
    ),
    "glm4_moe": ModelShape(
        family="glm4_moe",
        mixture=Mixture(
            experts=8, per_token=3, scores="sigmoid", correction=True, groups=4, groups_per_token=2, shared=1
        ),
        **SIZES,
    ),
    "qwen3_moe": ModelShape(family="qwen3_moe", mixture=Mixture(experts=8, per_token=3), **SIZES),
}
STRATEGIES = [
    Strategy(dp=2, ep=2),
    Strategy(tp=2, ep=2),
    Strategy(tp=2, ep=2, sequence_parallel=True),
    Strategy(dp=2, ep=2, zero=3),
]

ROWS, OUTPUTS = 2, 1
"""Messages of an exchange: rows go with their weights, and outputs go alone."""


def hide(messages: int, computed: str) -> list[str]:
    """What happens while messages are on their way."""
    return ["start"] * messages + [computed] + ["wait"] * messages


FORWARD = ["at once", *hide(ROWS, "first half"), "experts", *hide(OUTPUTS, "second half")]
"""Nothing hides the exchange of the numbers of rows."""
BACKWARD = [*hide(OUTPUTS, "second half"), "experts", *hide(ROWS, "first half")]


@dataclass(frozen=True)
class Work:
    events: list[str]

    def wait(self) -> None:
        self.events.append("wait")


def record(monkeypatch: pytest.MonkeyPatch, name: str, strategy: Strategy, *, train: bool) -> list[str]:
    """Record a pass of a rank: exchanges as they start and are waited for, and products of the two halves of the
    shared block and of the experts, forward and backward."""
    stored = StoredModel(SHAPES[name], "lm", "float32", True)
    rank, events = LoneRank(stored, Placement(Mesh(0, strategy.size), strategy), 0), list[str]()

    def all_to_all(found: Tensor, rows: Tensor, *_: Any, async_op: bool, **__: Any) -> Work | None:
        found.copy_(rows)
        events.append("start" if async_op else "at once")
        return Work(events) if async_op else None

    names: dict[int, str] = {}
    for layer in rank.model.transformer.layers:
        matrices = {"first half": layer.gate_up, "second half": layer.down, "experts": layer.experts_down}
        names |= {id(matrix): part for part, matrix in matrices.items()}

    def follow(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(x: Tensor, matrix: Tensor, *others: Any, **options: Any) -> Tensor:
            out, part = multiply(x, matrix, *others, **options), names.get(id(matrix))
            if part is not None:
                events.append(part)
                if out.requires_grad:
                    out.register_hook(lambda _: events.append(part))
            return out

        return recorded

    products = rank.model.transformer._matrices
    monkeypatch.setattr(products, "multiply", follow(products.multiply))
    monkeypatch.setattr(products, "multiply_groups", follow(products.multiply_groups))
    sequences = Sequences.of((9, 5), stored)
    with nobody_else():
        monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
        rank.train(sequences) if train else rank.infer(sequences)
    return events


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", ["llama4", "glm4_moe"])
def test_each_half_of_a_shared_block_hides_an_exchange(
    name: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = SHAPES[name].layers
    with monkeypatch.context() as patch:
        assert record(patch, name, strategy, train=False) == layers * FORWARD
    with monkeypatch.context() as patch:
        assert record(patch, name, strategy, train=True) == layers * FORWARD + layers * BACKWARD
    again = replace(strategy, recompute=True)
    assert record(monkeypatch, name, again, train=True) == layers * FORWARD + layers * (FORWARD + BACKWARD)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_without_a_shared_block_exchanges_end_at_once(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record(monkeypatch, "qwen3_moe", strategy, train=True)
    assert {*events} == {"at once", "experts"}
    # Numbers of rows, rows with weights, and outputs; then the gradients of outputs, and of rows with weights.
    assert events.count("at once") == SHAPES["qwen3_moe"].layers * (4 + 3)
