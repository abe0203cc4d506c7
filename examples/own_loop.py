"""GRPO as a training loop of your own. `python examples/prepare.py` makes the data. docs/examples.md explains it.

python examples/own_loop.py --steps 80
torchrun --nproc-per-node=2 examples/own_loop.py
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verifier import names_one

import realrl

PROMPTS, SAMPLES, CLIP, KL = 12, 8, 0.2, 0.04
SHAPE = {"vocab_size": 360, "hidden_size": 64, "intermediate_size": 192, "layers": 2, "heads": 4, "kv_heads": 4,
         "head_dim": 16, "max_positions": 128, "tied_embeddings": True}  # fmt: skip
MODEL = {"shape": SHAPE, "tokenizer": "data/examples/tokenizer"}


def clipped_loss(model: Any, batch: Any) -> Tensor:
    """Compute PPO's clipped loss of each answer token, with a penalty for leaving the reference (k3)."""
    ratio = (model.logprobs - batch.logprobs).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    gap = batch.ref_logprobs - model.logprobs
    return -gain + KL * (gap.exp() - 1 - gap)


def train(
    session: realrl.Session, records: Sequence[dict[str, Any]], steps: int
) -> Iterator[dict[str, float]]:
    """Train the actor, and yield the metrics of each step."""
    for step in range(steps):
        chosen = [records[(step * PROMPTS + i) % len(records)] for i in range(PROMPTS)]
        batch = session.sample([record["prompt"] for record in chosen], n=SAMPLES, max_new_tokens=4)
        accepted = [record["accepted"] for record in chosen for _ in range(SAMPLES)]
        scores = torch.tensor(names_one(batch.completions, accepted), dtype=torch.float64).view(-1, SAMPLES)
        centred = scores - scores.mean(1, keepdim=True)
        batch["advantages"] = (centred / (scores.std(1, keepdim=True) + 1e-4)).float().flatten()
        batch["ref_logprobs"] = session.infer("ref", batch)
        metrics = session.forward_backward("actor", batch, clipped_loss, aggregate="sequence_mean")
        yield {"score": float(scores.mean()), **metrics, **session.step("actor")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps
    questions = [json.loads(line) for line in Path("data/examples/questions.jsonl").read_text().splitlines()]
    actor = {**MODEL, "optimizer": {"lr": 1e-2}}
    with realrl.Session({"actor": actor, "ref": MODEL}, train="actor", device="cpu") as opened:
        for number, found in enumerate(train(opened, questions, steps), 1):
            print(f"step {number}: score {found['score']:.3f}  loss {found['loss']:.4f}")
        opened.save_model("actor", "runs/examples/own_loop")
