"""A small world to run recipes in: a tokenizer, data of every form, and saved models."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads the variable on its first import, and much of torch
    # imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from realrl.config.hardware import ProductChoice, keep_choice
from realrl.runtime.launcher import local
from realrl.testing import compare
from realrl.testing.records import list_sentences, make_up_records
from realrl.testing.shrink import SHAPE
from tests.forked import ForkedRank

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["gpu_branches"]
"""These tests give CPU tensors to kernels, which only Triton's interpreter takes; it is off if there is a GPU."""
if not all(map(find_spec, ("openai", "starlette", "uvicorn"))):
    collect_ignore.append("serving")  # the extras dev and serve are not installed

PPO_CALLS = (
    "actor.generate",
    "reward.inference",
    "ref.inference",
    "critic.inference",
    "actor.train",
    "critic.train",
)
"""The calls of a step, in its order."""
PREFERENCES = ("dpo", "orpo", "simpo", "kto")
"""Algorithms that train an actor on preferences."""
FORMS = {
    "sft": "sft",
    "reward": "reward",
    "ranked_reward": "ranked",
    "process_reward": "steps",
    "dpo": "reward",
    "orpo": "reward",
    "simpo": "reward",
    "kto": "kto",
    "offline_distillation": "sft",
}
"""Algorithms that sample nothing -> their records."""
DATA = {
    "answer": "sft",
    "pair": "reward",
    "label": "kto",
    "ranked": "ranked",
    "steps": "steps",
    "prompt": "ppo",
}
"""Form of records -> name of their file."""


REAL = ("launching", "security")
"""Packages whose tests look at the processes themselves, which are then started as a user's are."""
EVERY_RUN = os.environ.get("REALRL_EVERY_RUN") == "1"
"""Whether the tests marked `exhaustive` run, too."""


def thin(cases: Iterable[Any], nth: int) -> list[Any]:
    """Cases for `parametrize`, of which all but each n-th are `exhaustive`."""
    marks = pytest.mark.exhaustive
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks if i % nth else ())
        for i, case in enumerate(cases)
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that only `make test-all` runs."""
    for item in items:
        if not EVERY_RUN and item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.skip(reason="make test-all runs it"))


def pytest_configure() -> None:
    """Have `dtype: auto` be float32 on every processor: tests compare runs to the last digits."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="realrl-tests-")
    keep_full_precision()


def keep_full_precision() -> None:
    """Keep a choice of products in the cache directory, so that nothing is measured."""
    keep_choice(ProductChoice())


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Write records, one per line, and give the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@dataclass(frozen=True)
class World:
    """Paths of everything a recipe needs."""

    root: Path

    @property
    def tokenizer(self) -> str:
        return str(self.root / "tokenizer")

    @property
    def actor(self) -> str:
        return str(self.root / "actor")

    @property
    def reward(self) -> str:
        return str(self.root / "reward")

    def recipe(self, algorithm: str, directory: Path, **changes: Any) -> Path:
        """A recipe of 5 short steps, written into `directory`, whose run goes there too.

        `changes` are fields, with `__` for the dot.
        """
        teacher = {"shape": {**SHAPE, "init_std": 0.2}, "tokenizer": self.tokenizer}
        models: dict[str, Any] = {
            "sft": {"actor": {"shape": SHAPE, "tokenizer": self.tokenizer}},
            "reward": {"reward": {"path": self.actor}},
            "ranked_reward": {"reward": {"path": self.actor}},
            "process_reward": {"reward": {"path": self.actor}},
            "distillation": {"actor": {"path": self.actor}, "teacher": teacher},
            "offline_distillation": {"actor": {"path": self.actor}, "teacher": teacher},
            **{name: {"actor": {"path": self.actor}} for name in PREFERENCES},
        }.get(algorithm, {"actor": {"path": self.actor}, "reward": {"path": self.reward}})
        samples = algorithm not in FORMS
        document: dict[str, Any] = {
            "algorithm": algorithm,
            "run_dir": str(directory / "run"),
            "cluster": "1x1",
            "device": "cpu",
            "micro_batch_tokens": 256,
            "models": models,
            "data": {"train": str(self.root / f"{FORMS.get(algorithm, 'ppo')}.jsonl"), "batch": 16},
            "training": {"steps": 5},
        }
        for role in models:
            if role != "teacher" and not (samples and role == "reward"):
                models[role] = {**models[role], "optimizer": {"lr": 1e-3}}
        if samples:
            document["generation"] = {"max_new_tokens": 12}
            section = algorithm if algorithm in ("ppo", "distillation", "expert_iteration") else "policy"
            document[section] = {"minibatches": 2}
        if algorithm == "ppo":
            models["critic"] = {"optimizer": {"lr": 1e-3}}
        for name, value in changes.items():
            *path, last = name.split("__")
            inner = document
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        file = directory / "recipe.yaml"
        file.write_text(yaml.safe_dump(document))
        return file


@pytest.fixture(scope="module", autouse=True)
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the ranks that this process launches."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in REAL:
            patch.setattr(local, "start_process", ForkedRank)
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Built once, with models of `SHAPE`."""
    return build_world(tmp_path_factory.mktemp("world"), SHAPE)


def build_world(root: Path, sizes: Mapping[str, Any]) -> World:
    """Byte-level BPE tokenizer, data files, and an actor and a reward model of random weights."""
    from realrl.huggingface.tokenizers import train_bpe
    from realrl.testing.shrink import save_model

    tokenizer = train_bpe(list_sentences(), sizes["vocab_size"])
    tokenizer.save_pretrained(str(root / "tokenizer"))
    for form, name in DATA.items():
        write_jsonl(root / f"{name}.jsonl", make_up_records(form))
    save_model(root / "actor", "lm", tokenizer, sizes)
    save_model(root / "reward", "scalar", tokenizer, sizes)
    return World(root)


def read_metrics(run_dir: Path, kind: str = "train") -> list[dict[str, float]]:
    """The metrics of every step, from metrics.jsonl, without how fast it was."""
    return [line["metrics"] for line in compare.read_metrics(run_dir) if line["kind"] == kind]
