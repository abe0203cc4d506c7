"""Buffers of a decode batch: inputs and outputs of its decode steps, and the host's copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realrl.engine.generation.sampling_noise import SamplingNoise
from realrl.engine.generation.scheduler import SCRATCH, DecodeRow, DecodeTurn
from realrl.layout.kv_blocks import WHOLE_CACHE, CachePart, count_blocks, count_prompt_blocks
from realrl.model.paged_attention import CachedRows


@dataclass(frozen=True, eq=False)
class RowChoices:
    """How the next token of each row is chosen; see `TokenChoice`. All are [B]."""

    temperatures: Tensor
    """float32"""
    top_k: Tensor
    """int64"""
    top_p: Tensor
    """float64"""
    first_ends: Tensor
    """int64"""


@dataclass(frozen=True, eq=False)
class BufferedRows:
    """Views of the first B rows of the buffers: all inputs and outputs of a decode step, at fixed addresses."""

    cached: CachedRows
    tokens: Tensor
    """Input of the next step. [B] int64"""
    keys: Tensor
    """Keys of the sampling noise. [B] int64"""
    step: Tensor
    """Number of the next step in the turn. [1] int64"""
    steps: Tensor
    """Numbers of all steps of a turn. [steps, 1] int64"""
    noise: Tensor
    """Sampling noise of the steps of a turn. [steps, B] float64"""
    sampled: Tensor
    """Tokens sampled in the steps of a turn. [steps, B] int64"""
    logprobs: Tensor
    """Log-probabilities of the sampled tokens; only the last stage of a pipeline computes them. [steps, B]
    float32"""
    choices: RowChoices | None
    """None if tokens are chosen in the same way in all rows."""

    def begin_turn(self, noise: SamplingNoise | None) -> None:
        """Start a turn at step 0. If this stage samples (`noise` is not None), compute the noise of all steps."""
        self.step.zero_()
        if noise is not None:
            self.noise.copy_(noise.draw(self.keys, self.steps + self.cached.own_lengths))

    def advance(self, tokens: Tensor, logprobs: Tensor | None = None) -> None:
        """Record the tokens of a step, and make them the input of the next step. [B]"""
        self.sampled.index_copy_(0, self.step, tokens.unsqueeze(0))
        if logprobs is not None:
            self.logprobs.index_copy_(0, self.step, logprobs.unsqueeze(0))
        self.tokens.copy_(tokens)
        self.cached.own_lengths.add_(1)
        self.step.add_(1)


class RowBuffers:
    """Buffers of `size` rows. The host fills them as rows join and leave; decode steps update them without the
    host.

    On a CPU, host and steps use the same memory. For a GPU, the host has a mirror in pinned memory. It sends the
    mirror without waiting, and writes to it again only after it has seen the tokens of the turn.
    """

    def __init__(
        self,
        size: int,
        *,
        longest_prompt: int,
        new_tokens: int,
        steps: int,
        device: torch.device,
        mirrored: bool,
        part: CachePart = WHOLE_CACHE,
        choices: bool = False,
    ) -> None:
        """`steps` is the number of decode steps of a turn. `part` is the part of the cache that this rank holds.
        With `choices`, rows differ in how tokens are chosen."""
        # Finished rows are decoded until the end of the turn; their surplus tokens go to the scratch block.
        own = count_blocks(new_tokens + steps - 1, part.block_tokens)
        shared = max(1, count_prompt_blocks(longest_prompt, part.block_tokens))
        self._part = part
        self._host = {
            "tokens": torch.zeros(size, dtype=torch.int64),
            "keys": torch.zeros(size, dtype=torch.int64),
            "prompt_tables": torch.full((size, shared), SCRATCH, dtype=torch.int64),
            "prompt_lengths": torch.zeros(size, dtype=torch.int64),
            "own_tables": torch.full((size, own), SCRATCH, dtype=torch.int64),
            "own_lengths": torch.zeros(size, dtype=torch.int64),
        }
        self._choices = choices
        if choices:
            self._host |= {
                "temperatures": torch.ones(size, dtype=torch.float32),
                "top_k": torch.zeros(size, dtype=torch.int64),
                "top_p": torch.ones(size, dtype=torch.float64),
                "first_ends": torch.zeros(size, dtype=torch.int64),
            }
        self._mirrored = mirrored
        self._device = self._host
        if mirrored:
            self._host = {name: tensor.pin_memory() for name, tensor in self._host.items()}
            self._device = {name: torch.empty_like(x, device=device) for name, x in self._host.items()}
        self._arrays = {name: tensor.numpy() for name, tensor in self._host.items()}
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = torch.arange(steps, device=device).unsqueeze(-1)
        self._noise = torch.zeros(steps, size, dtype=torch.float64, device=device)
        self._sampled = torch.zeros(steps, size, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(steps, size, dtype=torch.float32, device=device)
        self._prompt_starts = torch.zeros(1, dtype=torch.int64)
        self._most = 1

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        of_steps = (self._step, self._steps, self._noise, self._sampled, self._logprobs)
        return sum(tensor.nbytes for tensor in (*self._device.values(), *of_steps))

    def arrange(self, turn: DecodeTurn) -> None:
        """Write the rows that a turn changes into the buffers."""
        arrays = self._arrays
        rows = turn.rows
        if turn.rearranged:
            slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
            for array in arrays.values():
                array[: len(rows)] = array[slots]
            for slot, row in enumerate(rows):
                if row.slot < 0:
                    self._place(slot, row)
                row.slot = slot
            for name in ("own_tables", "prompt_lengths"):
                arrays[name][len(rows) :] = 0  # rows that only pad a step write to the scratch block
            self._find_prompts(rows)
        # Steps of the last turn have added tokens to rows that only pad it.
        arrays["own_lengths"][len(rows) :] = 0
        for row in turn.grown:
            arrays["own_tables"][row.slot, : len(row.blocks)] = row.blocks
        if self._mirrored:
            for name, tensor in self._device.items():
                tensor.copy_(self._host[name], non_blocking=True)

    def _place(self, slot: int, row: DecodeRow) -> None:
        arrays = self._arrays
        arrays["tokens"][slot] = (row.tokens or row.prompt.tokens)[-1]
        arrays["keys"][slot] = row.key
        arrays["prompt_lengths"][slot] = row.prompt.length - 1
        arrays["own_lengths"][slot] = len(row.tokens)
        for name, blocks in (("prompt_tables", row.prompt.blocks), ("own_tables", row.blocks)):
            arrays[name][slot] = SCRATCH
            arrays[name][slot, : len(blocks)] = blocks
        if self._choices:
            choice = row.choice
            arrays["temperatures"][slot], arrays["top_k"][slot] = choice.temperature, choice.top_k
            arrays["top_p"][slot], arrays["first_ends"][slot] = choice.top_p, choice.first_end

    def _find_prompts(self, rows: Sequence[DecodeRow]) -> None:
        prompts = np.fromiter((row.prompt.number for row in rows), np.int64, len(rows))
        changes = np.flatnonzero(np.diff(prompts, prepend=-1, append=-1))
        self._prompt_starts = torch.from_numpy(changes)
        self._most = int(np.diff(changes).max(initial=1))

    def view(self, rows: int) -> BufferedRows:
        """View the first rows. Those behind the last prompt only pad a step. On a CPU, each of them stands for a
        prompt of its own: starts of prompts [0, 2, 3] become [0, 2, 3, 4, 5] for 5 rows."""
        device = self._device
        known = self._prompt_starts[self._prompt_starts <= rows]
        padding = torch.arange(int(known[-1]) + 1 if len(known) else 0, rows + 1)
        names = ("temperatures", "top_k", "top_p", "first_ends")
        return BufferedRows(
            cached=CachedRows(
                prompt_tables=device["prompt_tables"][:rows],
                prompt_lengths=device["prompt_lengths"][:rows],
                own_tables=device["own_tables"][:rows],
                own_lengths=device["own_lengths"][:rows],
                prompt_starts=torch.cat((known, padding)),
                most=self._most,
                part=self._part,
            ),
            tokens=device["tokens"][:rows],
            keys=device["keys"][:rows],
            step=self._step,
            steps=self._steps,
            noise=self._noise[:, :rows],
            sampled=self._sampled[:, :rows],
            logprobs=self._logprobs[:, :rows],
            choices=RowChoices(*(device[name][:rows] for name in names)) if self._choices else None,
        )

    def read(self, rows: int, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the tokens of a turn's steps; return the tokens and the log-probabilities of each row."""
        tokens = self._sampled[:steps, :rows].cpu()
        logprobs = self._logprobs[:steps, :rows].cpu()
        if self._mirrored:
            self._arrays["tokens"][:rows] = tokens[-1].numpy()
            self._arrays["own_lengths"][:rows] += steps
        return tokens.T.tolist(), logprobs.T.tolist()
