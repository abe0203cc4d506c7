"""Recipes made small: tiny models, a few records, two steps."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from realrl.recipe.algorithm import AlgorithmSpec, get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import apply_override, dump_experiment
from realrl.recipe.model import TrainedModelConfig
from realrl.testing.models import list_texts, save_model, train_tokenizer
from realrl.testing.records import make_records
from realrl.testing.shape import SHAPE

STEPS = 2
"""Training steps: in the second one, weights and state are those that the first has left."""
BATCH = 8
PROMPT_TOKENS, NEW_TOKENS, LONGEST = 32, 8, 96
OPTIMIZER: Mapping[str, Any] = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
"""With the usual `eps`, Adam makes full steps of what is only rounding error in elements without gradient."""


def shrink_recipe(
    experiment: Experiment,
    directory: Path,
    *,
    records: Sequence[Mapping[str, Any]] | None,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Write tiny models and `records` into `directory`, and return the settings of a recipe that uses them.

    Without `records` some are made, of the algorithm's form. Settings of the algorithm, its reward and its sampling
    stay as they are, but for lengths; `overrides` come last.
    """
    spec = get_spec(experiment)
    kept = make_records(spec.form) if records is None else list(records)
    data = directory / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in kept))
    tokenizer = train_tokenizer(list_texts(kept), SHAPE["vocab_size"])
    minibatches = math.lcm(*(call.minibatches for call in build_graph(experiment).calls))
    settings = yaml.safe_load(dump_experiment(experiment))
    settings |= {
        "plan": "symmetric",
        "cluster": "1x1",
        "device": "cpu",
        "device_memory": None,
        "profile": None,
        "overwrite": True,
        "training": {"steps": STEPS},
        "debug": {"verify_reallocation": True},
        "models": _write_models(experiment, spec, directory, tokenizer),
    }
    settings["data"] = {
        "train": str(data),
        "eval": None if spec.eval_graph is None else str(data),
        "batch": minibatches * math.ceil(BATCH / minibatches),
        "eval_batch": len(kept),
        "max_tokens": LONGEST,
        "max_prompt_tokens": PROMPT_TOKENS,
        "columns": settings["data"]["columns"] if records is not None else {},
    }
    if spec.generation is not None:
        settings["generation"] |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": 0}
    for override in overrides:
        settings = apply_override(settings, override)
    return settings


def _write_models(
    experiment: Experiment, spec: AlgorithmSpec, directory: Path, tokenizer: Any
) -> dict[str, Any]:
    """Write a model for each role that has weights of its own, and return the settings of all roles."""
    roles = spec.roles_of(experiment)
    paths = {}
    for number, role in enumerate(role for role, of in roles.items() if of.weights_from is None):
        paths[role] = str(directory / role)
        save_model(directory / role, roles[role].head, tokenizer, seed=3 + number)
    models: dict[str, Any] = dict.fromkeys(spec.roles)
    for role, of in roles.items():
        source = of.weights_from if of.weights_from in roles else of.weights_else
        models[role] = {"path": paths[role] if source is None else paths[source]}
        config = getattr(experiment.models, role)
        if isinstance(config, TrainedModelConfig):
            layers = config.trainable_layers
            models[role] |= {
                "optimizer": dict(OPTIMIZER),
                "trainable_layers": None if layers is None else min(layers, 1),
                "freeze_embeddings": config.freeze_embeddings,
            }
    return models
