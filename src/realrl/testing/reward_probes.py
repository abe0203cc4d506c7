"""Probe reward functions: are they deterministic, does a score depend on its completion alone, what breaks them?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from realrl.algorithms.base.method import FunctionInput, FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.config.errors import UserError
from realrl.config.user_code import name_function
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import ACTION_MASK
from realrl.dataflow.environment import OUTPUTS as ENVIRONMENT_KEYS
from realrl.plan.cluster import Cluster
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.environments import open_environments
from realrl.runtime.prepare.inputs import (
    RecordLoader,
    load_functions,
    load_shared_tokenizer,
    load_stop_token_ids,
)
from realrl.runtime.prepare.job import make_job
from realrl.testing.findings import Finding

_LONG = 4000
"""Number of tokens of a very long answer."""
_ITEMS = 8
"""Maximum number of completions that are scored."""


def probe_rewards(experiment: Experiment, tokens: Mapping[str, Any]) -> Iterator[Finding]:
    """Probe each reward function of a recipe with some of its records. Yields a finding per probe.

    `tokens`: the sequences that a run of the recipe has sampled, see `testing.ranks.sampled`.
    """
    job = make_job(experiment, Cluster(1, 1))
    calls = [call for call in job.train.graph.functions if call.record_fields]
    if not calls:
        return
    algorithm = build_algorithm(experiment)
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    functions = load_functions(algorithm, [job.train], 0)
    environments = open_environments(job, 0, tokenizer, stop_token_ids)
    loader = RecordLoader(experiment, tokenizer, stop_token_ids, functions, environments=environments)
    records = loader.load_train(job.train)
    if environments is not None:
        environments.close()
    count = min(_ITEMS, len(records))
    prompts = [row.tolist() for row in records.batch(range(count))["prompts"].rows()]
    answers = [*_list_answers(tokens)] or [[token] for token in range(count)]
    fields = records.further_fields(range(count))
    origins = records.list_origins(range(count))

    def make_input(prefix: str, ids: Sequence[int], written: Callable[[int], list[int]]) -> FunctionInput:
        """Make the input with the answer `written(i)` to the i-th prompt, for each i in `ids`."""
        rows = [[*prompts[i], *written(i)] for i in ids]
        cuts = torch.tensor([len(prompts[i]) for i in ids])
        zeros = Ragged.scalars(torch.zeros(len(ids)))
        made = {
            "sequences": Ragged.of(rows, dtype=torch.int64),
            "prompt_length": Ragged.scalars(cuts),
            "finished": Ragged.scalars(torch.ones(len(ids))),
        }
        if environments is not None:  # trajectories of one turn, without a reward of the environment
            made |= dict.fromkeys(ENVIRONMENT_KEYS, zeros)
            masks = [[0] * len(prompts[i]) + [1] * len(written(i)) for i in ids]
            made[ACTION_MASK] = Ragged.of(masks, dtype=torch.int16)
        batch = Batch(tuple(range(len(ids))), {f"{prefix}{name}": values for name, values in made.items()})
        chosen = {name: [values[i] for i in ids] for name, values in fields.items()}
        return FunctionInput(batch, chosen, tokenizer, [origins[i] for i in ids])

    def answer(i: int) -> list[int]:
        return answers[i % len(answers)]

    def quote(i: int) -> list[int]:
        """Write the texts in the columns of the i-th record as an answer."""
        text = "\n".join(_list_texts([values[i] for values in fields.values()]))
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids or [stop_token_ids[0]]

    probed: set[str] = set()
    for call in calls:
        assert call.function is not None, "functions have a reference"
        method = cast(FunctionMethod, functions[call.name])
        prefix = next((key.removesuffix("sequences") for key in call.inputs if key.endswith("sequences")), "")
        # Calls that differ only in the prefix of their keys have the same function.
        name = call.name.removesuffix(f"_{prefix}".rstrip("_"))
        if name in probed:
            continue
        probed.add(name)
        yield from _probe(
            name_function(call.function),
            method,
            call.outputs[0],
            count,
            partial(make_input, prefix),
            answer,
            stop_token_ids[0],
            quote,
        )


def _probe(
    name: str,
    method: FunctionMethod,
    key: str,
    count: int,
    make_input: Callable[[Sequence[int], Callable[[int], list[int]]], FunctionInput],
    answer: Callable[[int], list[int]],
    stop: int,
    quote: Callable[[int], list[int]],
) -> Iterator[Finding]:
    everyone = range(count)

    def score(ids: Sequence[int], written: Callable[[int], list[int]] = answer) -> list[float]:
        outputs, _ = method.call(make_input(ids, written))
        return [float(value) for value in outputs[key].values]

    def look(check: str, reason: str, found: Callable[[], list[float]], expected: list[float]) -> Finding:
        try:
            scores = found()
        except UserError as error:
            return Finding(f"{name}: {check}", str(error))
        for i, (ours, theirs) in enumerate(zip(scores, expected, strict=True)):
            if ours != theirs and not (ours != ours and theirs != theirs):
                text = f"completion {i} scores {ours:.6g}, and {theirs:.6g} before"
                return Finding(f"{name}: {check}", text, reason)
        return Finding(f"{name}: {check}")

    try:
        first = score(everyone)
    except UserError as error:
        yield Finding(f"{name}: called", str(error))
        return
    yield look(
        "called twice", "it is not deterministic: seed it, or make it depend on its arguments alone",
        lambda: score(everyone), first,
    )  # fmt: skip
    others = (
        "a score depends on the other completions of the list, whose number and order differ between plans"
    )
    yield look("completions in another order", others, lambda: score(everyone[::-1])[::-1], first)
    yield look("one completion at a time", others, lambda: [score([i])[0] for i in everyone], first)
    seen = {*first}
    for check, written in (
        ("empty completions", lambda i: [stop]),
        (f"completions of {_LONG} tokens", lambda i: (answer(i) * _LONG)[:_LONG]),
        ("completions that quote the columns of their records", quote),
    ):
        try:
            seen |= {*score(everyone, written)}
        except UserError as error:
            yield Finding(f"{name}: {check}", str(error), "such completions occur in training")
        else:
            yield Finding(f"{name}: {check}")
    equal = f"all of them score {first[0]:.6g}: sampled ones, and those of the lines above"
    yield Finding(
        f"{name}: some completions score better than others", notes=(equal,) if len(seen) == 1 else ()
    )


def _list_answers(tokens: Mapping[str, Any]) -> Iterator[list[int]]:
    """List the sampled answers of the first step."""
    for item, rows in tokens.items():
        if item.startswith("0/") and not item.endswith(("prompt", "mask")):
            for row, prompt in zip(rows, tokens[f"{item} prompt"], strict=True):
                yield row[int(prompt[0]) :]


def _list_texts(value: Any) -> Iterator[str]:
    """List the texts and numbers in a value of a record."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _list_texts(inner)
    elif value is not None:
        yield str(value)
