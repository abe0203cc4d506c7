"""Keys and calls that algorithms share which sample from a policy. No torch.

Keys that are `like sequences` have a number per token, at the token's own place: `logprobs[t]` is the
log-probability of token t given those before it.
"""

from collections.abc import Iterable

from realrl.algorithms.rewards.config import Rewards
from realrl.algorithms.rewards.graph import list_score_keys, score_sequences
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph

KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("finished", "float32", "one"),
    Key("logprobs", "float32", "sequences"),
    Key("ref_logprobs", "float32", "sequences"),
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


def make_graph(
    calls: Iterable[Call], keys: Iterable[Key] = KEYS, averages: Iterable[MovingAverage] = ()
) -> DataflowGraph:
    """Make a graph of calls, with those of `keys` that they use."""
    calls = tuple(calls)
    used = {key for call in calls for key in (*call.inputs, *call.outputs)}
    return DataflowGraph(calls, [key for key in keys if key.name in used], averages)


def make_eval_graph(*, reward: Rewards | None = None, reference: bool = True) -> DataflowGraph:
    """Sample and score, and compare with the `reference` if there is one; `reward` as in `score_sequences`.

    The inference calls take what their metrics need besides `sequences`.
    """
    calls = [GENERATE, *score_sequences(reward, ("prompt_length", "finished"))]
    if reference:
        calls.append(infer_on_sequences("ref.inference", "ref_logprobs", ("prompt_length", "logprobs")))
    return make_graph(calls, (*KEYS, *list_score_keys(reward)))
