"""Keyword arguments of an algorithm as the settings of a recipe. No torch before an object of it is given."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError, join
from realrl.config.explain import brief, list_paths, nearest
from realrl.config.files import whole_file
from realrl.config.script_objects import add_function
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import change_settings, rename_setting
from realrl.recipe.other_names import OTHER_NAMES


def read_arguments(spec: AlgorithmSpec, reference: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make the settings of a recipe from keyword arguments. `reference` is the `algorithm` of the recipe.

    Raises UserError for an unknown name, a wrong object, or two names of one setting.

    A name is a role (`model`, `ref`, `critic`, `reward_model`), a part of the data (`data`, `eval_data`), a setting
    at the top of recipes or, if that is unambiguous, below it (`samples`, `max_new_tokens`), a path in quotes
    (`**{"data.batch": 8}`), or another tool's name (docs/recipes.md). `tokenizer`, `judge` and `environment` take
    objects, too.
    """
    main = next(iter(spec.roles))
    settings: dict[str, Any] = {"algorithm": reference}
    given: dict[str, str] = {}
    changes: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        role = {"model": main, "reward_model": "reward"}.get(name, name)
        if name in ("data", "train_dataset"):
            changes += _read_data(value, "train")
        elif name in ("eval_data", "eval_dataset"):
            changes += _read_data(value, "eval")
        elif (name == "reward" and "reward" in spec.recipe.model_fields) or name == "reward_funcs":
            changes.append(("reward", _read_reward(value)))
        elif name in ("environment", "environment_factory"):
            changes.append(("environment", _read_environment(value)))
        elif name == "judge":
            changes.append(("evaluation.judge", add_function(name, value) if callable(value) else value))
        elif name == "tokenizer":
            changes.append((f"models.{main}.tokenizer", _save(value, "tokenizer")))
        elif role in spec.roles:
            changes.append((f"models.{role}", read_model(value)))
        else:
            path = _find_path(name, spec)
            if (earlier := given.setdefault(rename_setting(path, value, spec.recipe)[0], name)) != name:
                raise UserError(f"{earlier} and {name} are the same setting; give one of them")
            changes.append((path, value))
    return change_settings(settings, changes)


def _find_path(name: str, spec: AlgorithmSpec) -> str:
    """Find the path of a setting by its last part; the sections of the algorithm itself come first."""
    if "." in name or name in spec.recipe.model_fields or rename_setting(name, None, spec.recipe)[0] != name:
        return name
    paths = list(list_paths(spec.recipe))
    own = [path for path in paths if path.partition(".")[0] not in Experiment.model_fields]
    main = [path for path in paths if path.startswith(f"models.{next(iter(spec.roles))}.")]
    rest = [path for path in paths if not path.startswith("models.")]
    for candidates in (own, main, rest):
        found = [path for path in candidates if path.rpartition(".")[2] == name]
        # A section repeats in others, for example `generation` in `evaluation`; the shortest path is meant.
        shortest = min((path.count(".") for path in found), default=0)
        found = [path for path in found if path.count(".") == shortest]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f'{name} may be {join(found, "or")}; write **{{"{found[0]}": ...}}')
    if name in OTHER_NAMES:
        return name  # its error message says what to use instead
    known = dict.fromkeys(path.rpartition(".")[2] for path in (*own, *main, *rest))
    hint = nearest(name, (*known, *spec.roles, "model", "data", "eval_data", "reward_model"))
    raise UserError(
        f"{spec.name} has no argument {name}"
        + (f"; did you mean {hint}?" if hint else f"; `realrl config {spec.name} --all` lists its settings")
    )


def _read_reward(value: Any) -> Any:
    """Read a reward: as in a recipe, a function, or a list or mapping of functions."""
    if callable(value):
        return add_function("reward", value)
    if isinstance(value, list | tuple):
        functions = {_name_term(term): term for term in value}
        if len(functions) < len(value):
            raise UserError("reward: two functions have the same name; give a mapping of names to functions")
        return {name: _read_term(term) for name, term in functions.items()}
    if isinstance(value, Mapping) and any(callable(_of_pair(term)) for term in value.values()):
        return {name: _read_term(term) for name, term in value.items()}
    return value


def _read_environment(value: Any) -> Any:
    """Read an environment: as in a recipe, a class, or a section whose `factory` is a class."""
    if callable(value):
        return add_function("environment", value)
    if isinstance(value, Mapping) and callable(value.get("factory")):
        return {**value, "factory": add_function("environment", value["factory"])}
    if isinstance(value, Mapping) and any(callable(factory) for factory in value.values()):
        raise UserError(
            "environment: several environments are not supported; give one class, which may choose by a field of"
            " the record in its reset"
        )
    return value


def _name_term(term: Any) -> str:
    """Name a function of a list, or a reference FILE.py:FUNCTION."""
    if isinstance(term, str):
        return term.rpartition(":")[2]
    return str(getattr(term, "__name__", type(term).__name__))


def _of_pair(term: Any) -> Any:
    return term[0] if isinstance(term, tuple) and len(term) == 2 else term


def _read_term(term: Any) -> Any:
    """Read a term of a mixture: a function, a pair (function, weight), or a section as in a recipe."""
    function = _of_pair(term)
    if isinstance(term, str):
        return {"function": term}
    if not callable(function):
        return term
    section = {"function": add_function("reward", function)}
    return section | ({"weight": term[1]} if isinstance(term, tuple) else {})


def _read_data(value: Any, part: str) -> list[tuple[str, Any]]:
    """Read records: sources as in a recipe, a data set, a mapping of splits, a list of records, or a data frame."""
    if isinstance(value, str | os.PathLike):
        return [(f"data.{part}", os.fspath(value))]
    if isinstance(value, Mapping) and value and all(_is_table(split) for split in value.values()):
        splits = dict(value)  # a DatasetDict
        train = splits.pop("train", None)
        held_out = next((splits[name] for name in ("test", "validation", "eval") if name in splits), None)
        if train is None:
            raise UserError(f"data: the splits are {join(list(value))}; one must be train")
        found = [("data.train", _store(train))]
        return found if held_out is None else [*found, ("data.eval", _store(held_out))]
    if isinstance(value, Mapping) and part == "train" and "train" in value:
        return [("data", dict(value))]  # the section of a recipe
    if _is_table(value):
        return [(f"data.{part}", _store(value))]
    return [(f"data.{part}", value)]


def _is_table(value: Any) -> bool:
    """Check for records in memory: a list of mappings, a data set, or a data frame."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        records = bool(value) and all(isinstance(record, Mapping) for record in value)
        # A recipe writes a mixture of sources in this form, too.
        return records and not all(set(record) <= {"source", "weight"} for record in value)
    return hasattr(value, "to_dict") or hasattr(value, "column_names") or hasattr(value, "features")


def _list_records(table: Any) -> Iterable[Mapping[str, Any]]:
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # a data frame
        records: Iterable[Mapping[str, Any]] = table.to_dict(orient="records")
        return records
    return table


def _store(table: Any) -> str:
    """Write records to a file that is named by its content, and return its path.

    All processes of a run and later runs read the same file. Raises UserError if a value is not JSON.
    """
    lines = []
    for number, record in enumerate(_list_records(table), 1):
        try:
            lines.append(json.dumps(dict(record), ensure_ascii=False, default=_to_json))
        except (TypeError, ValueError) as error:
            raise UserError(f"data: record {number} cannot be written as JSON: {error}") from None
    content = "\n".join(lines) + "\n"
    file = _cache("data") / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.jsonl"
    if not file.exists():
        with whole_file(file) as partial:
            partial.write_text(content, encoding="utf-8")
    return str(file)


def _to_json(value: Any) -> Any:
    """Convert numbers and arrays of numpy, and dates."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")


def read_model(value: Any) -> Any:
    """Read a model: a path or hub name, a section as in a recipe, or an object of `transformers`."""
    if isinstance(value, str | os.PathLike):
        return {"path": os.fspath(value)}
    if value is None or isinstance(value, Mapping):
        return value
    return {"path": _save(value, "model")}


def _save(value: Any, kind: str) -> Any:
    """Save a model or a tokenizer of `transformers` in the cache, and return its directory."""
    if not hasattr(value, "save_pretrained"):
        return os.fspath(value) if isinstance(value, os.PathLike) else value
    digest = hashlib.sha256()
    if hasattr(value, "state_dict"):
        for name, tensor in value.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(_bytes()).numpy().tobytes())
        digest.update(value.config.to_json_string().encode())
    else:
        digest.update(value.backend_tokenizer.to_str().encode())
        digest.update(str(value.chat_template).encode())
    directory = _cache(kind) / digest.hexdigest()[:16]
    if not directory.is_dir():
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
        value.save_pretrained(unfinished)
        unfinished.rename(directory)
    return str(directory)


def _bytes() -> Any:
    import torch

    return torch.uint8


def _cache(kind: str) -> Path:
    """Find the directory of stored inputs, and make it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = base / "realrl" / "inputs" / kind
    directory.mkdir(parents=True, exist_ok=True)
    return directory
