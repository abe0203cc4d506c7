"""Samples of each prompt of a training step, whichever data-parallel ranks they are on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realrl.algorithms.method import Sum
from realrl.config.errors import UserError


def gather_samples(values: Tensor, ids: Sequence[int], *, prompts: int, samples: int, dp_sum: Sum) -> Tensor:
    """Gather a value of all items of a step, one row per prompt: [prompts, samples] float64, equal on every rank.

    values: [N] of this rank's items `ids`, as `TrainMethod.prepare` sees them. Item i is sample i % `samples` of
    prompt i // `samples`. Every entry is one rank's value plus zeros, so the result is exact and does not depend on
    the placement of items. UserError, on every rank, unless the items of all ranks are these samples, each once.
    """
    items = prompts * samples
    here = torch.tensor(list(ids), dtype=torch.int64, device=values.device)
    known = (here >= 0) & (here < items)
    gathered = torch.zeros(2, items, dtype=torch.float64, device=values.device)
    table, counts = gathered
    table[here[known]] = values.detach().double()[known]
    counts.index_add_(0, here[known], torch.ones_like(here[known], dtype=torch.float64))
    beyond = (~known).sum().double()
    # In one reduction, in which all ranks learn of a mistake on any of them.
    reduced = dp_sum(torch.cat((gathered.flatten(), beyond[None])))
    table, counts = reduced[:-1].view(2, items)
    if reduced[-1] > 0 or (counts != 1).any():
        raise UserError(_describe_mistake(counts, int(reduced[-1]), prompts, samples))
    return table.view(prompts, samples)


def _describe_mistake(counts: Tensor, beyond: int, prompts: int, samples: int) -> str:
    """Describe how the items of a step differ from `samples` of each of `prompts`. counts: [prompts * samples]"""
    problems = []
    for what, wrong in (("missing", counts == 0), ("repeated", counts > 1)):
        found = wrong.nonzero().flatten().tolist()
        if found:
            listed = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
            problems.append(f"{what}: {listed}")
    if beyond:
        problems.append(f"beyond these: {beyond}")
    return (
        f"gather_samples: the items of a step must be 0 to {prompts * samples - 1}, each once, for {samples}"
        f" samples of each of {prompts} prompts ({'; '.join(problems)}); samples_per_prompt of the algorithm's"
        " description says how many samples are taken"
    )
