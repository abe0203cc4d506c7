"""What measurements depend on besides the machine."""

import platform
from importlib.metadata import version

from realrl import __version__


def read_versions() -> dict[str, str]:
    """Package -> version. No torch is loaded."""
    return {"python": platform.python_version(), "realrl": __version__, "torch": version("torch")}
