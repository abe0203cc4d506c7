"""Standard error that ends nothing when it cannot be written: its reader or its terminal may be gone. No torch."""

import io
from contextlib import suppress
from typing import Any


class _Screen(io.FileIO):
    """File whose writes never fail; what cannot be written is lost."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            written = super().write(data)
            if written is not None:
                return written
        return len(data)


def open_screen(descriptor: int, *, owned: bool = True) -> io.TextIOWrapper:
    """Open a descriptor for messages, by lines; `owned`: whether it is closed with the file."""
    screen = _Screen(descriptor, "w", closefd=owned)
    return io.TextIOWrapper(
        io.BufferedWriter(screen), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
