"""Number of devices as people write it: nodes x devices per node."""

from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import brief


def not_devices(value: Any) -> str:
    """Write the error message for a value that is no number of devices."""
    return f"{brief(value)} is not understood; write nodes x devices per node, for example 1x2 or 2x8+1x4"


def check_cluster(value: Any) -> Any:
    """Check a cluster before its type is validated; UserError for what is no text."""
    if not isinstance(value, str):
        raise UserError(not_devices(value))
    return value
