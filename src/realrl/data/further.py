"""Fields of records that no key is made of, such as a reference answer: functions see them."""

from collections.abc import Callable, Mapping
from typing import Any

FieldFilter = Callable[[str], bool]
"""Whether a field of that name is kept."""


def keep_nothing(name: str) -> bool:
    """No field, as where no function runs."""
    return False


class FurtherFields:
    """Values by field, one per item, as records come in.

    Columns hold references: items made of one record share its values, and no record is kept as a whole.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self._items = 0

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add an item with these fields; it has None for those that only other items have."""
        for name in fields.keys() - self.columns.keys():
            self.columns[name] = [None] * self._items
        for name, column in self.columns.items():
            column.append(fields.get(name))
        self._items += 1
