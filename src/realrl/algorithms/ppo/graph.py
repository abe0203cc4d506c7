"""PPO: four roles, six calls. A function may take the place of the reward model.

Keys that are `like sequences` have a number per token, at the token's own place: `logprobs[t]` is the
log-probability of token t given those before it, `values[t]` the critic's value of the state after token t.
"""

from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph

KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("finished", "float32", "one"),
    Key("logprobs", "float32", "sequences"),
    Key("ref_logprobs", "float32", "sequences"),
    Key("values", "float32", "sequences"),
    Key("score", "float32", "one"),
)
EXPERIENCE = ("sequences", "prompt_length", "finished", "logprobs", "ref_logprobs", "values", "score")
GENERATE = Call(
    "actor.generate",
    "actor",
    Kind.GENERATE,
    ("prompts",),
    ("sequences", "logprobs", "prompt_length", "finished"),
    work=("prompts",),
)


def _on_sequences(name: str, output: str, extra: tuple[str, ...] = ()) -> Call:
    role, _, kind = name.partition(".")
    return Call(name, role, Kind(kind), ("sequences", *extra), (output,), work=("sequences",))


def _reward(function: str | None, extra: tuple[str, ...] = ()) -> Call:
    """Scores sequences by a reward model, or by the function of this reference."""
    if function is None:
        return _on_sequences("reward.inference", "score", extra)
    # It sees texts, which are cut where the prompt ends.
    inputs = tuple(dict.fromkeys(("sequences", "prompt_length", *extra)))
    return Call(
        "reward.function",
        None,
        Kind.FUNCTION,
        inputs,
        ("score",),
        work=("sequences",),
        function=function,
        record_fields=True,
    )


def train_graph(
    *,
    minibatches: int,
    ref_ema: float | None = None,
    same_start: bool = False,
    reward: str | None = None,
) -> DataflowGraph:
    """One step: sample, score, train. `minibatches` are optimizer steps per pass over the samples; with
    `ref_ema` the reference follows the actor at this rate, from the same weights on if they have the
    `same_start`; `reward` is the reference of a function that scores."""
    calls = [
        GENERATE,
        _reward(reward),
        _on_sequences("ref.inference", "ref_logprobs"),
        _on_sequences("critic.inference", "values"),
    ]
    for role in ("actor", "critic"):
        name = f"{role}.train"
        calls.append(Call(name, role, Kind.TRAIN, EXPERIENCE, work=("sequences",), minibatches=minibatches))
    averages = [] if ref_ema is None else [MovingAverage("ref", "actor", ref_ema, same_start)]
    return DataflowGraph(calls, KEYS, averages)


def eval_graph(*, reward: str | None = None) -> DataflowGraph:
    """Sample and score. The inference calls take what their metrics need besides `sequences`."""
    calls = [
        GENERATE,
        _reward(reward, ("prompt_length", "finished")),
        _on_sequences("ref.inference", "ref_logprobs", ("prompt_length", "logprobs")),
    ]
    used = {key for call in calls for key in (*call.inputs, *call.outputs)}
    return DataflowGraph(calls, [key for key in KEYS if key.name in used])
