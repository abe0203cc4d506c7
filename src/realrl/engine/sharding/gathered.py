"""Parameters of ZeRO-3: rows that data-parallel ranks store, gathered section by section."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers.local_set import LocalSet
from realrl.engine.sharding.section_buffers import SectionBuffer, group_by_section
from realrl.layout.shard import Shard
from realrl.model.parallel.group import Group, all_gather
from realrl.model.parallel.sections import Section


class GatheredParameters:
    """Parameters of all sections of a stage, each of which has memory from its gathering until it is freed."""

    def __init__(self, sets: Mapping[str, LocalSet], shard: Shard, rank: int, group: Group) -> None:
        """`sets`: parameter sets of a model as this global rank stores them; `group`: its data-parallel ranks."""
        self._group = group
        self._sections: dict[Section, list[tuple[SectionBuffer, LocalSet]]] = {}
        self._of: dict[str, SectionBuffer] = {}
        for held in sets.values():
            stored = held.buffer.data
            for section, stacks in group_by_section(shard, held.layout.gathered_tensors(rank)).items():
                buffer = SectionBuffer(stacks, group.size, stored.dtype, stored.device)
                self._sections.setdefault(section, []).append((buffer, held))
                self._of |= {name: buffer for names in buffer.stacks for name in names}
        self._arriving: dict[Section, list[dist.Work | None]] = {}

    def fused(self, *names: str) -> Tensor:
        """View neighbouring tensors as one, all rows; it has values while its section is gathered."""
        return self._of[names[0]].fused(*names)

    def start(self, section: Section) -> None:
        """Start to gather a section, unless it is gathered or about to be."""
        if section in self._arriving:
            return
        works = self._arriving[section] = []
        for buffer, held in self._sections.get(section, ()):
            buffer.allocate()
            for names in buffer.stacks:
                mine = held.buffer.fused(*names).view(-1)
                works.append(all_gather(buffer.view_stack(names), mine, self._group, async_op=True))

    def gather(self, section: Section) -> None:
        """Gather a section, and wait until it has its values."""
        self.start(section)
        for work in self._arriving[section]:
            if work is not None:
                work.wait()
        self._arriving[section] = []

    def store(self, section: Section) -> None:
        """Take this rank's rows from a section that is gathered and has changed."""
        for buffer, held in self._sections.get(section, ()):
            for names in buffer.stacks:
                mine = held.buffer.fused(*names).view(-1)
                mine.copy_(buffer.view_stack(names).view(self._group.size, -1)[self._group.index])

    def free(self, section: Section) -> None:
        """Give the memory of a section back, if it has any."""
        if section in self._arriving:
            self.gather(section)
            for buffer, _ in self._sections.get(section, ()):
                buffer.free()
            del self._arriving[section]

    def free_all(self) -> None:
        """Give the memory of all sections back."""
        for section in [*self._arriving]:
            self.free(section)
