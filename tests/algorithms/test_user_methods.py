"""What a user's own methods raise or give wrong is one error message: the example, with a mistake in it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realrl.algorithms.build import build_algorithm
from realrl.algorithms.method import ModelOutput
from realrl.algorithms.output_checks import check_outputs
from realrl.config.errors import UserCodeError, UserError
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.load import parse_experiment
from tests.conftest import SHAPE

EXAMPLE = (Path(__file__).parents[2] / "examples" / "best_of_n.py").read_text(encoding="utf-8")
RECIPE = {
    "run_dir": "r",
    "data": {"train": "t", "batch": 2},
    "models": {"actor": {"shape": SHAPE}, "reward": {"shape": SHAPE}},
    "best_of_n": {"samples": 2},
}
SEQUENCES = Ragged.of([[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2]])
ROWS = sum(SEQUENCES.lengths)
SCORED = "Ragged.scalars(last_of_rows(output.values, output.lengths).float())"


def changed(tmp_path: Path, old: str, new: str) -> Path:
    assert EXAMPLE.count(old) == 1, old
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.replace(old, new), encoding="utf-8")
    return file


def batch(**fields: Ragged) -> Batch:
    return Batch((0, 1, 2, 3), {"sequences": SEQUENCES, **fields})


def score(algorithm: Any) -> None:
    """The calls of an inference method."""
    method = algorithm.method("reward.inference")
    method.sequences(batch())
    outputs = method.outputs(batch(), ModelOutput(SEQUENCES.lengths, values=torch.arange(float(ROWS))))
    method.metrics(batch().with_fields(**outputs))


def learn(algorithm: Any) -> None:
    """The calls of a train method."""
    method = algorithm.method("actor.train")
    scored = batch(
        score=Ragged.scalars(torch.arange(4.0)),
        prompt_length=Ragged.scalars(torch.ones(4, dtype=torch.int64)),
    )
    prepared, _ = method.prepare(scored, lambda tensor: tensor)
    method.sequences(prepared)
    method.weight(prepared)
    logprobs = -torch.ones(ROWS, requires_grad=True)
    method.loss(prepared, ModelOutput(SEQUENCES.lengths, logprobs=logprobs))
    assert method.head_scale == 1.0 and not method.entropy and method.epochs == 1
    method.stop({})
    method.finish()
    algorithm.notes({})
    algorithm.state_dict()


def build(file: Path) -> Any:
    return build_algorithm(parse_experiment({**RECIPE, "algorithm": str(file)}))


def test_the_example_passes_every_check(tmp_path: Path) -> None:
    algorithm = build(changed(tmp_path, "The description:", "The description:"))
    score(algorithm)
    learn(algorithm)


PAIR = "return batch.with_fields(best=Ragged.scalars(is_best)), metrics"
WEIGHT = 'return float((answers.counts * batch["best"].values).sum())'
CASES: dict[str, tuple[str, str, str, str]] = {
    "no outputs": (
        f'return {{"score": {SCORED}}}',
        "pass",
        "outputs of reward.inference",
        "gave None; it must give a dict of 'score', a Ragged each",
    ),
    "misspelt key": (
        f'{{"score": {SCORED}}}',
        f'{{"scores": {SCORED}}}',
        "outputs of reward.inference",
        "gave no key 'score'; it must give a dict of 'score'",
    ),
    "unknown key": (
        f'{{"score": {SCORED}}}',
        f'{{"score": {SCORED}, "more": 1}}',
        "outputs of reward.inference",
        "gave a key 'more', which the call does not have",
    ),
    "tensor": (
        f'{{"score": {SCORED}}}',
        '{"score": output.values}',
        "outputs of reward.inference",
        "gave a tensor of shape [11] and type float32 as 'score'; it must be a Ragged of float32 with one row for"
        " each of 4 items",
    ),
    "too few rows": (
        ".float())}",
        ".float()[1:])}",
        "outputs of reward.inference",
        "gave 3 rows of 'score'; it must be a Ragged",
    ),
    "too many rows": (
        SCORED,
        "Ragged.scalars(output.values)",
        "outputs of reward.inference",
        "gave 11 rows of 'score'; it must be a Ragged",
    ),
    "too many numbers": (
        SCORED,
        "Ragged(output.values, output.lengths)",
        "outputs of reward.inference",
        "gave 3 numbers for row 0 of 'score'; the graph declares one number per item",
    ),
    "wrong type": (
        ".float())}",
        ".double())}",
        "outputs of reward.inference",
        "gave 'score' as float64; it must be a Ragged of float32",
    ),
    "batch alone": (PAIR, PAIR.removesuffix(", metrics"), "prepare of actor.train", "gave a Batch; it must"),
    "other items": (
        PAIR,
        "return batch.select([0]), metrics",
        "prepare of actor.train",
        "gave a Batch of 1 items, not the 4 of its argument in their order",
    ),
    "metrics that are none": (
        PAIR,
        "return batch, {}",
        "prepare of actor.train",
        "gave a dict; it must give Metrics",
    ),
    "vector in metrics": (
        'metrics.mean("best_score", (batch["score"].values * is_best).double().sum()',
        'metrics.mean("best_score", (batch["score"].values * is_best)',
        "prepare of actor.train",
        "gave a tensor of shape [4] and type float64 for the metric 'best_score'",
    ),
    "text as weight": (
        WEIGHT,
        'return "many"',
        "weight of actor.train",
        "gave 'many'; it must give a finite number",
    ),
    "vector as weight": (
        WEIGHT,
        "return answers.counts",
        "weight of actor.train",
        "gave a tensor of shape [4] and type int64; it must give a finite number, 0 or above",
    ),
    "weight that is not finite": (
        WEIGHT,
        "return float('nan')",
        "weight of actor.train",
        "gave nan; it must",
    ),
    "loss alone": ("return loss, metrics", "return loss", "loss of actor.train", "gave a tensor of shape []"),
    "loss per token": (
        "* learnt).sum()",
        "* learnt)",
        "loss of actor.train",
        "gave a tensor of shape [7] and type float32 as the loss; it must be a scalar",
    ),
    "loss without gradient": (
        "return loss, metrics",
        "return loss.detach(), metrics",
        "loss of actor.train",
        "gave a loss without gradient; it must be computed from the model's output",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_output_is_one_message_with_function_call_and_line(case: str, tmp_path: Path) -> None:
    old, new, function, problem = CASES[case]
    # The loss per token is added up where it is reported.
    file = changed(tmp_path, old, new)
    if case == "loss per token":
        text = file.read_text().replace('metrics.mean("loss", loss,', 'metrics.mean("loss", loss.sum(),')
        file.write_text(text)
    algorithm = build(file)
    with pytest.raises(UserCodeError) as caught:
        (score if "reward" in function else learn)(algorithm)
    message = str(caught.value)
    name = function.partition(" ")[0]
    place = re.search(rf"^algorithm={file}: {function} \({file}:(\d+)\) (.*)$", message)
    assert place is not None and place[2].startswith(problem), message
    assert file.read_text().splitlines()[int(place[1]) - 1].lstrip().startswith(f"def {name}(")
    assert caught.value.alone and "\n" not in message


@pytest.mark.parametrize(
    ("old", "function"),
    [
        ('return {"score": Ragged', "outputs of reward.inference"),
        ('learnt = batch["best"]', "loss of actor.train"),
        ("scores = gather_samples(", "prepare of actor.train"),
    ],
)
def test_an_exception_names_function_call_and_line(old: str, function: str, tmp_path: Path) -> None:
    file = changed(tmp_path, f"        {old}", f"        {{}}['absent']\n        {old}")
    algorithm = build(file)
    with pytest.raises(UserCodeError) as caught:
        (score if "reward" in function else learn)(algorithm)
    number = file.read_text().splitlines().index("        {}['absent']") + 1
    assert str(caught.value) == f"algorithm={file} raised in {function}: KeyError: 'absent' ({file}:{number})"
    assert "absent" in caught.value.trace and caught.value.alone


def test_several_numbers_at_each_position_are_as_many_as_declared() -> None:
    call = Call("m.inference", "m", Kind.INFERENCE, ("sequences",), ("ids",), work=("sequences",))
    graph = DataflowGraph([call], [Key("sequences", "int64"), Key("ids", "int32", "sequences", 2)])
    for shape, problem in [
        ((ROWS, 2), None),
        ((ROWS, 3), f"gave values of shape [{ROWS}, 3] as 'ids'; it must be a Ragged of int32 with one row"),
        ((ROWS,), f"gave values of shape [{ROWS}] as 'ids'"),
    ]:
        ids = Ragged(torch.zeros(shape, dtype=torch.int32), SEQUENCES.lengths)
        found = check_outputs({"ids": ids}, [(call, graph)], batch())
        assert found is None if problem is None else (found or "").startswith(problem)


def test_a_lost_rank_is_not_blamed_on_the_function_that_waits_for_it(tmp_path: Path) -> None:
    method = build(changed(tmp_path, "The description:", "The description:")).method("actor.train")

    def gone(_: Tensor) -> Tensor:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        method.prepare(batch(score=Ragged.scalars(torch.zeros(4))), gone)


def test_lack_of_memory_is_not_blamed_on_the_function_where_it_shows(tmp_path: Path) -> None:
    text = 'raise __import__("torch").OutOfMemoryError("all gone")'
    algorithm = build(changed(tmp_path, "return loss, metrics", text))
    with pytest.raises(torch.OutOfMemoryError):
        learn(algorithm)


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("return None", "gave None; it must give an algorithms.method.Algorithm, which has graph"),
        ("return {}", "gave a dict; it must give an algorithms.method.Algorithm, which has graph"),
    ],
)
def test_what_is_no_algorithm_is_named(new: str, problem: str, tmp_path: Path) -> None:
    file = changed(tmp_path, "    return StatelessAlgorithm(", f"    {new}\n    return StatelessAlgorithm(")
    with pytest.raises(UserError) as caught:
        build(file)
    assert re.fullmatch(
        rf"algorithm best_of_n: methods \({file}:\d+\) {re.escape(problem)}", str(caught.value)
    )


def test_a_method_in_another_file_names_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an algorithm is a package, or takes parts from a module beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts_of_mine.py").write_text("def finish(self):\n    return 1 / 0\n")
    text = "    from parts_of_mine import finish\n\n    def weight("
    algorithm = build(changed(tmp_path, "    def weight(", text))
    with pytest.raises(UserCodeError, match=rf"ZeroDivisionError.*\({tmp_path}/parts_of_mine.py:2\)$"):
        learn(algorithm)
