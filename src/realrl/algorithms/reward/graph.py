"""Reward modelling: one call, on preference pairs, ranked answers, or answers in steps. No torch."""

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

PAIR = ("chosen", "rejected")
PAIR_KEYS = (
    *(Key(name, "int64") for name in PAIR),
    Key("pairs_of_prompt", "int64", "one"),
    Key("margin", "float32", "one"),
    *(Key(f"{name}_score", "float32", "one") for name in PAIR),
)
"""`chosen` and `rejected` are whole sequences, prompt included; a pair weighs 1 / `pairs_of_prompt`."""

STEPS = ("tokens", "step_ends", "step_labels")
STEP_KEYS = (
    Key("tokens", "int64"),
    Key("step_ends", "int64"),
    Key("step_labels", "int64", "step_ends"),
    Key("step_scores", "float32", "step_ends"),
)
"""`step_ends` are the places of the last tokens of steps in `tokens`, a prompt with its answer."""


def name_answers(count: int) -> tuple[str, ...]:
    """Name the keys of ranked answers: whole sequences, prompt included, the best first."""
    return tuple(f"answer_{i}" for i in range(count))


def name_scores(count: int) -> tuple[str, ...]:
    """Name the keys of the scores of ranked answers."""
    return tuple(f"score_{i}" for i in range(count))


def make_reward_graph(keys: tuple[Key, ...], inputs: tuple[str, ...], work: tuple[str, ...]) -> DataflowGraph:
    """Make the training call; `keys` are those that it may use."""
    return _make_graph(keys, Call("reward.train", "reward", Kind.TRAIN, inputs, work=work))


def make_reward_eval_graph(
    keys: tuple[Key, ...], inputs: tuple[str, ...], work: tuple[str, ...], outputs: tuple[str, ...]
) -> DataflowGraph:
    """Make the call that scores."""
    return _make_graph(keys, Call("reward.inference", "reward", Kind.INFERENCE, inputs, outputs, work=work))


def _make_graph(keys: tuple[Key, ...], call: Call) -> DataflowGraph:
    return DataflowGraph([call], [key for key in keys if key.name in (*call.inputs, *call.outputs)])


def list_pair_inputs(margins: bool) -> tuple[str, ...]:
    """List the inputs of calls on pairs."""
    return (*PAIR, "pairs_of_prompt", *(("margin",) if margins else ()))


def make_ranking_keys(count: int) -> tuple[Key, ...]:
    """Make the keys of ranked answers."""
    scores = (Key(name, "float32", "one") for name in name_scores(count))
    return (*(Key(name, "int64") for name in name_answers(count)), *scores)
