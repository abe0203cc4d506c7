"""Model directories, and the settings of a model that are known without its weights. No torch."""

from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.families.adapter_config import ADAPTER_CONFIG, SavedAdapters, find_adapters
from realrl.families.config_json import read_config
from realrl.families.shape import ModelShape
from realrl.recipe.model import ModelConfig, TrainedModelConfig

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def local_directory(path: str | Path) -> Path:
    """Find the directory itself, or download the hub model of that name; UserError if there is neither."""
    directory = local_path(str(path))
    if directory.is_dir():
        return directory
    if is_local(str(path)):
        raise UserError(f"{path}: no such model directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise _not_given(path, error) from error


def find_saved_adapters(path: str | Path) -> SavedAdapters | None:
    """Find the adapters of a directory or hub name that holds these and no whole model; None for any other.

    UserError where they cannot be used.
    """
    if is_local(str(path)) or local_path(str(path)).is_dir():
        return find_adapters(path)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(str(path), CONFIG)
    except EntryNotFoundError:
        return find_adapters(local_directory(path))
    except Exception:  # which is told where the model is opened
        return None
    return None


def known_adapters(path: str | Path) -> SavedAdapters | None:
    """Find the adapters that a directory holds, or the cache of hub models, without asking the network."""
    if is_local(str(path)) or local_path(str(path)).is_dir():
        return find_adapters(path)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(path), ADAPTER_CONFIG)
    return find_adapters(Path(cached).parent) if isinstance(cached, str) else None


def find_base(path: str | Path) -> str | Path:
    """Find the model that adapters are for; a whole model is its own."""
    adapters = find_saved_adapters(path)
    return path if adapters is None else adapters.base


def config_file(path: str | Path) -> Path:
    """Find the `config.json` of a model in a directory or on the hub, downloading nothing else.

    UserError where there is no such model; a directory may lack the file. Adapters have that of their base.
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
    """Find the `generation_config.json` of a model, likewise; None where it has none."""
    path = find_base(path)
    directory = local_path(str(path))
    if is_local(str(path)) or directory.is_dir():
        file = directory / GENERATION_CONFIG
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(str(path), GENERATION_CONFIG))
    except EntryNotFoundError:  # also without a network, where the cache holds a model that has no such file
        return None
    except Exception as error:
        raise _not_given(path, error) from error


def read_shape(path: str | Path, family: str | None = None) -> ModelShape:
    """Read the shape of a model in a directory or on the hub; UserError if absent or not supported.

    `family` is how `find_family` finds the model's family; by default its `config.json` says it.
    """
    return read_config(config_file(path), family)


def known_shape(config: ModelConfig) -> ModelShape | None:
    """Find the shape of a role's model without asking the network; None where it is not known.

    Sources: the recipe, the model's directory, the cache of hub models. UserError where a directory's `config.json`
    is wrong.
    """
    found = _known_base(config)
    return None if found is None else _adapt(found, config)


def _adapt(shape: ModelShape, config: ModelConfig) -> ModelShape:
    """Add what a role trains beside its model, how it stores its matrices, and the vocabulary that it grows to.

    UserError if the model has more tokens than that.
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
    """Find the shape of a role's model, asking the hub if need be, for `config.json` alone.

    UserError where it cannot be found.
    """
    known = known_shape(config)
    if known is not None:
        return known
    assert config.path is not None, "a model has a path or a shape"
    return _adapt(read_shape(config.path, config.family), config)


def _not_given(path: str | Path, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(f"{path}: no such model directory, and the Hugging Face hub gave none: {reason}")
