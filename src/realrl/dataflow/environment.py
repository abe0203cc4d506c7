"""Environments in a graph: what generate calls produce beside their sequences, and which calls read it."""

from dataclasses import replace

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

ACTION_MASK = "action_mask"
"""Key with 1 for each token that the model sampled, and 0 for tokens of the prompt and of the environment."""
TURN_REWARDS = "turn_rewards"
"""Key with the reward of each turn of the model, at the last token of the turn, and 0 for all other tokens."""
ENVIRONMENT_REWARD = "environment_reward"
"""Key with the reward that the environment gave to a trajectory; NaN if it gave none."""
TURNS = "turns"
"""Key with the number of turns of the model."""
FAILED_CALLS = "failed_calls"
"""Key with the number of tool calls that failed, by a mistake of the model or of the tool."""
ENVIRONMENT_FAILED = "environment_failed"
"""Key with 1 for a trajectory whose environment failed, and that counts for nothing; 0 for all others."""

TRAJECTORY = "trajectory"
"""Field of a samples file with the parts of a trajectory. The other fields have the names of the keys above."""

OUTPUTS = (ACTION_MASK, TURN_REWARDS, ENVIRONMENT_REWARD, TURNS, FAILED_CALLS, ENVIRONMENT_FAILED)
"""Keys that a generate call has with an environment. The call's prefix goes in front of them."""


def add_environment(graph: DataflowGraph) -> DataflowGraph:
    """Let generate calls run in an environment.

    Calls that read the length of prompts then also read which tokens are actions. Calls that train also read the
    rewards of turns. Functions and calls that score also read the numbers that the environment gives to each
    trajectory.
    """
    calls = {call.name: call for call in graph.calls}
    keys = [*graph.keys.values()]
    for call in graph.calls:
        if call.kind is not Kind.GENERATE:
            continue
        mask, turns, *numbers = (f"{call.prefix}{name}" for name in OUTPUTS)
        keys += [
            Key(mask, "int16", f"{call.prefix}sequences"),
            Key(turns, "float32", f"{call.prefix}sequences"),
            Key(numbers[0], "float64", "one"),
            *(Key(number, "float32", "one") for number in numbers[1:]),
        ]
        calls[call.name] = replace(call, outputs=(*call.outputs, mask, turns, *numbers), record_fields=True)
        for other in graph.calls:
            if other.kind is Kind.GENERATE or f"{call.prefix}sequences" not in other.inputs:
                continue
            masked = [mask] if f"{call.prefix}prompt_length" in other.inputs else []
            scored = numbers if _scores(other) else [turns] if other.kind is Kind.TRAIN else []
            reader = calls[other.name]
            calls[other.name] = replace(reader, inputs=(*reader.inputs, *masked, *scored))
    return DataflowGraph(calls.values(), keys, graph.averages)


def _scores(call: Call) -> bool:
    return call.kind is Kind.FUNCTION or call.role == "reward"
