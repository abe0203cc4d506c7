"""Tokens of a prefill: whole sequences, and parts of sequences that go on; what each context-parallel rank has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realrl.model.group import Group, all_gather
from realrl.model.packing import Packing
from realrl.model.paged_attention import CachePlaces, KeyRuns


@dataclass(frozen=True)
class EvenShare:
    """Tokens of one of several ranks that divide T tokens in order. Padding makes their shares equal."""

    tokens: int
    """T"""
    group: Group

    @property
    def count(self) -> int:
        """Number of tokens of each rank, padding included."""
        return -(-self.tokens // self.group.size)

    def select(self, values: Tensor) -> Tensor:
        """Select the values of this rank's tokens; those of padding are 0. [T] -> [count]"""
        padded = F.pad(values, (0, self.count * self.group.size - self.tokens))
        return padded[self.group.index * self.count :][: self.count]

    def select_rows(self, parts: Iterable[Tensor]) -> Tensor:
        """Select this rank's rows from consecutive parts of all rows; those of padding are 0. A single rank has one
        part. [any, C] each -> [count, C]"""
        if self.group.size == 1:
            (everything,) = parts
            return everything
        found, begin = [], self.group.index * self.count
        for rows in parts:
            found.append(rows[max(0, begin) : max(0, begin + self.count)])
            begin -= len(rows)
        own = torch.cat(found)
        return F.pad(own, (0, 0, 0, self.count - len(own)))

    def gather(self, own: Tensor) -> Tensor:
        """Gather rows of all ranks, without padding and without gradient. [count, C] -> [T, C]"""
        if self.group.size == 1 or not self.tokens:
            return own
        found = own.new_empty(self.count * self.group.size, own.shape[1])
        all_gather(found, own.contiguous(), self.group)
        return found[: self.tokens]


@dataclass(frozen=True, eq=False)
class Prefill:
    """T tokens whose keys and values are stored in a cache: whole sequences, and then parts of sequences that begin
    in the cache.

    Ranks that divide the cache also divide these tokens: those of the whole sequences, and those of the parts.
    """

    positions: Tensor
    """Position in its sequence of each token that this rank computes. [n] int64"""
    places: CachePlaces
    """Places of all T tokens in the cache."""
    whole: Packing | None
    """The whole sequences; None if there are none."""
    parts: Sequence[KeyRuns]
    """Keys that the tokens of the parts see, their own included, for some neighbouring tokens each."""
    share: EvenShare
    """This rank's tokens of the parts."""
    stored: tuple[Tensor, CachePlaces] | None = None
    """If ranks divide the cache: which of the T tokens this rank stores [N] int64, and their places among its
    own."""

    @property
    def divided(self) -> bool:
        """Whether several ranks divide the cache and these tokens."""
        return self.stored is not None

    def split(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Split the values of this rank's tokens into those of whole sequences and those of parts. [n, C]"""
        first = len(own) - self.share.count
        return own[:first], own[first:]

    def gather_whole(self, own: Tensor) -> Tensor:
        """Gather the values of whole sequences, with padding at the end, if several ranks divide them."""
        return own if self.whole is None or self.whole.share is None else self.whole.share.gather(own)

    def join(self, of_whole: Tensor, of_parts: Tensor) -> Tensor:
        """Join the gathered values of whole sequences, whose padding is dropped, and of parts. -> [T, C]"""
        if self.whole is not None and self.whole.share is not None:
            of_whole = of_whole[: self.whole.share.tokens]
        return torch.cat((of_whole, of_parts)) if len(of_parts) else of_whole

    def collect(self, own: Tensor) -> Tensor:
        """Collect the values of all tokens. [n, C] -> [T, C]"""
        if not self.divided:
            return own
        of_whole, of_parts = self.split(own)
        return self.join(self.gather_whole(of_whole), self.share.gather(of_parts))
