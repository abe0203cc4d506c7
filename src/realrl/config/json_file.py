"""JSON files that hold one object."""

import json
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: a JSON object is expected")
    return content
