"""Settings of the directory that a model was opened from, to be kept when it is saved. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.checkpoint.directory import CONFIG, GENERATION_CONFIG, config_file, generation_config_file
from realrl.config.json_file import read_json


@dataclass(frozen=True)
class Origin:
    """The settings in the directory that a model was opened from, read when the run starts: the directory may be
    gone when the model is saved."""

    directory: Path
    config: Mapping[str, Any]
    """The contents of `config.json`."""
    generation: Mapping[str, Any] | None
    """The contents of `generation_config.json`; None where there is no such file."""

    @property
    def ends(self) -> tuple[Path, Any]:
        """The file that says which tokens end generation, and its `eos_token_id` as it stands there; like
        transformers, `generation_config.json` before `config.json`."""
        if self.generation is not None and self.generation.get("eos_token_id") is not None:
            return self.directory / GENERATION_CONFIG, self.generation["eos_token_id"]
        return self.directory / CONFIG, self.config.get("eos_token_id")


def read_origin(path: str | Path) -> Origin:
    """The settings of the model in a directory or on the hub, whose weights are not fetched; UserError where a file
    of them is no JSON object."""
    config, generation = config_file(path), generation_config_file(path)
    return Origin(
        directory=config.parent,
        config=read_json(config),
        generation=None if generation is None else read_json(generation),
    )
