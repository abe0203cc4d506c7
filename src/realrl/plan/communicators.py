"""Groups of ranks that communicate under a plan, and the NCCL communicators for these groups. Groups and
communicators depend only on the plan. The runtime makes the communicators, and the planner reserves memory for
them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from realrl.plan.axes import COPIES, Degrees, Divided, axes_dividing
from realrl.plan.placement import Placement
from realrl.plan.pool import list_block_sizes

RankSet = tuple[int, ...]
Role = Literal[
    "data",
    "context",
    "copies",
    "tensor",
    "experts",
    "expert_copies",
    "pipeline",
    "reverse_pipeline",
    "mesh",
    "embedding",
]

CTAS: Mapping[Role, int] = {
    "data": 4,
    "context": 16,
    "copies": 16,
    "tensor": 16,
    "experts": 16,
    "expert_copies": 16,
    "pipeline": 4,
    "reverse_pipeline": 4,
    "mesh": 4,
    "embedding": 4,
}
"""Number of thread blocks of an operation, for each role of a group. It is also the number of channels of the
communicator.

A communicator's memory grows with this number, and thread blocks that spin on the device cannot compute. 16 is
NCCL's own number for NVLink SHARP on Hopper (`NVLS_NCHANNELS_SM90` in nccl's src/transport/nvls.cc). Messages
between stages, and sums of a few numbers over a mesh, need only few thread blocks.
"""

WORLD_CTAS = 8
"""Thread blocks of the communicator of all ranks, which reallocates parameters."""


@dataclass(frozen=True)
class Communicator:
    """NCCL communicator of some ranks, in ascending order, with at most `ctas` thread blocks per operation."""

    ranks: RankSet
    ctas: int
    roles: frozenset[Role]
    """Roles of the groups with these ranks. The same ranks may have different roles in different calls."""


def list_own_rank_sets(placement: Placement, rank: int) -> dict[Role, RankSet]:
    """List the groups that a rank of a placement needs, with their ranks. `reverse_pipeline` has the ranks of the
    stages from last to first. `embedding` has the ranks of the first and the last stage; a rank of another stage is
    not in it."""
    position = rank - placement.mesh.first
    return {
        # The group's first rank is this rank without its offset in the group.
        role: _members(role, rank - offsets[degrees.index(position, *axes)], offsets)
        for role in CTAS
        for axes, degrees in [(_role_axes(role), _role_degrees(placement, role))]
        for offsets in [degrees.offsets(*axes)]
    }


def list_context_blocks(placement: Placement, rank: int) -> list[RankSet]:
    """List the groups of several ranks that may divide the tokens of a micro-batch with a rank, smallest first."""
    ranks = list_own_rank_sets(placement, rank)["context"]
    index = ranks.index(rank)
    return [ranks[index // size * size :][:size] for size in list_block_sizes(len(ranks)) if size > 1]


def _role_degrees(placement: Placement, role: Role) -> Degrees:
    """Find the degrees that number the ranks for the groups of a role."""
    folded = role in ("experts", "expert_copies")
    return (placement.for_experts() if folded else placement).strategy.degrees


def _role_axes(role: Role) -> tuple[str, ...]:
    """Name the axes that the groups of a role span, outermost first."""
    match role:
        case "data":
            return axes_dividing(Divided.ITEMS)
        case "context":
            return axes_dividing(Divided.TOKENS)
        case "copies" | "expert_copies":
            return axes_dividing(*COPIES)
        case "tensor":
            return axes_dividing(Divided.MATRICES)
        case "experts":
            return axes_dividing(Divided.EXPERTS)
        case "pipeline" | "reverse_pipeline" | "embedding":
            return axes_dividing(Divided.LAYERS)
        case "mesh":
            return axes_dividing(*Divided)


def _members(role: Role, first: int, offsets: Sequence[int]) -> RankSet:
    """List the ranks of the group that has its first rank at `first`, and its members at `offsets` from there."""
    ranks = tuple(first + offset for offset in offsets)
    match role:
        case "reverse_pipeline":
            return ranks[::-1]
        case "embedding":
            return (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks
        case _:
            return ranks


RankSets = Mapping[RankSet, frozenset[Role]]
"""Groups of more than one rank and their roles, in an order that all ranks agree on."""


def list_rank_sets(placements: Iterable[Placement]) -> RankSets:
    """List every group of the placements once."""
    found: dict[RankSet, frozenset[Role]] = {}
    for placement in dict.fromkeys(placements):
        for role, ranks in list_groups(placement):
            if len(ranks) > 1:
                found[ranks] = found.get(ranks, frozenset()) | {role}
    return found


def list_groups(placement: Placement) -> Iterator[tuple[Role, RankSet]]:
    """List the groups of all ranks of a placement, each once. Asking every rank for its groups would take time that
    grows with the square of the number of ranks."""
    for role in CTAS:
        axes, degrees = _role_axes(role), _role_degrees(placement, role)
        offsets = degrees.offsets(*axes)
        for origin in degrees.origins(*axes):
            ranks = _members(role, placement.mesh.first + origin, offsets)
            if role == "context":
                for size in list_block_sizes(len(ranks))[:-1]:
                    yield from ((role, ranks[i : i + size]) for i in range(0, len(ranks), size))
            yield role, ranks


def list_communicators(rank_sets: RankSets, world: int) -> tuple[Communicator, ...]:
    """List the communicators for groups; the first is the communicator of all ranks, which reallocates parameters.
    Groups of the same ranks share one communicator.

    Both directions of a pipeline also share one communicator, because NCCL delivers in the order of posting; see
    `engine.pipeline`. Groups of all ranks share the communicator of all ranks if it has enough thread blocks.
    """
    everyone = tuple(range(world))
    roles: dict[RankSet, frozenset[Role]] = {}
    for ranks, uses in rank_sets.items():
        ascending = tuple(sorted(ranks))
        roles[ascending] = roles.get(ascending, frozenset()) | uses
    ctas = {ranks: max(CTAS[use] for use in uses) for ranks, uses in roles.items()}
    shared = ctas.get(everyone, WORLD_CTAS) <= WORLD_CTAS
    first = Communicator(everyone, WORLD_CTAS, roles.get(everyone, frozenset()) if shared else frozenset())
    others = (
        Communicator(ranks, ctas[ranks], uses)
        for ranks, uses in roles.items()
        if ranks != everyone or not shared
    )
    return first, *others


def group_splits(communicators: Iterable[Communicator]) -> list[list[Communicator]]:
    """Group communicators that one collective split of the world can make: disjoint communicators with equal
    options."""
    splits: list[tuple[int, set[int], list[Communicator]]] = []
    for communicator in communicators:
        ranks = set(communicator.ranks)
        for ctas, taken, members in splits:
            if ctas == communicator.ctas and taken.isdisjoint(ranks):
                taken |= ranks
                members.append(communicator)
                break
        else:
            splits.append((communicator.ctas, ranks, [communicator]))
    return [members for _, _, members in splits]


def reallocates(placements: Iterable[Placement]) -> bool:
    """Check whether parameters may move between ranks, because calls have different layouts."""
    return len({placement.layout for placement in placements}) > 1


def list_stage_pairs(ranks: RankSet) -> Iterator[tuple[int, int]]:
    """List the pairs of a pipeline's ranks that exchange messages: neighbours, and the first with the last."""
    yield from pairwise(ranks)
    if len(ranks) > 2:
        yield ranks[0], ranks[-1]
