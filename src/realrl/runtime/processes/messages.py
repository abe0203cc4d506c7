"""Send Python values as messages between ranks.

Values are pickled, because plans and times are dataclasses. The reader creates only plain values and records of
this package, so a message can never make a rank run other code.
"""

import importlib
import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from realrl.config.errors import RunError, UserError

_PACKAGE = __name__.partition(".")[0]
_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "range"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("collections", "deque"),
    ("collections", "defaultdict"),
    ("collections", "OrderedDict"),
}
"""Types that a message may contain, in addition to the types that pickle encodes without naming a class."""


class _PlainUnpickler(pickle.Unpickler):
    """Reader that refuses all classes and functions except records and plain types."""

    def find_class(self, module: str, name: str) -> Any:
        """Find a class by name.

        Raises UnpicklingError for everything that is not a plain type or a record of this package.
        """
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        # Do not call super(), which would import any module.
        if module.partition(".")[0] == _PACKAGE:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and _is_record(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} may not be in a message between ranks")


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, BaseModel | Enum | UserError | RunError)


def pack(value: Any) -> bytes:
    """Convert a value to a message."""
    return pickle.dumps(value)


def unpack(message: bytes) -> Any:
    """Read the value of a message. Raises UnpicklingError if it contains more than plain values and records."""
    return _PlainUnpickler(io.BytesIO(message)).load()


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """All-gather one value per rank, in a group for CPU tensors.

    Returns the values in the order of ranks, on every rank.
    """
    message = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(message)] = message
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(everyone, padded, group=group)
    return [unpack(part[: int(size)].numpy().tobytes()) for part, size in zip(everyone, sizes, strict=True)]
