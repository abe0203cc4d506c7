"""What a user's own methods raise or give wrong is one error message: the example, with a mistake in it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.build import build_algorithm
from realrl.algorithms.guard import check_outputs
from realrl.config.errors import UserCodeError, UserError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.load import parse_experiment
from realrl.testing.shrink import SHAPE

EXAMPLE = (Path(__file__).parents[2] / "examples" / "online_dpo.py").read_text(encoding="utf-8")
RECIPE = {
    "run_dir": "r",
    "data": {"train": "t", "batch": 4},
    "models": {"actor": {"shape": SHAPE}, "reward": {"shape": SHAPE}},
}
SEQUENCES = Ragged.of([[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2]])
ROWS = sum(SEQUENCES.lengths)
SCORED = (
    'return {key: Ragged.scalars(of.float()) for key, of in zip(pairs_of("ref_logps"), sums, strict=True)}'
)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    assert EXAMPLE.count(old) == 1, old
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.replace(old, new), encoding="utf-8")
    return file


def batch(**fields: Ragged) -> Batch:
    answers = {"sequences": SEQUENCES, "prompt_length": Ragged.scalars(torch.ones(4, dtype=torch.int64))}
    both = {f"{side}{key}": rows for side in ("", "other_") for key, rows in answers.items()}
    return Batch((0, 1, 2, 3), {**both, **fields})


def run(*, gradient: bool = False) -> ModelOutput:
    """What the model gives for both answers of every item."""
    lengths = tuple(length for length in SEQUENCES.lengths for _ in range(2))
    return ModelOutput(lengths, logprobs=-torch.ones(2 * ROWS, requires_grad=gradient))


def compare(algorithm: Any) -> None:
    """The calls of an inference method."""
    method = algorithm.method("ref.inference")
    method.sequences(batch())
    outputs = method.outputs(batch(), run())
    method.metrics(batch().with_fields(**outputs))


def learn(algorithm: Any) -> None:
    """The calls of a train method."""
    method = algorithm.method("actor.train")
    numbers = {key: Ragged.scalars(torch.arange(4.0)) for key in ("score", "ref_logps", "other_ref_logps")}
    scored = batch(other_score=Ragged.scalars(torch.zeros(4)), **numbers)
    prepared, _ = method.prepare(scored, lambda tensor: tensor)
    method.sequences(prepared)
    method.weight(prepared)
    method.loss(prepared, run(gradient=True))
    assert method.head_scale == 1.0 and not method.entropy and method.epochs == 1
    method.stop({})
    method.finish()
    algorithm.notes({})
    algorithm.state_dict()


def build(file: Path) -> Any:
    return build_algorithm(parse_experiment({**RECIPE, "algorithm": str(file)}))


def test_the_example_passes_every_check(tmp_path: Path) -> None:
    algorithm = build(changed(tmp_path, "The description:", "The description:"))
    compare(algorithm)
    learn(algorithm)


PAIR = "return batch.with_fields(sign=Ragged.scalars(sign.float())), metrics"
WEIGHT = "return float(len(batch))"
KEYS = "'ref_logps' and 'other_ref_logps'"
WRONG: dict[str, dict[str, dict[str, str]]] = {
    "outputs of ref.inference": {
        SCORED: {
            "pass": f"gave None; it must give a dict of {KEYS}, a Ragged each",
            SCORED.replace(
                "ref_logps", "ref_logp"
            ): f"gave no key 'ref_logps'; it must give a dict of {KEYS}",
            SCORED.replace("{key:", '{"more": 1} | {key:'): "gave a key 'more', which the call does not have",
            "return dict(zip(pairs_of('ref_logps'), sums, strict=True))": (
                "gave a tensor of shape [4] and type float64 as 'ref_logps'; it must be a Ragged of float32 with"
                " one row for each of 4 items"
            ),
            SCORED.replace(".float()", ".float()[1:]"): "gave 3 rows of 'ref_logps'; it must be a Ragged",
            SCORED.replace(
                "Ragged.scalars(of.float())", "Ragged(output.logprobs[::2], batch['sequences'].lengths)"
            ): "gave 3 numbers for row 0 of 'ref_logps'; the graph declares one number per item",
            SCORED.replace("of.float()", "of"): "gave 'ref_logps' as float64; it must be a Ragged of float32",
        }
    },
    "prepare of actor.train": {
        PAIR: {
            PAIR.removesuffix(", metrics"): "gave a Batch; it must",
            "return batch.select([0]), metrics": (
                "gave a Batch of 1 items, not the 4 of its argument in their order"
            ),
            "return batch, {}": "gave a dict; it must give Metrics",
        },
        'metrics.mean("better_score", first.maximum(other)[known].sum(), known.sum())': {
            'metrics.mean("better_score", first.maximum(other), known.sum())': (
                "gave a tensor of shape [4] and type float64 for the metric 'better_score'"
            )
        },
    },
    "weight of actor.train": {
        WEIGHT: {
            'return "many"': "gave 'many'; it must give a finite number",
            "return batch['sign'].values": (
                "gave a tensor of shape [4] and type float32; it must give a finite number, 0 or above"
            ),
            "return float('nan')": "gave nan; it must",
        }
    },
    "loss of actor.train": {
        "return loss, metrics": {
            "return loss": "gave a tensor of shape []",
            "return loss.detach(), metrics": (
                "gave a loss without gradient; it must be computed from the model's output"
            ),
        },
        "loss = -logsigmoid(margin).sum()": {
            "loss = -logsigmoid(margin)": (
                "gave a tensor of shape [4] and type float64 as the loss; it must be a scalar"
            )
        },
    },
}
"""Function -> its line -> what replaces the line -> the problem."""
CASES = [
    (function, old, new, problem)
    for function, lines in WRONG.items()
    for old, changes in lines.items()
    for new, problem in changes.items()
]


@pytest.mark.parametrize(("function", "old", "new", "problem"), CASES)
def test_a_wrong_output_is_one_message_with_function_call_and_line(
    function: str, old: str, new: str, problem: str, tmp_path: Path
) -> None:
    # The loss per token is added up where it is reported.
    file = changed(tmp_path, old, new)
    if "as the loss" in problem:
        text = file.read_text().replace('metrics.mean("loss", loss,', 'metrics.mean("loss", loss.sum(),')
        file.write_text(text)
    algorithm = build(file)
    with pytest.raises(UserCodeError) as caught:
        (compare if "ref" in function else learn)(algorithm)
    message = str(caught.value)
    name = function.partition(" ")[0]
    place = re.search(rf"^algorithm={file}: {function} \({file}:(\d+)\) (.*)$", message)
    assert place is not None and place[2].startswith(problem), message
    assert file.read_text().splitlines()[int(place[1]) - 1].lstrip().startswith(f"def {name}(")
    assert caught.value.alone and "\n" not in message


@pytest.mark.parametrize(
    ("old", "function"),
    [
        ("return {key: Ragged", "outputs of ref.inference"),
        ("first, other = sum_logprobs(batch, output)", "loss of actor.train"),
        ("first, other = (batch[key].values.double()", "prepare of actor.train"),
    ],
)
def test_an_exception_names_function_call_and_line(old: str, function: str, tmp_path: Path) -> None:
    file = changed(tmp_path, f"        {old}", f"        {{}}['absent']\n        {old}")
    algorithm = build(file)
    with pytest.raises(UserCodeError) as caught:
        (compare if "ref" in function else learn)(algorithm)
    number = file.read_text().splitlines().index("        {}['absent']") + 1
    assert str(caught.value) == f"algorithm={file} raised in {function}: KeyError: 'absent' ({file}:{number})"
    assert "absent" in caught.value.trace and caught.value.alone


def test_several_numbers_at_each_position_are_as_many_as_declared() -> None:
    call = Call("m.inference", "m", Kind.INFERENCE, ("sequences",), ("ids",), work=("sequences",))
    graph = DataflowGraph([call], [Key("sequences", "int64"), Key("ids", "int32", "sequences", 2)])
    given = Batch((0, 1, 2, 3), {"sequences": SEQUENCES})
    for shape, problem in [
        ((ROWS, 2), None),
        ((ROWS, 3), f"gave values of shape [{ROWS}, 3] as 'ids'; it must be a Ragged of int32 with one row"),
        ((ROWS,), f"gave values of shape [{ROWS}] as 'ids'"),
    ]:
        ids = Ragged(torch.zeros(shape, dtype=torch.int32), SEQUENCES.lengths)
        found = check_outputs({"ids": ids}, [(call, graph)], given)
        assert found is None if problem is None else (found or "").startswith(problem)


def test_a_lost_rank_is_not_blamed_on_the_function_that_waits_for_it(tmp_path: Path) -> None:
    line = '        metrics = Metrics()\n        metrics.mean("score"'
    method = build(changed(tmp_path, line, f"        dp_sum(sign)\n{line}")).method("actor.train")

    def gone(_: Tensor) -> Tensor:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        zeros = Ragged.scalars(torch.zeros(4))
        method.prepare(batch(score=zeros, other_score=zeros), gone)


def test_lack_of_memory_is_not_blamed_on_the_function_where_it_shows(tmp_path: Path) -> None:
    text = 'raise __import__("torch").OutOfMemoryError("all gone")'
    algorithm = build(changed(tmp_path, "return loss, metrics", text))
    with pytest.raises(torch.OutOfMemoryError):
        learn(algorithm)


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("return None", "gave None; it must give a realrl.algorithms.Algorithm, which has graph"),
        ("return {}", "gave a dict; it must give a realrl.algorithms.Algorithm, which has graph"),
    ],
)
def test_what_is_no_algorithm_is_named(new: str, problem: str, tmp_path: Path) -> None:
    file = changed(tmp_path, "    return StatelessAlgorithm(", f"    {new}\n    return StatelessAlgorithm(")
    with pytest.raises(UserError) as caught:
        build(file)
    assert re.fullmatch(
        rf"algorithm online_dpo: methods \({file}:\d+\) {re.escape(problem)}", str(caught.value)
    )


def test_a_method_in_another_file_names_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an algorithm is a package, or takes parts from a module beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts_of_mine.py").write_text("def finish(self):\n    return 1 / 0\n")
    text = "    from parts_of_mine import finish\n\n    def weight("
    algorithm = build(changed(tmp_path, "    def weight(", text))
    with pytest.raises(UserCodeError, match=rf"ZeroDivisionError.*\({tmp_path}/parts_of_mine.py:2\)$"):
        learn(algorithm)
