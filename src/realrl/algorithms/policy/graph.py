"""Keys and calls that algorithms share which sample from a policy. No torch.

Keys that are `like sequences` have a number per token, at the token's own place: `logprobs[t]` is the
log-probability of token t given those before it.
"""

from collections.abc import Iterable

from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph

KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("finished", "float32", "one"),
    Key("logprobs", "float32", "sequences"),
    Key("ref_logprobs", "float32", "sequences"),
    Key("score", "float32", "one"),
)

GENERATE = Call(
    "actor.generate",
    "actor",
    Kind.GENERATE,
    ("prompts",),
    ("sequences", "logprobs", "prompt_length", "finished"),
    work=("prompts",),
)


def infer_on_sequences(name: str, output: str, extra: tuple[str, ...] = ()) -> Call:
    """Make the inference call `name`, ROLE.inference, on prompts with answers; `extra` are further inputs."""
    role, _, kind = name.partition(".")
    return Call(name, role, Kind(kind), ("sequences", *extra), (output,), work=("sequences",))


def score_sequences(function: str | None, extra: tuple[str, ...] = (), *, prefix: str = "") -> Call:
    """Make the call that scores sequences by a reward model, or by the function of this reference.

    `prefix` is that of the keys of the sequences, and ends the name of the call.
    """
    name = "reward.inference" if function is None else "reward.function"
    sequences = f"{prefix}sequences"
    # A function sees texts, which are cut where the prompt ends.
    texts = () if function is None else (f"{prefix}prompt_length",)
    return Call(
        f"{name}_{prefix}".rstrip("_"),
        "reward" if function is None else None,
        Kind.INFERENCE if function is None else Kind.FUNCTION,
        tuple(dict.fromkeys((sequences, *texts, *(f"{prefix}{key}" for key in extra)))),
        (f"{prefix}score",),
        work=(sequences,),
        function=function,
        record_fields=function is not None,
    )


def make_graph(
    calls: Iterable[Call], keys: Iterable[Key] = KEYS, averages: Iterable[MovingAverage] = ()
) -> DataflowGraph:
    """Make a graph of calls, with those of `keys` that they use."""
    calls = tuple(calls)
    used = {key for call in calls for key in (*call.inputs, *call.outputs)}
    return DataflowGraph(calls, [key for key in keys if key.name in used], averages)


def make_eval_graph(*, reward: str | None = None, reference: bool = True) -> DataflowGraph:
    """Sample and score, and compare with the `reference` if there is one; `reward` as in `score_sequences`.

    The inference calls take what their metrics need besides `sequences`.
    """
    calls = [GENERATE, score_sequences(reward, ("prompt_length", "finished"))]
    if reference:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs", ("prompt_length", "logprobs")))
    return make_graph(calls)
