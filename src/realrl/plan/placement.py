"""The placement of a call: its mesh and its strategy."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from realrl.config.errors import UserError
from realrl.plan.axes import COPIES, Degrees, Divided, axes_dividing, axis_names, degrees_pattern
from realrl.plan.cluster import Cluster

Dtype = Literal["float32", "mixed", "bfloat16"]

DTYPES: dict[str, Dtype] = {"float32": "float32", "mixed": "mixed", "bfloat16": "bfloat16"}
"""Data types of parameters, by name."""

ZERO_STAGES = (1, 2, 3)
"""Stages of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054)."""

ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "mixed": 4, "bfloat16": 2}


@dataclass(frozen=True, order=True)
class Mesh:
    """A run of `size` consecutive ranks from `first` on, inside a node or across nodes."""

    first: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, ascending."""
        return tuple(range(self.first, self.first + self.size))

    def overlaps(self, other: "Mesh") -> bool:
        """Check whether two meshes share a rank."""
        return self.first < other.first + other.size and other.first < self.first + self.size

    def check(self, cluster: Cluster) -> None:
        """Raise UserError unless the mesh is inside a cluster."""
        if self.first < 0 or self.size < 1 or self.first + self.size > cluster.size:
            raise UserError(f"mesh {self} lies outside the {cluster.size} devices of cluster {cluster}")

    def nodes(self, cluster: Cluster) -> Cluster:
        """Find the nodes of the mesh, each with only the devices that the mesh has."""
        return cluster.part(self.first, self.size)

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Read `FIRST-LAST` or a single rank. Raises UserError for anything else."""
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UserError(f"mesh {text!r} is not understood; write FIRST-LAST, for example 0-7")
        return cls(int(match[1]), int(match[2] or match[1]) - int(match[1]) + 1)

    def __str__(self) -> str:
        return str(self.first) if self.size == 1 else f"{self.first}-{self.first + self.size - 1}"


def divides_experts(degrees: Degrees, ep: int) -> bool:
    """Check whether `ep` ranks of each stage can divide its experts.

    They are consecutive ranks, and either they are whole TP groups, or they divide a TP group. So one copy of all
    parameters of a stage is on consecutive ranks, which the planner relies on.
    """
    stage = degrees.size // degrees.count(*axes_dividing(Divided.LAYERS))
    cuts = degrees.count(*axes_dividing(Divided.MATRICES))
    return stage % ep == 0 and (ep % cuts == 0 or cuts % ep == 0)


@dataclass(frozen=True, order=True, init=False)
class Strategy:
    """How a call uses its mesh: degrees of parallelism, micro-batch size, and ways to save memory. `Strategy(dp=2,
    tp=4)` gives degrees by axis name; axes that are not named have degree 1."""

    degrees: Degrees
    ep: int
    """Degree of expert parallelism. The ranks of a stage, which dp, cp and tp number, divide whole experts among
    themselves anew (`for_experts`)."""
    vpp: int
    """Virtual stages of each pipeline stage (interleaved pipeline, arXiv 2104.04473). A stage holds this number of
    runs of layers, and a micro-batch passes all stages this often."""
    micro_batch_tokens: int
    sequence_parallel: bool
    """Whether TP ranks also split tokens in the layers that they would otherwise replicate."""
    dtype: Dtype | None
    """Data type of the parameters; None for the data type of the role. A call with another data type has another
    layout, and needs a copy of the parameters."""
    recompute: bool
    """Whether training checkpoints activations: it keeps only the inputs of layers, and recomputes their other
    activations."""
    zero_bubble: bool
    """Whether training computes the gradients of weights apart from backward passes, while a pipeline stage would
    wait for other stages (arXiv 2401.10241)."""
    zero: int
    """Stage of ZeRO. Ranks with the same parameters (dp and cp) shard the optimizer state (stage 1), gradients too
    (2), or parameters too (3)."""

    def __init__(
        self,
        *,
        degrees: Degrees | None = None,
        ep: int = 1,
        vpp: int = 1,
        micro_batch_tokens: int = 8192,
        sequence_parallel: bool = False,
        dtype: Dtype | None = None,
        recompute: bool = False,
        zero_bubble: bool = False,
        zero: int = 1,
        **by_axis: int,
    ) -> None:
        """Take `degrees`, or degrees by axis name. Raises UserError for values that do not fit together."""
        assert degrees is None or not by_axis, "degrees are given once"
        degrees = Degrees.of(by_axis) if degrees is None else degrees
        sizes = {
            **dict(zip(axis_names(), degrees.values, strict=True)),
            "micro_batch_tokens": micro_batch_tokens,
        }
        for name, size in {**sizes, "ep": min(ep, sizes["ep"]), "vpp": min(vpp, sizes["vpp"])}.items():
            if size < 1:
                raise UserError(f"strategy: {name}={size} must be at least 1")
        if not divides_experts(degrees, ep):
            stage, cuts = degrees.size // degrees["pp"], degrees["tp"]
            raise UserError(
                f"strategy: ep={ep}: the ranks of one stage divide its experts, so ep must divide dp x cp x tp"
                f" ({stage}), and be a multiple or a divisor of tp ({cuts})"
            )
        if zero not in ZERO_STAGES:
            raise UserError(f"strategy: zero={zero} is not one of the stages 1, 2 and 3")
        if zero > 1 and degrees.copies == 1:
            raise UserError(
                f"strategy: zero={zero} shards over data-parallel and context-parallel ranks, but dp=1 is a single"
                " rank; leave zero out, or set dp or cp to at least 2"
            )
        if vpp > 1 and degrees["pp"] == 1:
            raise UserError(
                f"strategy: vpp={vpp} divides the layers of a pipeline stage, but pp=1 has no pipeline; leave vpp"
                " out, or set pp to at least 2"
            )
        if vpp > 1 and zero > 1:
            raise UserError(
                f"strategy: vpp={vpp} and zero={zero} do not fit together: a stage would gather parameters and"
                " reduce gradients again for each of its virtual stages; leave out vpp or zero"
            )
        if zero_bubble and (degrees["pp"] == 1 or zero > 1):
            raise UserError(
                f"strategy: zero_bubble needs a pipeline and zero=1, not pp={degrees['pp']} and zero={zero}; leave"
                " it out"
            )
        for name, given in (
            ("degrees", degrees),
            ("ep", ep),
            ("vpp", vpp),
            ("micro_batch_tokens", micro_batch_tokens),
            ("sequence_parallel", sequence_parallel),
            ("dtype", dtype),
            ("recompute", recompute),
            ("zero_bubble", zero_bubble),
            ("zero", zero),
        ):
            object.__setattr__(self, name, given)

    def with_degrees(self, **by_axis: int) -> "Strategy":
        """Copy the strategy with other degrees on some axes."""
        ep, vpp = by_axis.pop("ep", self.ep), by_axis.pop("vpp", self.vpp)
        return replace(self, degrees=self.degrees.changed(by_axis), ep=ep, vpp=vpp)

    def for_generation(self, *, exact: bool = False) -> "Strategy":
        """Copy the strategy for a call that generates: every rank stores all parameters that it computes with. A
        token passes each stage once, so there are no virtual stages. In a pipeline, data-parallel ranks cannot
        decode in step, so if they divide experts, TP ranks cut experts like other matrices instead.

        Context-parallel ranks stay together. If each of them took items of its own, it would need a KV cache of
        `micro_batch_tokens` alone, and a second copy of the parameters, because this would be another layout. But
        with `exact`, they take items of their own, because ranks that divide a cache round differently.
        """
        ep = 1 if self.decodes_together and self.pp > 1 else self.ep
        apart = {"dp": self.copies, "cp": 1} if exact else {}
        return replace(self.with_degrees(**apart, ep=ep, vpp=1), zero=1, recompute=False, zero_bubble=False)

    def for_experts(self) -> "Strategy":
        """Make the strategy of the experts alone, which determines their layout.

        With expert parallelism, each rank holds whole experts, so that the ranks of a stage are `ep` ranks with
        different experts, times the ranks with the same experts (`dp` of the result). This is the folding of
        arXiv 2504.14960, with an expert tensor-parallel degree of 1. Without it, TP ranks cut every expert, and the
        strategy is the same.
        """
        if self.ep == 1:
            return self
        apart = self.size // self.pp // self.ep
        zero = self.zero if apart > 1 else 1
        return replace(self, degrees=Degrees.of({"dp": apart, "ep": self.ep, "pp": self.pp}), ep=1, zero=zero)

    @property
    def dp(self) -> int:
        """Degree of data parallelism."""
        return self.degrees["dp"]

    @property
    def cp(self) -> int:
        """Degree of context parallelism."""
        return self.degrees["cp"]

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism."""
        return self.degrees["tp"]

    @property
    def pp(self) -> int:
        """Degree of pipeline parallelism: number of stages."""
        return self.degrees["pp"]

    @property
    def size(self) -> int:
        """Number of devices that the strategy needs."""
        return self.degrees.size

    @property
    def copies(self) -> int:
        """Number of data-parallel and context-parallel ranks, which compute with the same parameters."""
        return self.degrees.copies

    @property
    def replicas(self) -> int:
        """Number of these ranks that store the same parameters."""
        return 1 if self.shards_parameters else self.copies

    @property
    def shards_parameters(self) -> bool:
        """Whether each of these ranks stores a part of the parameters, and gathers the other parts layer by
        layer."""
        return self.zero == 3

    @property
    def storing_axes(self) -> tuple[str, ...]:
        """Axes whose ranks store different parameters, outermost first."""
        copies = COPIES if self.shards_parameters else ()
        return axes_dividing(Divided.LAYERS, *copies, Divided.MATRICES, Divided.EXPERTS)

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are divided among ranks of several TP groups. These may have different items, so their
        passes have collectives in common."""
        return self.tp % self.ep > 0

    @property
    def replicas_in_step(self) -> int:
        """Number of data-parallel replicas that divide experts among themselves, and so generate in step."""
        replica = self.cp * self.tp
        if replica % self.ep == 0:
            return 1
        # If groups of `ep` ranks begin or end inside replicas, every replica waits for others.
        return self.dp if self.ep % replica else self.ep // replica

    @property
    def decodes_together(self) -> bool:
        """Whether data-parallel replicas generate in step."""
        return self.replicas_in_step > 1

    def can_generate(self, portions: int = 1) -> bool:
        """Check whether a call that generates accepts this strategy. `portions`: see `Call.portions`."""
        apart = self.pp == 1 == portions or not self.decodes_together
        return self.vpp == 1 and not self.shards_parameters and apart

    @property
    def all_degrees(self) -> Degrees:
        """Degrees of all axes with `ep` and `vpp` among them, as in files and tables, to tell strategies apart.
        Their product is not the number of ranks if one of these two is above 1."""
        own = {"ep": self.ep, "vpp": self.vpp}
        return self.degrees.changed(own) if max(own.values()) > 1 else self.degrees

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of settings that differ from the defaults, apart from degrees and micro-batches."""
        given = {
            "sequence parallel": self.sequence_parallel,
            "recompute": self.recompute,
            "zero bubble": self.zero_bubble,
            f"ZeRO-{self.zero}": self.zero > 1,
            str(self.dtype): self.dtype is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)


@dataclass(frozen=True, order=True)
class Placement:
    """Mesh and strategy of a call. Coordinates on the axes number the ranks of the mesh (see `plan.axes`)."""

    mesh: Mesh
    strategy: Strategy

    def __post_init__(self) -> None:
        if self.mesh.size != self.strategy.size:
            degrees = " ".join(f"{axis}={degree}" for axis, degree in self.strategy.degrees.named().items())
            raise UserError(
                f"{degrees} needs {self.strategy.size} devices, but mesh {self.mesh} has {self.mesh.size}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def for_experts(self) -> "Placement":
        """Make the placement of the experts alone (`Strategy.for_experts`), on the same mesh."""
        return self if self.strategy.ep == 1 else Placement(self.mesh, self.strategy.for_experts())

    def rank(self, **coordinates: int) -> int:
        """Find the global rank at some coordinates, given by axis name. Coordinates that are not given are 0."""
        return self.mesh.first + self.strategy.degrees.position(coordinates)

    def index(self, rank: int, *axes: str) -> int:
        """Find the index of a global rank of the mesh within its group along these axes."""
        return self.strategy.degrees.index(rank - self.mesh.first, *axes)

    def coordinates(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Find the coordinates of a global rank of the mesh on these axes."""
        return tuple(self.index(rank, axis) for axis in axes)

    def item_index(self, rank: int) -> int:
        """Find the index of the share of a batch that a global rank of the mesh works on. It is the rank's
        data-parallel coordinate."""
        return self.index(rank, *axes_dividing(Divided.ITEMS))

    def copy_index(self, rank: int) -> int:
        """Find the index of a global rank of the mesh among the ranks that compute with the same parameters."""
        return self.index(rank, *axes_dividing(*COPIES))

    def stage(self, rank: int) -> int:
        """Find the pipeline stage of a global rank of the mesh."""
        return self.index(rank, *axes_dividing(Divided.LAYERS))

    def is_copy(self, rank: int) -> bool:
        """Check whether this rank only repeats what a lower rank holds and computes, along an axis that divides
        nothing."""
        return self.index(rank, *axes_dividing(None)) > 0

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """Ranks that have the outputs: for each share of a batch, the first rank of the last stage that works on
        it. Context-parallel ranks all have whole outputs."""
        last = self.rank(**{axis: self.strategy.degrees[axis] - 1 for axis in axes_dividing(Divided.LAYERS)})
        return tuple(last + offset for offset in self.strategy.degrees.offsets(*axes_dividing(Divided.ITEMS)))

    @property
    def layout(self) -> str:
        """Text such as `d2 t1 p1 @0-1`. Two placements with the same text have the same layout of parameters, and
        may share them."""
        s = self.strategy
        sharded = " z3" if s.shards_parameters else ""
        return f"{s.all_degrees}{sharded} @{self.mesh}{f' {s.dtype}' if s.dtype else ''}"

    def __str__(self) -> str:
        """Format the placement in one line: `d2 t1 p1 @0-1 mb=8192`, then ` sp`, ` rc`, ` zb` and ` z2` if these
        settings are on."""
        s = self.strategy
        on = {"sp": s.sequence_parallel, "rc": s.recompute, "zb": s.zero_bubble, "z2": s.zero == 2}
        flags = "".join(f" {name}" for name, value in on.items() if value)
        return f"{self.layout} mb={s.micro_batch_tokens}{flags}"

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read the text form. Raises UserError for anything else."""
        form = (
            degrees_pattern() + r"(?P<z3>z3 )?@(?P<mesh>\S+)(?: (?P<dtype>float32|mixed|bfloat16))?"
            r" mb=(?P<tokens>\d+)(?P<sp> sp)?(?P<rc> rc)?(?P<zb> zb)?(?P<z2> z2)?"
        )
        match = re.fullmatch(form, text.strip())
        if match is None:
            raise UserError(f"placement {text!r} is not understood; write for example d2 t1 p1 @0-1 mb=8192")
        if match["z3"] and match["z2"]:
            raise UserError(f"placement {text!r} has two stages of ZeRO; leave out z2 or z3")
        degrees = {axis: int(match[axis] or 1) for axis in axis_names()}
        ep, vpp = degrees.pop("ep"), degrees.pop("vpp")
        strategy = Strategy(
            degrees=Degrees.of(degrees),
            ep=ep,
            vpp=vpp,
            micro_batch_tokens=int(match["tokens"]),
            sequence_parallel=bool(match["sp"]),
            dtype=DTYPES[match["dtype"]] if match["dtype"] else None,
            recompute=bool(match["rc"]),
            zero_bubble=bool(match["zb"]),
            zero=3 if match["z3"] else 2 if match["z2"] else 1,
        )
        return cls(Mesh.parse(match["mesh"]), strategy)


def function_placement(mesh: Mesh) -> Placement:
    """Make the placement of a function: every rank of the mesh calls it with its share of the items, in one
    batch."""
    return Placement(mesh, Strategy(dp=mesh.size))
