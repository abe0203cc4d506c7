"""Roles that share the memory of frozen weights: there is one copy of these in a layout that is home to several."""

from collections.abc import Iterable, Mapping

from realrl.config.errors import UserError
from realrl.families.shape import Head
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan


def order_sharers(bases: Mapping[str, str | None], heads: Mapping[str, Head]) -> list[tuple[str, ...]]:
    """List the roles that have the same frozen weights, those of whose weights others have a part first.

    `bases`: role -> name of the weights that its base set has, None where no other role can have them. A language
    model's have its head, which others do without.
    """
    groups: dict[str, list[str]] = {}
    for role, base in bases.items():
        if base is not None:
            groups.setdefault(base, []).append(role)
    return [tuple(sorted(found, key=lambda role: heads[role] != "lm")) for found in groups.values()]


def find_holders(sharers: Iterable[tuple[str, ...]], homes: Mapping[str, Placement]) -> dict[str, str]:
    """Find the role in whose memory the base set of each role lies that shares it: role -> another one, or itself.

    There is no entry for a role whose home has a layout of its own.
    """
    holders: dict[str, str] = {}
    for group in sharers:
        at_home: dict[str, list[str]] = {}
        for role in group:
            if role in homes:
                at_home.setdefault(homes[role].layout, []).append(role)
        for alike in at_home.values():
            if len(alike) > 1:
                holders |= dict.fromkeys(alike, alike[0])
    return holders


def check_offloading(plan: Plan, holders: Mapping[str, str]) -> None:
    """Raise UserError where a plan offloads a role whose base set lies in device memory for others anyway."""
    for role in plan.offload:
        if role in holders:
            others = [other for other in holders if holders[other] == holders[role] and other != role]
            raise UserError(
                f"plan: offload: {role} shares its frozen weights with {others[0]} in one layout, so that they stay"
                " in device memory"
            )
