"""A plan: a placement for every call of a dataflow graph, and its file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import PositiveInt, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import explain, nearest
from realrl.config.yaml_file import read_yaml
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy


class _Entry(Settings):
    """One call in a plan file."""

    mesh: str | int
    """Ranks, as FIRST-LAST or one rank."""
    dp: PositiveInt
    """Degree of data parallelism."""
    tp: PositiveInt = 1
    """Degree of tensor parallelism."""
    pp: PositiveInt = 1
    """Degree of pipeline parallelism."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one forward pass; the recipe's number when not given."""
    sequence_parallel: bool = False
    """Whether tensor ranks also divide tokens between them where every one would do the same work."""


class _File(Settings):
    """A plan file. Entries are validated one by one, so that errors name the call."""

    cluster: str
    """Devices, as nodes x devices per node."""
    calls: dict[str, Any]
    """Name of a call -> where and how it runs."""


@dataclass(frozen=True)
class Plan:
    """Where and how each call runs. `placements` must not be changed."""

    cluster: Cluster
    placements: Mapping[str, Placement]

    def __getitem__(self, call: str) -> Placement:
        """The placement of a call; KeyError if the plan has none."""
        return self.placements[call]

    def check(self, graph: DataflowGraph) -> None:
        """UserError unless the plan places exactly the calls of `graph`, on meshes of its cluster."""
        names = [call.name for call in graph.calls]
        for name in self.placements:
            if name not in names:
                hint = nearest(name, names)
                suffix = f"did you mean {hint}?" if hint else f"the calls are {', '.join(names)}"
                raise UserError(f"plan: there is no call {name}; {suffix}")
        for name in names:
            if name not in self.placements:
                raise UserError(f"plan: call {name} has no placement")
            self._check_placement(name, self[name])

    def _check_placement(self, name: str, placement: Placement) -> None:
        try:
            placement.mesh.check(self.cluster)
        except UserError as error:
            raise UserError(f"plan: {name}: {error}") from None

    def evaluation(self, eval_graph: DataflowGraph, graph: DataflowGraph) -> "Plan":
        """The plan of an evaluation whose roles are those of `graph`, the graph this plan is for.

        An evaluation call runs where the call of the same name runs. One that the training step does not have
        runs where a call of its role runs: one of the same kind, else one that does not generate.
        """
        placements = {}
        for call in eval_graph.calls:
            like = min(
                graph.role_calls(call.role),
                key=lambda c: (c.name != call.name, c.kind is not call.kind, c.kind is Kind.GENERATE),
            )
            placements[call.name] = self[like.name]
        return Plan(self.cluster, placements)

    def to_text(self) -> str:
        """The plan file's text."""
        calls = {
            name: {
                "mesh": str(placement.mesh),
                "dp": placement.strategy.dp,
                "tp": placement.strategy.tp,
                "pp": placement.strategy.pp,
                "micro_batch_tokens": placement.strategy.micro_batch_tokens,
                **({"sequence_parallel": True} if placement.strategy.sequence_parallel else {}),
            }
            for name, placement in self.placements.items()
        }
        document = {"cluster": str(self.cluster), "calls": calls}
        return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)

    def save(self, path: str | Path) -> None:
        """Write the plan file that `load` reads."""
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, micro_batch_tokens: int = 8192) -> "Plan":
        """Read a plan file; `micro_batch_tokens` is for calls that give none. Errors name file and call."""
        content = read_yaml(str(path))
        with _mistakes_in(f"plan file {path}", _File):
            file = _File.model_validate(content)
            cluster = Cluster.parse(file.cluster)
        placements = {}
        for name, entry in file.calls.items():
            with _mistakes_in(f"plan file {path}: {name}", _Entry):
                placements[name] = _placement(_Entry.model_validate(entry), micro_batch_tokens)
        return cls(cluster, placements)


@contextmanager
def _mistakes_in(where: str, cls: type[Settings]) -> Iterator[None]:
    """Say where a mistake is, whoever finds it; cls: what is being validated."""
    try:
        yield
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, cls)}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _placement(entry: _Entry, micro_batch_tokens: int) -> Placement:
    tokens = entry.micro_batch_tokens or micro_batch_tokens
    strategy = Strategy(
        entry.dp,
        entry.tp,
        entry.pp,
        micro_batch_tokens=tokens,
        sequence_parallel=entry.sequence_parallel,
    )
    return Placement(Mesh.parse(str(entry.mesh)), strategy)
