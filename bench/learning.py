"""Measure what each algorithm learns from the SFT model of `make demo`, on two CPU processes.

Algorithms that sample use the demo's reward model and prompts. DPO and KTO learn from 32 answers of the SFT
model to each of these prompts, scored once by the same reward model (`realrl generate`). The best eighth is
paired with the worst. Each trained model then answers the 320 held-out prompts four times at temperature 1.
The table has the mean score of the demo's judge, which training does not use, and the gain over the SFT model's
score. It also has the divergence from the SFT model per answer, estimated from the answers, and the seconds of
training.

    make demo      # its first two stages are enough
    python bench/learning.py [--cases rloo dpo ...] [--json FILE] [--runs DIR] [--cluster 1x2]

Cases that FILE already holds are measured again only if they are named.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from harness import Results, make_parser, realrl

from realrl.algorithms.clipped_policy_loss import LogprobsInference
from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model, make_unsharded_model
from realrl.huggingface import model_files
from realrl.huggingface.tokenizers import load_tokenizer
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.prepare.inputs import read_stop_token_ids

DATA, SFT, REWARD = Path("data/demo"), Path("runs/demo/sft/final"), Path("runs/demo/reward/final")
NEW_TOKENS, ANSWERS = 32, 4
SCORED = 32
"""Scored answers per prompt. Of the finished answers, the best eighth is paired with the worst."""
PAIRS, LABELS = "pairs.jsonl", "labels.jsonl"
LEARNT = 0.25
"""Gain in the judge's score that every algorithm should reach."""


def sampled(algorithm: str, lr: float, *, steps: int, batch: int, **sections: Any) -> dict[str, Any]:
    """Make a recipe of an algorithm that samples: the settings of the demo's PPO, and `sections`."""
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


def preferring(
    algorithm: str, data: str, lr: float, *, steps: int, batch: int, **sections: Any
) -> dict[str, Any]:
    """Make a recipe of an algorithm that learns from scored answers; `data` is a file in the directory of runs."""
    return {
        "algorithm": algorithm,
        "data": {"train": data, "batch": batch, "max_tokens": 128},
        "training": {"steps": steps},
        "models": {
            "actor": {"path": str(SFT), "optimizer": {"lr": lr, "schedule": "linear", "warmup_steps": 10}}
        },
        **sections,
    }


KL_LOSS = {"coef": 0.05, "place": "loss", "estimator": "k3"}

CASES: dict[str, dict[str, Any]] = {
    "ppo": sampled("ppo", 1e-4, steps=60, batch=128, ppo={"minibatches": 4, "kl": {"coef": 0.1}}),
    "grpo": sampled("grpo", 1e-4, steps=100, batch=16, policy={"minibatches": 4}),
    "dapo": sampled("dapo", 1e-4, steps=50, batch=16, policy={"minibatches": 4}),
    # The learning rate is 100 times the paper's. Ratios would leave the paper's clip range after one update.
    "gspo": sampled(
        "gspo", 2e-4, steps=60, batch=16, policy={"minibatches": 2, "clip": 3e-3, "clip_high": 4e-3}
    ),
    "rloo": sampled("rloo", 2e-4, steps=100, batch=32, policy={"minibatches": 4}),
    # One answer per prompt makes advantages noisy. Mini-batches are therefore larger, and a KL term in the loss
    # keeps the model close to the reference. This term is stronger than the default penalty on rewards.
    "reinforce_pp": sampled(
        "reinforce_pp", 2e-4, steps=80, batch=128, policy={"minibatches": 2, "kl": KL_LOSS}
    ),
    "remax": sampled("remax", 2e-4, steps=80, batch=128, policy={"minibatches": 2, "kl": KL_LOSS}),
    "dpo": preferring("dpo", PAIRS, 3e-4, steps=150, batch=64, preference={"beta": 0.3}),
    "kto": preferring("kto", LABELS, 1e-3, steps=200, batch=128, kto={"beta": 0.1}),
}
"""Settings of each algorithm that differ from its defaults."""


class Judgement:
    """Judge of models by their answers to the held-out prompts."""

    def __init__(self) -> None:
        sys.path.insert(0, "demo")
        from judge import vader

        self._judge = vader
        self._tokenizer = load_tokenizer(str(SFT))
        self._stop = read_stop_token_ids(self._tokenizer, str(SFT), model_files.read_shape(SFT).vocab_size)
        self._reference = load(SFT)
        lines = (DATA / "prompts_eval.jsonl").read_text(encoding="utf-8").splitlines()
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        texts = [json.loads(line)["prompt"] for line in lines]
        self._prompts = [bos + self._tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def judge(self, directory: Path) -> dict[str, float]:
        """Sample answers of a model; return its mean score, divergence from the SFT model, and lengths."""
        rows = Ragged.of([ids for ids in self._prompts for _ in range(ANSWERS)], dtype=torch.int64)
        batch = generate(
            load(directory),
            Batch(tuple(range(len(rows))), {"prompts": rows}),
            "prompts",
            sampling=GenerationConfig(max_new_tokens=NEW_TOKENS),
            stop_token_ids=self._stop,
            seed=SamplingSeed(1, 0),
            kv_capacity=65536,
            samples=ANSWERS,
        )
        batch, _ = self._reference.infer(batch, LogprobsInference("ref_logprobs"), max_tokens=8192)
        log_ratio = sum(self._answer_sum(batch, "logprobs")) - sum(self._answer_sum(batch, "ref_logprobs"))
        answers = [row[length:] for row, length in self._rows(batch, "sequences")]
        texts = [self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in answers]
        return {
            "judge": round(sum(self._judge(texts)) / len(texts), 4),
            "kl": round(log_ratio / len(texts), 2),
            "answer_tokens": round(sum(map(len, answers)) / len(texts), 1),
            "finished": round(float(batch["finished"].values.mean()), 3),
        }

    @staticmethod
    def _rows(batch: Batch, key: str) -> list[tuple[torch.Tensor, int]]:
        return list(zip(batch[key].rows(), batch["prompt_length"].values.long().tolist(), strict=True))

    def _answer_sum(self, batch: Batch, key: str) -> list[float]:
        return [float(row[length:].sum()) for row, length in self._rows(batch, key)]


def load(directory: Path) -> Model:
    """Load a language model without sharding."""
    shape = model_files.read_shape(directory)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    model_files.load(directory, shape, model.layout.specs, model.parameters)
    return model


def score_answers(runs: Path, cluster: str) -> None:
    """Sample and score answers of the SFT model; write pairs and labelled answers made from them."""
    answers = runs / "answers.jsonl"
    of_sft = ["generate", SFT, "--data", DATA / "prompts_train.jsonl", "--n", SCORED]
    lengths = ["--min-new-tokens", 4, "--max-new-tokens", 2 * NEW_TOKENS]  # empty answers are refused
    realrl(*of_sft, *lengths, "--cluster", cluster, "--reward-model", REWARD, "--out", answers, "--overwrite")
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    pairs, labels = [], []
    for first in range(0, len(rows), SCORED):
        # Training ends every record with the end of sequence. Truncated answers would teach to end anywhere.
        finished = [row for row in rows[first : first + SCORED] if row["finished"]]
        ranked = sorted(finished, key=lambda row: -row["score"])
        for better, worse in zip(ranked[: len(ranked) // 8], reversed(ranked), strict=False):
            prompt, chosen, rejected = better["prompt"], better["completion"], worse["completion"]
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
            labels.append({"prompt": prompt, "completion": chosen, "label": True})
            labels.append({"prompt": prompt, "completion": rejected, "label": False})
    for name, records in ((PAIRS, pairs), (LABELS, labels)):
        (runs / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def train(name: str, runs: Path, cluster: str) -> float:
    """Train a case; return the seconds of the command."""
    runs.mkdir(parents=True, exist_ok=True)
    common = {"run_dir": str(runs / name), "overwrite": True, "cluster": cluster, "device": "cpu"}
    content = {**CASES[name], **common}
    if content["data"]["train"] in (PAIRS, LABELS):
        if not (runs / PAIRS).exists():
            score_answers(runs, cluster)
        content["data"] = {**content["data"], "train": str(runs / content["data"]["train"])}
    recipe = runs / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(content, sort_keys=False))
    begin = time.perf_counter()
    realrl("train", recipe)
    return time.perf_counter() - begin


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="directory for the runs")
    parser.add_argument("--cluster", default="1x2")
    arguments = parser.parse_args()
    for needed in (SFT, REWARD, DATA / "prompts_eval.jsonl"):
        if not needed.exists():
            sys.exit(f"{needed} is missing; make demo makes it")
    results, judgement = Results(arguments.json), Judgement()
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
