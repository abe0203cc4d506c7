"""Write src/realrl/__init__.pyi: the classes of the Python API with the arguments that editors show.

The classes are made from the settings of recipes. `tests/api/test_stubs.py` checks that the file is up to date.
"""

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from realrl import NAMES
from realrl.api.algorithm import make_class
from realrl.config.base import Settings
from realrl.config.explain import section_class
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.experiment import Experiment
from realrl.recipe.registry import BUILT_IN

STUB = Path(__file__).parents[1] / "src" / "realrl" / "__init__.pyi"
_HEAD = '''"""ReaL-RL: RLHF training that plans itself. Written by tools/python_stubs.py."""

from collections.abc import Mapping
from typing import Any, Literal

{imports}

__version__: str
'''
_WIDTH = 90
_SHORT = (
    "batch",
    "steps",
    "epochs",
    "lr",
    "lora",
    "max_tokens",
    "max_prompt_tokens",
    "max_new_tokens",
    "temperature",
)
_TOP = ("run_dir", "cluster", "plan", "device", "seed", "resume", "overwrite", "micro_batch_tokens")
"""Settings that most scripts set: `_SHORT` in sections of a recipe, `_TOP` at its top level. All other settings are
accepted too."""


def write_stub() -> str:
    """Write the text of the stub."""
    places = [(*place.split(":"), name) for name, place in NAMES.items()]
    imports = [f"from {module} import {attribute} as {name}" for module, attribute, name in sorted(places)]
    head = _HEAD.format(imports="\n".join(imports))
    return "\n\n".join([head, *(_write_class(name) for name in BUILT_IN)])


def _write_class(algorithm: str) -> str:
    cls = make_class(algorithm)
    lines = [
        f"class {cls.__name__}(Algorithm):",
        f'    """{cls.__doc__}."""',
        "",
        "    def __init__(",
        "        self,",
    ]
    arguments = _list_arguments(cls.spec)
    for position, (name, (kind, _)) in enumerate(arguments.items()):
        if position == 1:
            lines.append("        *,")
        lines.append(f"        {name}: {kind} = ...,")
    lines += ["        **settings: Any,", "    ) -> None:", '        """']
    lines += [f"        {name}: {_shorten(about)}" for name, (_, about) in arguments.items() if about]
    return "\n".join([*lines, '        """', ""])


def _shorten(text: str) -> str:
    """Keep the first clause of a long description; `realrl config` shows all of it."""
    return text if len(text) <= _WIDTH else text.partition(": ")[0].partition("; ")[0]


def _list_arguments(spec: AlgorithmSpec) -> dict[str, tuple[str, str]]:
    """List the arguments of a class with their types and meanings."""
    main = next(iter(spec.roles))
    found = {"model": ("Any", f"path, hub name or object of the {main}, or its section")}
    found |= {role: ("Any", "the model of this role") for role in spec.roles if role not in (main, "reward")}
    if "reward" in spec.roles and main != "reward":
        found["reward_model"] = ("Any", "a reward model")
    if "reward" in spec.recipe.model_fields:
        found["reward"] = ("Any", "a function, a list or mapping of functions, or the section of a recipe")
    found["data"] = (
        "Any",
        "records: files, a name of a data set, a Dataset, a data frame or a list of records",
    )
    found["eval_data"] = ("Any", "records for evaluations, likewise")
    found["callbacks"] = ("Any", "functions of a Step, or objects with on_step or on_evaluation")
    own = [name for name in spec.recipe.model_fields if name not in Experiment.model_fields]
    for name in own:
        inner = section_class(spec.recipe.model_fields[name])
        if inner is not None and name != "generation" and name not in found:
            found |= {
                key: _describe(field) for key, field in inner.written_fields().items() if key not in found
            }
    found |= {name: _describe(spec.recipe.model_fields[name]) for name in _TOP}
    for short in _SHORT:
        field = _find_short(spec, main, short)
        if field is not None and short not in found:
            found[short] = _describe(field)
    return found


def _find_short(spec: AlgorithmSpec, main: str, name: str) -> FieldInfo | None:
    fields = spec.recipe.model_fields
    models = section_class(fields["models"])
    assert models is not None, "recipes have models"
    model = section_class(models.model_fields[main])
    assert model is not None, "a role has a section"
    optimizer = section_class(model.model_fields["optimizer"]) if "optimizer" in model.model_fields else None
    sections = [
        section_class(fields[section]) for section in ("data", "training", "generation") if section in fields
    ]
    for section in (*sections, model, optimizer):
        if section is not None and name in section.model_fields:
            return section.model_fields[name]
    return None


def _describe(field: FieldInfo) -> tuple[str, str]:
    about = " ".join((field.description or "").split())
    return _type(field.annotation), about.partition(". ")[0].rstrip(".").replace("\\", "\\\\")


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type, arguments)))
    if annotation in (int, float, str, bool):
        return str(annotation.__name__)
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "Mapping[str, Any]"
    return "Any"


if __name__ == "__main__":
    STUB.write_text(write_stub(), encoding="utf-8")
    sys.exit(0)
