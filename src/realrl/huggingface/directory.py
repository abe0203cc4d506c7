"""Files, shapes and settings of models in directories and on the hub, without their weights.

Does not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.paths import is_local, local_path
from realrl.families.adapter_config import ADAPTER_CONFIG, ADAPTER_FILE, SavedAdapters, find_adapters
from realrl.families.config_json import read_config
from realrl.families.shape import ModelShape
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig, TrainedModelConfig

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
OTHER_FILES = ["original/*", "metal/*"]
"""Folders in which gpt-oss and Llama repeat their weights for other programs."""


def local_directory(path: str | Path) -> Path:
    """Find a local directory, or download the hub model of that name. Raises UserError if there is neither."""
    directory = local_path(str(path))
    if directory.is_dir():
        return directory
    if is_local(str(path)):
        raise UserError(f"{path}: no such model directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES, ignore_patterns=OTHER_FILES))
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise _not_given(path, error) from error


def find_saved_adapters(path: str | Path) -> SavedAdapters | None:
    """Find the adapters in a directory or on the hub. Returns None if there is a whole model instead.

    Raises UserError if the adapters cannot be used.
    """
    if is_local(str(path)) or local_path(str(path)).is_dir():
        return find_adapters(path)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(str(path), CONFIG)
    except EntryNotFoundError:
        return find_adapters(local_directory(path))
    except Exception:  # the error is reported when the model is opened
        return None
    return None


def known_adapters(path: str | Path) -> SavedAdapters | None:
    """Find the adapters in a directory or in the cache of hub models, without using the network."""
    if is_local(str(path)) or local_path(str(path)).is_dir():
        return find_adapters(path)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(path), ADAPTER_CONFIG)
    return find_adapters(Path(cached).parent) if isinstance(cached, str) else None


def adapts_single_experts(saved: SavedAdapters) -> bool:
    """Return whether saved adapters belong to single experts, as in files of earlier versions of PEFT. Such
    adapters can only be merged."""
    from realrl.huggingface.headers import read_header

    file = saved.directory / ADAPTER_FILE
    return file.exists() and any(_SINGLE_EXPERT.search(tensor.name) for tensor in read_header(file, None))


def find_base(path: str | Path) -> str | Path:
    """Return the base model of adapters. A whole model is its own base."""
    adapters = find_saved_adapters(path)
    return path if adapters is None else adapters.base


def config_file(path: str | Path) -> Path:
    """Find the `config.json` of a model in a directory or on the hub, without downloading the model's weights.

    For adapters, this is the `config.json` of their base model. The file may be missing in a directory. Raises
    UserError if there is no such model.
    """
    path = find_base(path)
    directory = local_path(str(path))
    if directory.is_dir():
        return directory / CONFIG
    if is_local(str(path)):
        raise UserError(f"{path}: no such model directory")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(path), CONFIG))
    except Exception as error:
        raise _not_given(path, error) from error


def generation_config_file(path: str | Path) -> Path | None:
    """Find the `generation_config.json` of a model in a directory or on the hub; None if the model has none."""
    path = find_base(path)
    directory = local_path(str(path))
    if is_local(str(path)) or directory.is_dir():
        file = directory / GENERATION_CONFIG
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(str(path), GENERATION_CONFIG))
    except EntryNotFoundError:  # also raised offline, for a cached model without this file
        return None
    except Exception as error:
        raise _not_given(path, error) from error


def read_shape(path: str | Path, family: str | None = None) -> ModelShape:
    """Read the shape of a model in a directory or on the hub.

    `family` is a name or reference for `find_family`; by default, `config.json` names the family. Raises UserError
    if the model is missing or its family is not supported.
    """
    return read_config(config_file(path), family)


def known_shape(config: ModelConfig) -> ModelShape | None:
    """Find the shape of a role's model without using the network; None if it is not known.

    The shape comes from the recipe, the model's directory, or the cache of hub models. Raises UserError if
    `config.json` is invalid.
    """
    found = _known_base(config)
    return None if found is None else _adapt(found, config)


def _adapt(shape: ModelShape, config: ModelConfig) -> ModelShape:
    """Add the recipe's adapters, quantisation and larger vocabulary to the shape of a role's model.

    Raises UserError if the vocabulary would shrink.
    """
    size = config.vocab_size
    if size is not None and size < shape.vocab_size:
        raise UserError(
            f"vocab_size={size} is less than the {shape.vocab_size} tokens that {config.path} has; a vocabulary can"
            " only grow"
        )
    if size is not None and size > shape.vocab_size:
        shape = shape.model_copy(update={"vocab_size": size, "grown_from": shape.vocab_size})
    lora = config.lora if isinstance(config, TrainedModelConfig) else None
    if lora is None and config.quantised is None:
        return shape
    return shape.model_copy(update={"lora": lora, "quantised": config.quantised})


def _known_base(config: ModelConfig) -> ModelShape | None:
    if config.path is None or config.shape is not None:
        return config.shape
    if is_local(config.path):
        file = local_path(str(find_base(config.path))) / CONFIG
        return read_config(file, config.family) if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(config.path, "config.json")
    return read_config(Path(cached), config.family) if isinstance(cached, str) else None


def find_model_shape(config: ModelConfig) -> ModelShape:
    """Find the shape of a role's model. The weights of a model on the hub are not downloaded.

    Raises UserError if the shape cannot be found.
    """
    known = known_shape(config)
    if known is not None:
        return known
    assert config.path is not None, "a model has a path or a shape"
    return _adapt(read_shape(config.path, config.family), config)


def _not_given(path: str | Path, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(f"{path}: no such model directory, and the Hugging Face hub gave none: {reason}")


@dataclass(frozen=True)
class Origin:
    """Settings in the directory from which a model was loaded.

    They are read at the start of a run, because the directory may be gone when the model is saved.
    """

    directory: Path
    config: Mapping[str, Any]
    """Contents of `config.json`."""
    generation: Mapping[str, Any] | None
    """Contents of `generation_config.json`; None without such a file."""
    generation_file: bytes = b""
    """Bytes of `generation_config.json`."""

    def find_stop_token_ids(self, vocabulary: int) -> tuple[Path, tuple[int, ...]]:
        """Return the file that lists the tokens that end generation, and the ids of these tokens.

        As in transformers, `generation_config.json` takes precedence over `config.json`. Raises UserError for a
        token outside the model's vocabulary.
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

    Raises UserError if one of the files is not a JSON object.
    """
    config = config_file(path)
    generation = generation_config_file(path)
    return Origin(
        directory=config.parent,
        config=read_json(config),
        generation=None if generation is None else read_json(generation),
        generation_file=b"" if generation is None else generation.read_bytes(),
    )


def check_directories(experiment: Experiment) -> None:
    """Check that the recipe's local directories of models and tokenizers exist. Raises UserError if not."""
    for role in experiment.spec.list_sources_first(experiment):
        for field in ("path", "tokenizer"):
            path = getattr(getattr(experiment.models, role), field)
            if path is not None and is_local(path) and not local_path(path).is_dir():
                raise UserError(f"models.{role}.{field}={path}: no such directory")
    against = experiment.evaluation.against
    if against is not None and is_local(against) and not local_path(against).is_dir():
        raise UserError(f"evaluation.against={against}: no such directory")
