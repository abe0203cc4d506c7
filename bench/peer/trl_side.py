"""Run a case with TRL, in one process.

python bench/peer/trl_side.py CASE DIR STEPS [TRL_BATCH]
"""

import sys
from functools import partial
from typing import Any

import torch
import transformers
import trl
from cases import EOS_ID, Turns, World, read_device, reward
from datasets import load_dataset
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback


class StepByStep(TrainerCallback):
    """Callback that holds the trainer until it is this side's turn."""

    def __init__(self, turns: Turns, counter: "Counter") -> None:
        self._turns, self._counter = turns, counter

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._turns.ready()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._turns.done(self._counter.take())


class Counter:
    """Counts tokens without padding."""

    def __init__(self, world: World, turns: Turns) -> None:
        self._world, self._turns = world, turns
        self._packed = 0

    def collate(self, collator: Any, rows: Any) -> Any:
        """Count the tokens of packed rows as they are collated."""
        batch = collator(rows)
        mask = batch.get("attention_mask")
        self._packed += int(batch["input_ids"].numel() if mask is None else mask.sum())
        return batch

    def take(self) -> int:
        """Return the tokens of the step that has ended."""
        packed, self._packed = self._packed, 0
        return packed if self._world.case.trl.get("packing") else self._world.count_tokens(self._turns.step)


class EndAnswers(LogitsProcessor):
    """Makes answers end at the lengths of the case, whatever the model samples."""

    def __init__(self, world: World, step: int, prompt: int) -> None:
        self._lengths = torch.tensor(world.answer_lengths(step))
        self._most, self._prompt = world.case.lengths.most, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._prompt
        ending = ((self._lengths == position + 1) & (self._lengths < self._most)).to(scores.device)
        scores[:, EOS_ID] = -torch.inf
        scores[ending] = -torch.inf
        scores[ending, EOS_ID] = 0.0
        return scores


def settings(world: World, steps: int) -> dict[str, Any]:
    """Arguments that all trainers take."""
    case = world.case
    return {
        "output_dir": str(world.root / "trl"),
        "max_steps": steps,
        "per_device_train_batch_size": case.trl_batch,
        "gradient_accumulation_steps": max(1, case.rows // case.trl_batch),
        "use_cpu": read_device() == "cpu",
        "bf16": case.dtype == "bfloat16",
        # Checkpointing would save memory, which is plentiful here, for a third more arithmetic.
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **case.trl,
    }


def make_trainer(world: World, steps: int, turns: Turns, counter: Counter) -> Any:
    """Make the trainer of a case."""
    case = world.case
    common = settings(world, steps)
    tokenizer = transformers.AutoTokenizer.from_pretrained(world.model)
    data = load_dataset(
        "json", data_files=str(world.records), split="train", cache_dir=str(world.root / "cache")
    )
    rest = {
        "train_dataset": data,
        "processing_class": tokenizer,
        "callbacks": [StepByStep(turns, counter)],
    }
    if case.algorithm == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            world.model, dtype=getattr(torch, case.dtype)
        )
        return trl.RewardTrainer(model, trl.RewardConfig(**common, max_length=None), **rest)
    model = transformers.AutoModelForCausalLM.from_pretrained(world.model, dtype=getattr(torch, case.dtype))
    if case.algorithm == "dpo":
        return trl.DPOTrainer(model, args=trl.DPOConfig(**common, max_length=None), **rest)
    if case.algorithm == "sft":
        common.setdefault("max_length", case.lengths.most)
        if case.trl.get("packing"):
            tokens = sum(world.count_tokens(step) for step in range(steps)) / steps
            rows = round(tokens / common["max_length"] / case.trl_batch)
            common["gradient_accumulation_steps"] = max(1, rows)
        trainer = trl.SFTTrainer(model, args=trl.SFTConfig(**common), **rest)
        trainer.data_collator = partial(counter.collate, trainer.data_collator)
        return trainer
    config = trl.GRPOConfig(
        **common,
        num_generations=case.rows // case.items,
        max_completion_length=case.lengths.most,
        shuffle_dataset=False,
        loss_type="grpo",
        beta=0.0,
    )
    generate = model.generate

    def end_at_lengths(input_ids: Tensor, **others: Any) -> Any:
        ends = LogitsProcessorList([EndAnswers(world, turns.step, input_ids.shape[1])])
        return generate(input_ids, logits_processor=ends, **others)

    model.generate = end_at_lengths
    return trl.GRPOTrainer(model, reward, args=config, **rest)


def main() -> None:
    turns = Turns()
    world, steps = World.of(sys.argv[1:])
    make_trainer(world, steps, turns, Counter(world, turns)).train()


if __name__ == "__main__":
    main()
