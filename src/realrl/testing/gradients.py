"""Compare the gradients of losses with finite differences, and find the tokens that they reach.

A run of the recipe calls each loss a few more times, with other outputs of the model, and writes what it has found.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from realrl.algorithms.base.method import Algorithm, Metrics, ModelOutput
from realrl.data.batch import Batch
from realrl.runtime.training_run import TrainingRun
from realrl.testing.findings import Finding

_PROBED = 8
"""Maximum number of micro-batches that are probed for each call."""
_STEP = 1e-3
"""Distance between outputs of the model. It is large enough for losses that compute in float32."""
_TOLERANCE = 0.02
"""Maximum difference of two slopes, relative to their size."""
_ROUNDING = 1e-6
"""Rounding error of a loss, relative to its size."""
_LEAST_ROWS = 2
"""Minimum number of sequences with a gradient before last tokens without one are a problem."""
_FILE = "gradients.json"


@dataclass
class _Probe:
    """What was found about a loss in one micro-batch."""

    finite: bool
    """Whether loss and gradient are finite."""
    repeats: bool
    """Whether the loss is the same when it is called again."""
    zero: bool
    """Whether the gradient is 0."""
    differs: bool
    """Whether the gradient differs from finite differences."""
    gradient: float
    """Slope of the loss along a random direction, from its gradient."""
    measured: float
    """Slope of the loss along this direction, from finite differences."""
    rows: int
    """Number of sequences with a gradient at one of their tokens. 0 if the model has a scalar head."""
    ended: int
    """Number of these sequences with a gradient at their last token."""
    asked: int
    """Number of tokens of prompts with a gradient."""


class ProbedRun(TrainingRun):
    """A run that also probes the loss of each train call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._probes: dict[str, list[_Probe]] = {}
        self.worker.use(cast(Algorithm, _ProbedAlgorithm(self.algorithm, self._probes)))

    def _finish(self) -> None:
        super()._finish()
        found = {call: [asdict(probe) for probe in probes] for call, probes in self._probes.items()}
        (self.directory.path / _FILE).write_text(json.dumps(found))


class _ProbedAlgorithm:
    """An algorithm whose train methods are probed."""

    def __init__(self, algorithm: Any, probes: dict[str, list[_Probe]]) -> None:
        self._algorithm, self._probes = algorithm, probes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def method(self, call: str) -> Any:
        method = self._algorithm.method(call)
        return _ProbedTrain(method, self._probes.setdefault(call, [])) if hasattr(method, "loss") else method


class _ProbedTrain:
    """A train method whose loss is probed."""

    def __init__(self, method: Any, probes: list[_Probe]) -> None:
        self._method, self._probes = method, probes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        if len(self._probes) < _PROBED and _find_inputs(output):
            self._probes.append(_probe(self._method, batch, output))
        loss: tuple[Tensor, Metrics] = self._method.loss(batch, output)
        return loss


def _probe(method: Any, batch: Batch, output: ModelOutput) -> _Probe:
    """Probe the loss of a micro-batch at the model's output, and a small step away from it on both sides."""
    try:
        return _probe_as(torch.float64, method, batch, output)
    except Exception:  # the loss may not take other types; what is wrong in float32 also ends the run
        return _probe_as(torch.float32, method, batch, output)


def _probe_as(dtype: torch.dtype, method: Any, batch: Batch, output: ModelOutput) -> _Probe:
    given = {name: tensor.detach().to(dtype) for name, tensor in _find_inputs(output).items()}

    def compute(moved: Mapping[str, Tensor]) -> Tensor:
        # Copies, because the loss may change them in place.
        copies = {name: tensor.clone() for name, tensor in moved.items()}
        loss: Tensor = method.loss(batch.select(range(len(batch))), replace(output, **cast(Any, copies)))[0]
        return loss

    def measure(moved: Mapping[str, Tensor]) -> float:
        # The guard of a user's loss asks for a gradient.
        return float(compute({name: tensor.requires_grad_() for name, tensor in moved.items()}).detach())

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    loss = compute(leaves)
    found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    directions = {name: _choose_direction(name, tensor) for name, tensor in given.items()}
    here = float(loss.detach())
    repeats = measure({name: tensor.clone() for name, tensor in given.items()}) == here
    below, above = (
        measure({name: tensor + sign * _STEP * directions[name] for name, tensor in given.items()})
        for sign in (-1, 1)
    )
    parts = torch.cat([(gradients[name] * directions[name]).flatten().double() for name in given])
    slope, measured = float(parts.sum()), (above - below) / (2 * _STEP)
    # Slopes on both sides differ by what a bend or a kink of the loss explains.
    bend = abs(above - 2 * here + below) / _STEP
    allowed = _TOLERANCE * max(abs(slope), abs(measured), float(parts.norm())) + bend
    allowed += _ROUNDING * (1 + abs(here)) / _STEP
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values()) and math.isfinite(here)
    rows, ended, asked = _find_reached(method, batch, output, gradients)
    return _Probe(
        finite=finite,
        repeats=repeats,
        zero=not any(bool(gradient.any()) for gradient in gradients.values()),
        differs=abs(slope - measured) > allowed,
        gradient=slope,
        measured=measured,
        rows=rows,
        ended=ended,
        asked=asked,
    )


def _find_inputs(output: ModelOutput) -> dict[str, Tensor]:
    """Find the outputs of the model through which gradients flow, by name."""
    names = ("logprobs", "values", "candidate_logprobs")
    tensors = {name: getattr(output, name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}


def _choose_direction(name: str, tensor: Tensor) -> Tensor:
    """Choose a random direction. Log-probabilities stay below 0, and those of first tokens stay 0."""
    signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor) * 2 - 1
    return signs if name == "values" else signs * tensor.abs().clamp(max=1)


def _find_reached(
    method: Any, batch: Batch, output: ModelOutput, gradients: Mapping[str, Tensor]
) -> tuple[int, int, int]:
    """Count the sequences that a gradient reaches, those among them whose last token it reaches, and the reached
    tokens of prompts. All are 0 for a scalar head, whose numbers need not belong to the token at their position."""
    reached = [
        (gradient != 0).reshape(sum(output.lengths), -1).any(1)
        for name, gradient in gradients.items()
        if name != "values"
    ]
    if not reached:
        return 0, 0, 0
    at = torch.stack(reached).any(0).split(output.lengths)
    prompts, counts = _find_prompts(batch), [0, 0, 0]
    for row, tokens in zip(method.sequences(batch).rows(), at, strict=True):
        if tokens.any():
            counts[0] += 1
            counts[1] += int(tokens[-1])
            learnt = prompts.get(tuple(row.tolist()))
            counts[2] += 0 if learnt is None else int((tokens & (learnt == 0)).sum())
    return counts[0], counts[1], counts[2]


def _find_prompts(batch: Batch) -> dict[tuple[int, ...], Tensor]:
    """Find the masks of answers, by the tokens of the sequence: 0 for tokens of prompts."""
    masks: dict[tuple[int, ...], Tensor] = {}
    if "loss_mask" in batch.fields:
        for row, mask in zip(batch["tokens"].rows(), batch["loss_mask"].rows(), strict=True):
            masks[tuple(row.tolist())] = mask
    for key in batch.fields:
        prefix, found, _ = key.rpartition("prompt_length")
        if not found:
            continue
        for name in (f"{prefix}sequences", f"{prefix}tokens", prefix.rstrip("_")):
            if name in batch.fields:
                for row, length in zip(batch[name].rows(), batch[key].values.tolist(), strict=True):
                    masks[tuple(row.tolist())] = (torch.arange(len(row)) >= length).int()
    return masks


def judge_gradients(run_dir: Path) -> Iterator[Finding]:
    """Judge what a `ProbedRun` has found. Yields findings for each train call."""
    for call, found in json.loads((run_dir / _FILE).read_text()).items():
        probes = [_Probe(**probe) for probe in found]
        if probes:
            yield _judge_slopes(f"{call}: gradient of the loss", probes)
            if any(probe.rows for probe in probes):
                yield _judge_tokens(f"{call}: tokens that the loss learns", probes)


def _judge_slopes(check: str, probes: list[_Probe]) -> Finding:
    if not all(probe.finite for probe in probes):
        return Finding(
            check,
            "it is not finite",
            "a root, logarithm or quotient at 0, perhaps in the branch of a torch.where that is not taken",
        )
    if not all(probe.repeats for probe in probes):
        text = "not compared with finite differences, because the loss changes from call to call"
        return Finding(check, notes=(text,))
    wrong = next((probe for probe in probes if probe.differs), None)
    if all(probe.zero for probe in probes):
        if wrong is not None:
            return Finding(
                check,
                f"it is 0, but the loss changes with the model's output (by {wrong.measured:.4g} along a random"
                " direction)",
                "detach(), .data, .item() or no_grad() cuts the loss off from the model",
            )
        return Finding(check, notes=("it is 0, and the loss does not change with the model's output",))
    if wrong is None:
        return Finding(check)
    return Finding(
        check,
        notes=(
            f"along a random direction, the loss changes by {wrong.measured:.4g}, and its gradient says"
            f" {wrong.gradient:.4g}; that is right only if a factor is detached on purpose",
        ),
    )


def _judge_tokens(check: str, probes: list[_Probe]) -> Finding:
    rows, ended = sum(probe.rows for probe in probes), sum(probe.ended for probe in probes)
    asked = sum(probe.asked for probe in probes)
    notes = (f"{asked:,} tokens of prompts have a gradient, in {rows:,} sequences",) if asked else ()
    if rows >= _LEAST_ROWS and ended == 0:
        return Finding(
            check,
            f"none of {rows:,} sequences has a gradient at its last token, so the model never learns to stop",
            "labels are shifted; logprobs[t] already belongs to token t, given the tokens before it",
            notes,
        )
    return Finding(check, notes=notes)
