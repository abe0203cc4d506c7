"""Process groups of a placement, and this rank's index in them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from realrl.families.tensors import TensorSpec
from realrl.model.group import Group, make_single_rank_group
from realrl.plan.communicators import RankSet, list_context_blocks, list_own_rank_sets
from realrl.plan.placement import Placement


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups of one rank under a placement.

    Ranks of `data` divide the items of a batch. Ranks of `context` divide items and tokens: a micro-batch belongs
    to one of the `blocks` of this rank. These are groups by their size, from this rank alone to all of `context`.
    `copies` has both kinds: all ranks that compute with the same parameters. Ranks of `experts` divide the experts
    of a stage, and ranks of `expert_copies` compute with the same experts. Without expert parallelism, these are
    `copies`.
    `reverse_pipeline` has the ranks of `pipeline`, last stage first; on gloo it is a second connection, for
    gradients and tokens that flow backwards. `embedding` has the ranks of the first and the last stage of the
    pipeline, or is None if this rank is on neither. It is Megatron's embedding group, for tied embeddings. `mesh`
    has all ranks of the placement.
    """

    data: Group
    context: Group
    blocks: Mapping[int, Group]
    copies: Group
    tensor: Group
    experts: Group
    expert_copies: Group
    pipeline: Group
    reverse_pipeline: Group
    mesh: Group
    embedding: Group | None

    @classmethod
    def of_single_rank(cls, rank: int = 0, **others: Group | None) -> "ParallelGroups":
        """Make the groups of a rank that is alone in all groups except `others`."""
        single = make_single_rank_group(rank)
        groups: dict[str, Any] = {field.name: single for field in fields(cls)} | {"embedding": None}
        groups |= {"expert_copies": others.get("copies", single)}
        context = others.get("context") or single
        groups |= {"blocks": {1: single, context.size: context}}
        return cls(**groups | others)

    def copies_of(self, spec: TensorSpec) -> Group:
        """Return the ranks that compute with the same part of a tensor as this rank."""
        return self.copies if spec.expert is None else self.expert_copies


def select_groups(placement: Placement, rank: int, groups: Mapping[RankSet, Group]) -> ParallelGroups:
    """Select the groups of a rank of the placement from `groups`, which `Process.make_groups` made."""
    single = make_single_rank_group(rank)
    own = {
        role: single if len(ranks) == 1 else groups[ranks]
        for role, ranks in list_own_rank_sets(placement, rank).items()
        if rank in ranks  # stages between the first and the last are not in the embedding group
    }
    blocks = [groups[ranks] for ranks in list_context_blocks(placement, rank)]
    return ParallelGroups(
        data=own["data"],
        context=own["context"],
        blocks={1: single, **{block.size: block for block in blocks}},
        copies=own["copies"],
        tensor=own["tensor"],
        experts=own["experts"],
        expert_copies=own["expert_copies"],
        pipeline=own["pipeline"],
        reverse_pipeline=own["reverse_pipeline"],
        mesh=own["mesh"],
        embedding=own.get("embedding"),
    )
