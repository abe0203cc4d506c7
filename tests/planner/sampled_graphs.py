"""Dataflow graphs of steps for tests of the search: PPO, and small ones with what it does not have."""

import random

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph


def sampled_graph(rng: random.Random) -> DataflowGraph:
    """Sample a step of 2 to 6 calls."""
    return rng.choice(
        [
            _pair,
            _group,
            _two_models,
            _chain,
            lambda: train_graph(minibatches=1, averages=[MovingAverage("ref", "actor", 0.1)]),
            _ppo,
            _scored,
            _verified,
            _tools,
        ]
    )()


def _ppo() -> DataflowGraph:
    return train_graph(minibatches=4)


def _call(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...] = ()) -> Call:
    role, kind = name.split(".")[:2]
    return Call(name, role, Kind(kind), inputs, outputs, work=inputs[:1])


def _keys(*names: str) -> tuple[Key, ...]:
    return tuple(Key(name, "float32", "own" if name in ("x", "s") else "s") for name in names)


def _pair() -> DataflowGraph:
    return DataflowGraph([_call("a.generate", ("x",), ("s",)), _call("a.train", ("s",))], _keys("x", "s"))


def _group() -> DataflowGraph:
    """As in GRPO with old log-probabilities: two calls may share a copy of the actor; nothing waits for reward."""
    calls = [
        _call("a.generate", ("x",), ("s",)),
        _call("r.inference", ("s",), ("f",)),
        _call("a.inference", ("s",), ("l",)),
        _call("k.inference", ("s",), ("g",)),
        _call("a.train", ("s", "l", "f", "g")),
    ]
    return DataflowGraph(calls, _keys("x", "s", "f", "l", "g"))


def _two_models() -> DataflowGraph:
    """Two independent chains that share devices, and a role that is a moving average of another."""
    calls = [
        _call("a.inference", ("x",), ("f",)),
        _call("b.train", ("x",)),
        _call("k.inference", ("x",), ("g",)),
        _call("a.train", ("x", "f")),
    ]
    return DataflowGraph(
        calls,
        (*_keys("x"), Key("f", "float32", "x"), Key("g", "float32", "x")),
        [MovingAverage("k", "b", 0.1)],
    )


def _chain() -> DataflowGraph:
    calls = [
        _call("a.generate", ("x",), ("s",)),
        _call("r.inference", ("s",), ("f",)),
        _call("a.train", ("s", "f")),
    ]
    return DataflowGraph(calls, _keys("x", "s", "f"))


def _function(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...] = ()) -> Call:
    return Call(
        name, None, Kind.FUNCTION, inputs, outputs, work=inputs[:1], function=name, record_fields=True
    )


def _scored() -> DataflowGraph:
    """As in PPO with a reward function: it has time while the reference and the critic infer."""
    calls = [
        _call("a.generate", ("x",), ("s",)),
        _function("score", ("s",), ("f",)),
        _call("r.inference", ("s",), ("l",)),
        _call("c.inference", ("s",), ("v",)),
        _call("a.train", ("s", "l", "v", "f")),
        _call("c.train", ("s", "v", "f")),
    ]
    return DataflowGraph(calls, _keys("x", "s", "f", "l", "v"))


def _verified() -> DataflowGraph:
    """Two functions on one host, one of which nobody waits for, and one that needs what another one says."""
    calls = [
        _call("a.generate", ("x",), ("s",)),
        _function("check", ("s",), ("f",)),
        _function("log", ("s",), ("g",)),
        _call("r.inference", ("s",), ("l",)),
        _function("mix", ("f", "l"), ("m",)),
        _call("a.train", ("s", "m")),
    ]
    return DataflowGraph(calls, _keys("x", "s", "f", "g", "l", "m"))


def _tools() -> DataflowGraph:
    """A function whose rows have lengths of their own, and a role that follows another."""
    calls = [
        _function("draw", ("x",), ("s",)),
        _call("k.inference", ("x",), ("g",)),
        _call("a.inference", ("s",), ("l",)),
        _call("a.train", ("s", "l")),
    ]
    keys = (*_keys("x", "s", "l"), Key("g", "float32", "x"))
    return DataflowGraph(calls, keys, [MovingAverage("k", "a", 0.1)])


def late_lengths() -> DataflowGraph:
    """Rows that wait for the lengths of later ones, by which the items of their reader are divided."""
    calls = [
        _call("k.inference", ("x",), ("g",)),
        _call("c.train", ("x",)),
        _call("a.generate", ("x",), ("s",)),
        _call("a.train", ("s", "g")),
    ]
    return DataflowGraph(calls, (*_keys("x", "s"), Key("g", "float32", "x")))
