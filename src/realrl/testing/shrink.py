"""Make recipes small: tiny models, a few records, two steps."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.directory import known_shape
from realrl.huggingface.initial_weights import initialise
from realrl.huggingface.tokenizers import train_bpe
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import apply_overrides, dump_experiment
from realrl.recipe.model import TrainedModelConfig
from realrl.testing.records import make_up_records

SHAPE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "tied_embeddings": True,
}
"""Sizes of a tiny model, which two TP ranks or two pipeline stages can divide."""
MIXTURE: Mapping[str, Any] = {
    **SHAPE,
    "family": "mixtral",
    "intermediate_size": 24,
    "mixture": {"experts": 4, "per_token": 2},
}
"""The same for a mixture of experts, which two ranks can divide, too."""
CHECKED_LAYERS = 4
"""Number of layers of models in a check, which two pipeline stages with two virtual stages each can divide."""
STEPS = 2
"""Number of training steps. There are two, so that the second one starts from the weights and state of the
first."""
BATCH = 8
PROMPT_TOKENS, NEW_TOKENS, LONGEST = 32, 8, 96
TRAJECTORY_TOKENS = 256
"""Maximum tokens of a trajectory. Its observations must fit, with what the chat template writes around them."""
TURN_TOKENS, OBSERVATION_TOKENS, TURNS = NEW_TOKENS, 32, 3
"""Limits of a trajectory in an environment."""
AGENT_TOKENS = 4096
"""Maximum tokens of a trajectory of an agent, whose prompts and turns have no other limits."""
OWN_PROMPT_TOKENS = 256
"""Maximum length of a prompt of the user's own records. Longer ones are cut."""
OPTIMIZER: Mapping[str, Any] = {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"}
"""Optimizer settings of all trained models. With the usual `eps`, Adam would turn rounding errors into full steps
for elements whose gradient is 0."""


def shrink_recipe(
    experiment: Experiment,
    directory: Path,
    *,
    records: Sequence[Mapping[str, Any]] | None,
    overrides: Sequence[str] = (),
    tokenizer: Any = None,
    agents: bool = False,
) -> dict[str, Any]:
    """Write tiny models and `records` into `directory`, and return the settings of a recipe that uses them.

    Without `records`, records of the algorithm's form are made up. Settings of the algorithm, reward and sampling
    stay as in the experiment, except lengths. Mixtures of experts become tiny mixtures. `overrides` come last.

    With `tokenizer`, models get it in place of a small one, and the settings of data stay, too: this is for the
    user's own records, which may be longer than made-up ones. `agents`: whether the environment is an agent.
    """
    spec = experiment.spec
    kept = make_up_records(spec.form) if records is None else list(records)
    data = directory / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in kept))
    small = train_bpe(_list_texts(kept), SHAPE["vocab_size"]) if tokenizer is None else tokenizer
    minibatches = math.lcm(*(call.minibatches for call in experiment.graph.calls))
    settings = yaml.safe_load(dump_experiment(experiment))
    settings |= {
        "plan": "symmetric",
        "cluster": "1x1",
        "device": "cpu",
        "device_memory": None,
        "host_memory": None,
        "profile": None,
        "overwrite": True,
        "training": {"steps": STEPS},
        "evaluation": {},
        "debug": {"verify_reallocation": True},
        "models": _write_models(experiment, spec, directory, small),
    }
    own = {"columns": settings["data"]["columns"]} if records is not None else {}
    prompt, longest = PROMPT_TOKENS, LONGEST
    if tokenizer is not None:
        prompt, longest = OWN_PROMPT_TOKENS, OWN_PROMPT_TOKENS + LONGEST
        own = {**settings["data"], "on_too_long": "keep_end"}
    trajectory = TRAJECTORY_TOKENS
    if agents and spec.generation is not None:
        trajectory = min(spec.generation(experiment).max_new_tokens, AGENT_TOKENS)
    if experiment.environment_config is not None:
        longest = prompt + trajectory
    settings["data"] = {
        **own,
        "train": str(data),
        "eval": None if spec.eval_graph is None else str(data),
        "batch": minibatches * math.ceil(BATCH / minibatches),
        "eval_batch": len(kept),
        "max_tokens": longest,
        "max_prompt_tokens": prompt,
    }
    if spec.generation is not None:
        settings["generation"] |= {
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": 0,
            "stop_token_ids": None,
        }
    if experiment.environment_config is not None:
        settings["generation"]["max_new_tokens"] = trajectory
        limits = {"max_turn_tokens": TURN_TOKENS}
        if not agents:
            limits |= {"max_observation_tokens": OBSERVATION_TOKENS, "max_turns": TURNS}
        given = settings["environment"]
        settings["environment"] = {
            **given,
            **{name: min(limit, given[name] or limit) for name, limit in limits.items()},
            "workers": 1,
        }
    policy = settings.get("policy", {})
    if policy.get("overlong_buffer"):
        policy["overlong_buffer"] = min(policy["overlong_buffer"], NEW_TOKENS)
    # Overrides of models are left out, because they would not fit the tiny models.
    return apply_overrides(settings, [o for o in overrides if not o.strip().startswith("models.")])


def _write_models(
    experiment: Experiment, spec: AlgorithmSpec, directory: Path, tokenizer: Any
) -> dict[str, Any]:
    """Write a model for each role, and return the settings of all models.

    Each role gets different weights. If actor and reference were equal, rewards would be 0 except for rounding
    errors. Metrics that count the signs of rewards would then differ between plans.
    """
    models: dict[str, Any] = dict.fromkeys(spec.roles)
    mixtures = list_mixtures(experiment)
    for number, (role, of) in enumerate(spec.roles_of(experiment).items()):
        vocabulary = max(SHAPE["vocab_size"], len(tokenizer))
        sizes = MIXTURE if role in mixtures else SHAPE
        sizes = {**sizes, "vocab_size": vocabulary, "layers": CHECKED_LAYERS}
        save_model(directory / role, of.head, tokenizer, sizes, seed=3 + number)
        # With coarser products, equal runs would differ by more than any tolerance.
        models[role] = {"path": str(directory / role), "dtype": "float32"}
        config = getattr(experiment.models, role)
        if isinstance(config, TrainedModelConfig):
            layers = config.trainable_layers
            models[role] |= {
                "optimizer": dict(OPTIMIZER),
                "trainable_layers": None if layers is None else min(layers, 1),
                "freeze_embeddings": config.freeze_embeddings,
            }
            if role in mixtures:
                models[role] |= {"router_loss": config.router_loss, "router_replay": config.router_replay}
    return models


def list_mixtures(experiment: Experiment) -> frozenset[str]:
    """List the roles whose models are mixtures of experts, as far as this is known without the network."""
    shapes = {role: known_shape(config) for role, config in experiment.model_configs.items()}
    return frozenset(
        role for role, shape in shapes.items() if shape is not None and shape.mixture is not None
    )


def save_model(
    directory: Path, head: Head, tokenizer: Any, sizes: Mapping[str, Any] = SHAPE, *, seed: int = 3
) -> None:
    """Save a model of random weights with its tokenizer, as a Hugging Face directory.

    The weights are larger than usual initial weights, so that predictions depend on every layer.
    """
    shape = ModelShape.model_validate({**sizes, "init_std": 0.2})
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, torch.device("cpu"))
    initialise(buffer, tensors, shape, seed=seed)
    for tensor in tensors:
        if tensor.parameter == "scalar_head":  # initialised with zeros
            buffer[tensor.name].normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    model_files.save(directory, shape, head, buffer, tokenizer, torch.float32)


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _list_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _list_texts(inner)
