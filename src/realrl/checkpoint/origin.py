"""Settings of the directory that a model was opened from, to be kept when it is saved. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.checkpoint.directory import CONFIG, GENERATION_CONFIG, config_file, generation_config_file
from realrl.config.errors import UserError
from realrl.config.json_file import read_json


@dataclass(frozen=True)
class Origin:
    """Settings of the directory that a model was opened from, read at the start of a run.

    The directory may be gone when the model is saved.
    """

    directory: Path
    config: Mapping[str, Any]
    """Contents of `config.json`."""
    generation: Mapping[str, Any] | None
    """Contents of `generation_config.json`; None where there is no such file."""
    generation_file: bytes = b""
    """That file as it stands."""

    def find_stop_token_ids(self, vocabulary: int) -> tuple[Path, tuple[int, ...]]:
        """Find the tokens that end generation, and the file that says so; UserError for invalid tokens.

        Like transformers, `generation_config.json` before `config.json`. Tokens must be of the model's
        vocabulary.
        """
        file = self.directory / CONFIG
        named = self.config.get("eos_token_id")
        if self.generation is not None and self.generation.get("eos_token_id") is not None:
            file = self.directory / GENERATION_CONFIG
            named = self.generation["eos_token_id"]
        listed = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int and 0 <= token < vocabulary for token in listed):
            raise UserError(
                f"{file}: eos_token_id={named!r} must be the id of a token, or a list of them, from 0 to"
                f" {vocabulary - 1}"
            )
        return file, tuple(listed)


def read_origin(path: str | Path) -> Origin:
    """Read the settings of a model in a directory or on the hub, without its weights.

    UserError where one of the files is no JSON object.
    """
    config = config_file(path)
    generation = generation_config_file(path)
    return Origin(
        directory=config.parent,
        config=read_json(config),
        generation=None if generation is None else read_json(generation),
        generation_file=b"" if generation is None else generation.read_bytes(),
    )
