"""Mesh and strategy of one call."""

import re
from dataclasses import dataclass
from typing import Literal

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster

Dtype = Literal["float32", "mixed", "bfloat16"]

DTYPES: dict[str, Dtype] = {"float32": "float32", "mixed": "mixed", "bfloat16": "bfloat16"}
"""Data types of parameters, by name."""

ZERO_STAGES = (1, 2, 3)
"""Stages of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054)."""

ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "mixed": 4, "bfloat16": 2}


@dataclass(frozen=True, order=True)
class Mesh:
    """A run of `size` consecutive ranks from `first` on: of one node, or from one node into others."""

    first: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, ascending."""
        return tuple(range(self.first, self.first + self.size))

    def overlaps(self, other: "Mesh") -> bool:
        """Check whether the two share a rank."""
        return self.first < other.first + other.size and other.first < self.first + self.size

    def check(self, cluster: Cluster) -> None:
        """Check that the mesh lies inside a cluster; else UserError."""
        if self.first < 0 or self.size < 1 or self.first + self.size > cluster.size:
            raise UserError(f"mesh {self} lies outside the {cluster.size} devices of cluster {cluster}")

    def nodes(self, cluster: Cluster) -> Cluster:
        """Find the nodes of `cluster` under the mesh, each with so many devices as the mesh has of it."""
        return cluster.part(self.first, self.size)

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Read `FIRST-LAST` or a single rank; UserError for anything else."""
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UserError(f"mesh {text!r} is not understood; write FIRST-LAST, for example 0-7")
        return cls(int(match[1]), int(match[2] or match[1]) - int(match[1]) + 1)

    def __str__(self) -> str:
        return str(self.first) if self.size == 1 else f"{self.first}-{self.first + self.size - 1}"


@dataclass(frozen=True, order=True, kw_only=True)
class Strategy:
    """Degrees of data, tensor and pipeline parallelism, and the micro-batch size in tokens."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch_tokens: int = 8192
    sequence_parallel: bool = False
    """Whether TP ranks also split tokens in the layers that they would otherwise replicate."""
    dtype: Dtype | None = None
    """Data type of the parameters; None for the role's own. Another one is another layout, with a copy."""
    recompute: bool = False
    """Whether training checkpoints activations: keeps the inputs of layers and recomputes the rest."""
    zero: int = 1
    """Stage of ZeRO: ranks share out optimizer state (1), gradients, too (2), or parameters, too (3)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"strategy: {name}={getattr(self, name)} must be at least 1")
        if self.zero not in ZERO_STAGES:
            raise UserError(f"strategy: zero={self.zero} is none of the stages 1, 2 and 3")
        if self.zero > 1 and self.dp == 1:
            raise UserError(
                f"strategy: zero={self.zero} is shared out by data-parallel ranks, and dp=1 is a single one; leave"
                " zero out, or set dp to at least 2"
            )

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks that store the same parameters."""
        return 1 if self.shards_parameters else self.dp

    @property
    def shards_parameters(self) -> bool:
        """Whether each data-parallel rank stores a part of the parameters, and gathers the rest layer by layer."""
        return self.zero == 3

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of its settings besides degrees and micro-batches, where they are not what is usual."""
        given = {
            "sequence parallel": self.sequence_parallel,
            "recompute": self.recompute,
            f"ZeRO-{self.zero}": self.zero > 1,
            str(self.dtype): self.dtype is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def size(self) -> int:
        """Number of devices the strategy fills."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, order=True)
class Placement:
    """Mesh and strategy of a call. Ranks of the mesh are counted pipeline-major: pp, then dp, then tp."""

    mesh: Mesh
    strategy: Strategy

    def __post_init__(self) -> None:
        if self.mesh.size != self.strategy.size:
            s = self.strategy
            raise UserError(
                f"dp={s.dp} tp={s.tp} pp={s.pp} needs {s.size} devices, "
                f"but mesh {self.mesh} has {self.mesh.size}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh."""
        return self.mesh.ranks

    def rank(self, *, dp: int, tp: int = 0, pp: int = 0) -> int:
        """Find the global rank at a coordinate."""
        s = self.strategy
        return self.mesh.first + (pp * s.dp + dp) * s.tp + tp

    def dp_index(self, rank: int) -> int:
        """Find the data-parallel coordinate of a global rank of the mesh."""
        return (rank - self.mesh.first) // self.strategy.tp % self.strategy.dp

    def tp_index(self, rank: int) -> int:
        """Find the tensor-parallel coordinate of a global rank of the mesh."""
        return (rank - self.mesh.first) % self.strategy.tp

    def pp_index(self, rank: int) -> int:
        """Find the pipeline stage of a global rank of the mesh."""
        return (rank - self.mesh.first) // (self.strategy.tp * self.strategy.dp)

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """Output rank of each data-parallel replica: the first TP rank of the last stage."""
        s = self.strategy
        return tuple(self.rank(dp=i, pp=s.pp - 1) for i in range(s.dp))

    @property
    def layout(self) -> str:
        """Text that is equal for two placements exactly when parameters lie alike: `d2 t1 p1 @0-1`."""
        s = self.strategy
        sharded = " z3" if s.shards_parameters else ""
        return f"d{s.dp} t{s.tp} p{s.pp}{sharded} @{self.mesh}{f' {s.dtype}' if s.dtype else ''}"

    def __str__(self) -> str:
        """Format it in one line: `d2 t1 p1 @0-1 mb=8192`, then ` sp`, ` rc` and ` z2` where they are on."""
        s = self.strategy
        on = {"sp": s.sequence_parallel, "rc": s.recompute, "z2": s.zero == 2}
        flags = "".join(f" {name}" for name, value in on.items() if value)
        return f"{self.layout} mb={s.micro_batch_tokens}{flags}"

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read the text form; UserError for anything else."""
        form = r"d(\d+) t(\d+) p(\d+)( z3)? @(\S+)( float32| mixed| bfloat16)? mb=(\d+)( sp)?( rc)?( z2)?"
        match = re.fullmatch(form, text.strip())
        if match is None:
            raise UserError(f"placement {text!r} is not understood; write for example d2 t1 p1 @0-1 mb=8192")
        dp, tp, pp, tokens = (int(match[i]) for i in (1, 2, 3, 7))
        if match[4] and match[10]:
            raise UserError(f"placement {text!r} has two stages of ZeRO; leave out z2 or z3")
        strategy = Strategy(
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch_tokens=tokens,
            sequence_parallel=bool(match[8]),
            dtype=DTYPES[match[6].strip()] if match[6] else None,
            recompute=bool(match[9]),
            zero=3 if match[4] else 2 if match[10] else 1,
        )
        return cls(Mesh.parse(match[5]), strategy)


def function_placement(mesh: Mesh) -> Placement:
    """Placement of a function: every rank of the mesh calls it with its share of the items, in one batch."""
    return Placement(mesh, Strategy(dp=mesh.size))
