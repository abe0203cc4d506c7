"""What algorithms learn on the demo: each from the SFT model of `make demo`, on two CPU processes.

Those that sample have the demo's reward model and prompts. DPO and KTO learn from pairs of the SFT model's own
answers to the same prompts, ranked by the same reward model before training begins; the demo's pairs of sentences
that people wrote say little about answers to prompts. Each trained model then answers the 320 held-out prompts four
times, at temperature 1. Reported are the mean score of the demo's judge, which takes no part in training, and its
gain over the SFT model; the divergence from the SFT model per answer, estimated from the answers; and the seconds,
pairs included.

    make demo      # or its first two stages
    python bench/learning.py [--cases rloo dpo ...] [--json FILE] [--runs DIR] [--cluster 1x2]

Cases that FILE has already are measured again only when they are named.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from reality import realrl
from results_file import ResultsFile

from realrl.algorithms.policy.inference import LogprobsInference
from realrl.algorithms.rewards.inference import RewardInference
from realrl.checkpoint import huggingface
from realrl.data.batch import Batch, Ragged
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import Head
from realrl.recipe.settings import GenerationConfig
from realrl.runtime.setup import read_stop_token_ids

DATA, SFT, REWARD = Path("data/demo"), Path("runs/demo/sft/final"), Path("runs/demo/reward/final")
NEW_TOKENS, ANSWERS = 32, 4
CANDIDATES, PAIRS = 8, 2
"""Answers to each training prompt that pairs are made of, and how many pairs."""
CACHE_TOKENS = 65536
LEARNT = 0.25
"""Gain of the judge that every algorithm should reach."""


def sampled(algorithm: str, lr: float, *, steps: int, batch: int, **sections: Any) -> dict[str, Any]:
    """A recipe of an algorithm that samples: the settings of the demo's PPO, and `sections`."""
    return {
        "algorithm": algorithm,
        "data": {
            "train": str(DATA / "prompts_train.jsonl"),
            "batch": batch,
            "max_prompt_tokens": 24,
            "max_tokens": 64,
        },
        "generation": {"max_new_tokens": NEW_TOKENS},
        "training": {"steps": steps},
        "models": {
            "actor": {"path": str(SFT), "optimizer": {"lr": lr, "schedule": "linear"}},
            "reward": {"path": str(REWARD)},
        },
        **sections,
    }


def paired(algorithm: str, lr: float, *, steps: int, batch: int, **sections: Any) -> dict[str, Any]:
    """A recipe of an algorithm that learns from pairs, which `make_pairs` has made."""
    return {
        "algorithm": algorithm,
        "data": {"batch": batch, "max_prompt_tokens": 24, "max_tokens": 64},
        "training": {"steps": steps},
        "models": {"actor": {"path": str(SFT), "optimizer": {"lr": lr, "schedule": "linear"}}},
        **sections,
    }


CASES: dict[str, dict[str, Any]] = {
    "ppo": sampled("ppo", 1e-4, steps=60, batch=128, ppo={"minibatches": 4, "kl": {"coef": 0.1}}),
    "grpo": sampled("grpo", 1e-4, steps=50, batch=16, policy={"minibatches": 4}),
    "dapo": sampled("dapo", 1e-4, steps=50, batch=16, policy={"minibatches": 4}),
    # At a rate a hundred times that of the paper ratios leave its bounds with the first update.
    "gspo": sampled(
        "gspo", 2e-4, steps=60, batch=16, policy={"minibatches": 2, "clip": 3e-3, "clip_high": 4e-3}
    ),
    "rloo": sampled("rloo", 1e-4, steps=60, batch=32, policy={"minibatches": 4}),
    # One answer per prompt makes noisy advantages: larger mini-batches, and a stronger bond to the reference.
    "reinforce_pp": sampled(
        "reinforce_pp", 2e-4, steps=100, batch=128, policy={"minibatches": 2, "kl": {"coef": 0.05}}
    ),
    "remax": sampled("remax", 2e-4, steps=80, batch=128, policy={"minibatches": 2, "kl": {"coef": 0.05}}),
    "dpo": paired("dpo", 2e-4, steps=80, batch=64),
    "kto": paired("kto", 2e-4, steps=80, batch=128),
}
"""What differs from the defaults of each algorithm."""


class Prompts:
    """Prompts of a file, and the answers of models to them."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = load_tokenizer(str(SFT))
        self._stop = read_stop_token_ids(self._tokenizer, str(SFT), huggingface.read_shape(SFT).vocab_size)
        lines = file.read_text(encoding="utf-8").splitlines()
        self.texts = [json.loads(line)["prompt"] for line in lines]
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        self._encoded = [bos + self._tokenizer.encode(text, add_special_tokens=False) for text in self.texts]

    def answer(self, model: Model, answers: int) -> Batch:
        """Sample answers of a model; those to a prompt follow each other."""
        rows = Ragged.of([ids for ids in self._encoded for _ in range(answers)], dtype=torch.int64)
        return generate(
            model,
            Batch(tuple(range(len(rows))), {"prompts": rows}),
            "prompts",
            sampling=GenerationConfig(max_new_tokens=NEW_TOKENS),
            stop_token_ids=self._stop,
            seed=SamplingSeed(1, 0),
            kv_capacity=CACHE_TOKENS,
            samples=answers,
        )

    def decode(self, batch: Batch) -> list[str]:
        """Decode the answers of a batch."""
        answers = cut_prompts(batch, "sequences")
        return [self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in answers]


def cut_prompts(batch: Batch, key: str) -> list[torch.Tensor]:
    """Cut rows that are aligned with sequences to the answers."""
    lengths = batch["prompt_length"].values.long().tolist()
    return [row[length:] for row, length in zip(batch[key].rows(), lengths, strict=True)]


class Judgement:
    """What answers to the held-out prompts say of a model."""

    def __init__(self) -> None:
        sys.path.insert(0, "demo")
        from judge import vader

        self._judge = vader
        self._prompts = Prompts(DATA / "prompts_eval.jsonl")
        self._reference = load(SFT, "lm")

    def judge(self, directory: Path) -> dict[str, float]:
        """Sample answers of a model; its mean score, divergence from the SFT model, and lengths."""
        batch = self._prompts.answer(load(directory, "lm"), ANSWERS)
        batch, _ = self._reference.infer(batch, LogprobsInference("ref_logprobs"), max_tokens=8192)
        texts = self._prompts.decode(batch)
        sums = {
            key: sum(float(row.sum()) for row in cut_prompts(batch, key))
            for key in ("logprobs", "ref_logprobs")
        }
        return {
            "judge": round(sum(self._judge(texts)) / len(texts), 4),
            "kl": round((sums["logprobs"] - sums["ref_logprobs"]) / len(texts), 2),
            "answer_tokens": round(sum(map(len, cut_prompts(batch, "logprobs"))) / len(texts), 1),
            "finished": round(float(batch["finished"].values.mean()), 3),
        }


def make_pairs(file: Path) -> None:
    """Write pairs of answers of the SFT model to each training prompt.

    Of those that ended the best two and the worst two by the reward model, where there are as many.
    """
    prompts = Prompts(DATA / "prompts_train.jsonl")
    batch = prompts.answer(load(SFT, "lm"), CANDIDATES)
    batch, _ = load(REWARD, "scalar").infer(batch, RewardInference(), max_tokens=8192)
    texts, scores = prompts.decode(batch), batch["score"].values.tolist()
    finished = batch["finished"].values.tolist()
    with file.open("w", encoding="utf-8") as out:
        for number, prompt in enumerate(prompts.texts):
            own = range(number * CANDIDATES, (number + 1) * CANDIDATES)
            ranked = sorted((i for i in own if finished[i] and texts[i].strip()), key=scores.__getitem__)
            for place in range(min(PAIRS, len(ranked) // 2)):
                best, worst = ranked[-1 - place], ranked[place]
                record = {"prompt": prompt, "chosen": texts[best], "rejected": texts[worst]}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")


def load(directory: Path, head: Head) -> Model:
    """Load a model whole."""
    shape = huggingface.read_shape(directory)
    model = make_unsharded_model(shape, head, dtype=torch.float32, device=torch.device("cpu"))
    huggingface.load(directory, shape, model.layout.specs, model.parameters)
    return model


def train(name: str, runs: Path, cluster: str) -> float:
    """Run a case; returns its seconds, with those of making the pairs it learns from."""
    begin = time.perf_counter()
    runs.mkdir(parents=True, exist_ok=True)
    common = {"run_dir": str(runs / name), "overwrite": True, "cluster": cluster, "device": "cpu"}
    recipe = {**CASES[name], **common}
    if "train" not in recipe["data"]:
        pairs = runs / f"{name}-pairs.jsonl"
        make_pairs(pairs)
        recipe["data"] = {**recipe["data"], "train": str(pairs)}
    file = runs / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    realrl("train", file)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="directory for the runs")
    parser.add_argument("--cluster", default="1x2")
    arguments = parser.parse_args()
    for needed in (SFT, REWARD, DATA / "prompts_eval.jsonl"):
        if not needed.exists():
            sys.exit(f"{needed} is missing; make demo makes it")
    results, judgement = ResultsFile(arguments.json), Judgement()
    before = judgement.judge(SFT)
    print(f"{'case':14} {'judge':>6} {'gain':>6} {'KL':>6} {'tokens':>6} {'finished':>8} {'seconds':>8}")
    print(
        f"{'SFT':14} {before['judge']:6.3f} {'':6} {'':6} {before['answer_tokens']:6} {before['finished']:8}"
    )
    for name in arguments.cases or [name for name in CASES if name not in results.cases]:
        seconds = train(name, arguments.runs, arguments.cluster)
        after = judgement.judge(arguments.runs / name / "final")
        gain = round(after["judge"] - before["judge"], 4)
        results.add(name, {"gain": gain, **after, "before": before["judge"], "seconds": round(seconds, 1)})
        print(
            f"{name:14} {after['judge']:6.3f} {gain:+6.3f} {after['kl']:6} {after['answer_tokens']:6}"
            f" {after['finished']:8} {seconds:8.1f}{'' if gain >= LEARNT else '  below ' + str(LEARNT)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
