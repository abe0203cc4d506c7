"""PPO steps of four models on one device, and the time `transformers` takes to generate the same number of tokens.

A framework that samples with `generate` of transformers, such as TRL's PPO, spends that time before it trains.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from device import Device

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "peer")]

from cases import EOS_ID, Case, Lengths, World, make_model
from harness import SilentObserver

from realrl.recipe.load import load_experiment
from realrl.runtime.observer import MetricsRecord
from realrl.runtime.train import train

STEPS, WARM_UP = 5, 2


class StepClock(SilentObserver):
    """Observer that notes when steps end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def begin(self, experiment: object, steps: int) -> None:
        self.ends.append(time.perf_counter())

    def record(self, record: MetricsRecord) -> None:
        if record.kind == "train":
            self.ends.append(time.perf_counter())


def measure_ppo(device: Device, size: str) -> dict[str, Any]:
    """Measure PPO steps, and generation by transformers, with answers of a fixed length."""
    prompts, answer = (8, 16) if device.tiny else (128, 512)
    case = Case(
        algorithm="grpo", size="5M" if device.tiny else size, items=prompts, trl_batch=prompts, trl={},
        lengths=Lengths(median=answer, sigma=0, most=answer), dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        world = World(Path(scratch), case, STEPS)
        clock = StepClock()
        train(load_experiment(str(write_recipe(world, device, prompts, answer)), []), clock)
        seconds = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][WARM_UP:]
        device.free()
        generating = measure_transformers(world, device, prompts, answer)
    step = statistics.median(seconds)
    return {
        "prompts": prompts,
        "prompt_tokens": 64,
        "answer_tokens": answer,
        "step_seconds": step,
        "transformers_generate_seconds": generating,
        "generate_over_step": generating / step,
    }


def write_recipe(world: World, device: Device, prompts: int, answer: int) -> Path:
    """Write a recipe of PPO whose four models have the same sizes."""
    reward = world.root / "reward"
    make_model(reward, world.shape, "scalar")
    optimizer = {"lr": 1e-6}
    recipe = {
        "algorithm": "ppo",
        "run_dir": str(world.root / "run"),
        "cluster": "1x1",
        "device": device.name,
        "micro_batch_tokens": 1024 if device.tiny else 32768,
        "models": {
            "actor": {"path": str(world.model), "dtype": "bfloat16", "optimizer": optimizer},
            "ref": {"dtype": "bfloat16"},
            "critic": {"dtype": "bfloat16", "optimizer": optimizer},
            "reward": {"path": str(reward), "dtype": "bfloat16"},
        },
        "data": {"train": str(world.records), "batch": prompts, "max_prompt_tokens": 64},
        "generation": {"max_new_tokens": answer, "min_new_tokens": answer},
        "training": {"steps": STEPS},
    }
    path = world.root / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def measure_transformers(world: World, device: Device, prompts: int, answer: int) -> float:
    """Measure `generate` of transformers over all prompts at once, in bfloat16 with SDPA."""
    model = transformers.AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.bfloat16)
    model = model.to(device.place).eval()
    ids = torch.randint(EOS_ID + 1, world.shape.vocab_size, (prompts, 64), device=device.place)

    def run() -> None:
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=answer,
                min_new_tokens=answer, pad_token_id=0,
            )  # fmt: skip

    return device.seconds(run, 3)
