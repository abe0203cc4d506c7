"""Origins of items, FILE:LINE, for error messages."""

from array import array
from collections.abc import Sequence


class Origins:
    """Origins of many items in few bytes: the names of files are kept once."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._file = array("i")
        self._line = array("q")

    def add(self, origin: str) -> None:
        """Add an item: FILE:LINE, or any other text."""
        file, _, line = origin.rpartition(":")
        known = line.isdecimal() and len(line) < 19
        name = file if known else origin
        if name not in self._files:
            self._files[name] = len(self._names)
            self._names.append(name)
        self._file.append(self._files[name])
        self._line.append(int(line) if known else -1)

    def list(self, indices: Sequence[int]) -> list[str]:
        """List the origins of the items at `indices`; empty where none were added."""
        return [self._text(i) for i in indices] if self._file else []

    def _text(self, item: int) -> str:
        name, line = self._names[self._file[item]], self._line[item]
        return name if line < 0 else f"{name}:{line}"
