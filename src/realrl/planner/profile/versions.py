"""Software versions that measurements depend on."""

import platform
from importlib.metadata import version

from realrl import __version__


def read_versions() -> dict[str, str]:
    """Return the version of Python and of each relevant package, by name, without loading torch."""
    return {"python": platform.python_version(), "realrl": __version__, "torch": version("torch")}
