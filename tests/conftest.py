"""A small world to run recipes in: a tokenizer, data of every form, and saved models."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "tied_embeddings": True,
}
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
NOUNS = ("film", "story", "cast", "plot", "music", "ending", "hero", "joke", "scene", "script")
WORDS = {
    "good": ("great", "lovely", "moving", "clever", "warm"),
    "bad": ("dull", "awful", "tired", "weak", "clumsy"),
}


def sentence(i: int, mood: str) -> str:
    """A made-up opinion; longer ones join several clauses."""
    clauses = [
        f"the {NOUNS[(i * 7 + k) % len(NOUNS)]} is {WORDS[mood][(i + 2 * k) % 5]}" for k in range(1 + i % 4)
    ]
    return " and ".join(clauses)


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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Built once, with models of `SHAPE`."""
    return build_world(tmp_path_factory.mktemp("world"), SHAPE)


def build_world(root: Path, sizes: Mapping[str, Any]) -> World:
    """Byte-level BPE tokenizer, data files, and an actor and a reward model of random weights."""
    import torch

    from realrl.checkpoint import huggingface
    from realrl.data.tokenizer import train_bpe
    from realrl.engine.flat import FlatBuffer
    from realrl.families.registry import model_tensors
    from realrl.families.shape import ModelShape
    from realrl.model.init import initialise

    sentences = [sentence(i, mood) for i in range(40) for mood in ("good", "bad")]
    tokenizer = train_bpe(sentences, sizes["vocab_size"])
    tokenizer.save_pretrained(str(root / "tokenizer"))
    write_jsonl(root / "sft.jsonl", [{"prompt": "", "answer": text} for text in sentences])
    write_jsonl(
        root / "reward.jsonl",
        [
            {
                "prompt": "",
                "chosen": sentence(i, "good"),
                "rejected": sentence(3 * i, "bad"),
                "margin": i % 3 / 2,
                "ref_chosen_logps": -20.0 - i % 5,
                "ref_rejected_logps": -22.0 - i % 7,
            }
            for i in range(80)
        ],
    )
    write_jsonl(
        root / "kto.jsonl",
        [
            {"prompt": " ".join(text.split()[:2]), "completion": text[8:], "label": i % 2 == 0}
            for i, text in enumerate(sentences)
        ],
    )
    write_jsonl(
        root / "ranked.jsonl",
        [
            {"prompt": "", "answers": [sentence(i, "good"), sentence(i + 1, "good"), sentence(3 * i, "bad")]}
            for i in range(40)
        ],
    )
    write_jsonl(
        root / "steps.jsonl",
        [
            {
                "prompt": "the film",
                "completions": [sentence(i + k, "good" if (i + k) % 3 else "bad") for k in range(1 + i % 3)],
                "labels": [(i + k) % 3 > 0 for k in range(1 + i % 3)],
            }
            for i in range(40)
        ],
    )
    write_jsonl(
        root / "ppo.jsonl",
        [{"prompt": " ".join(text.split()[: 2 + i % 3])} for i, text in enumerate(sentences)],
    )
    shape = ModelShape.model_validate({**sizes, "init_std": 0.2})
    for name, head in (("actor", "lm"), ("reward", "scalar")):
        tensors = model_tensors(shape, head)
        buffer = FlatBuffer(tensors, torch.float32, torch.device("cpu"))
        initialise(buffer, tensors, shape, seed=3)
        if head == "scalar":
            buffer["score.weight"].normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        huggingface.save(root / name, shape, head, buffer, tokenizer, torch.float32)
    return World(root)


def read_metrics(run_dir: Path, kind: str = "train") -> list[dict[str, float]]:
    """The metrics of every step, from metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == kind]
