"""Random PPO batches, and PPO written out in plain Python loops, one sequence and one token at a time."""

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from realrl.algorithms.base.method import ModelOutput, Sum
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import PPOAlgorithm
from realrl.data.batch import Batch, Ragged
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.load import parse_experiment

VOCABULARY = 11
T = TypeVar("T")


@dataclass
class Item:
    """One sequence; lists are per token of prompt and response."""

    tokens: list[int]
    prompt: int
    finished: bool
    logprobs: list[float]
    ref_logprobs: list[float]
    values: list[float]
    score: float

    @property
    def actions(self) -> range:
        return range(self.prompt, len(self.tokens))


def random_items(seed: int, count: int) -> list[Item]:
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        prompt, response = rng.randint(1, 4), rng.randint(1, 7)
        length = prompt + response

        def per_token(low: float, high: float, *, skip: int = 0, length: int = length) -> list[float]:
            return [0.0] * skip + [rng.uniform(low, high) for _ in range(length - skip)]

        items.append(
            Item(
                tokens=[rng.randrange(VOCABULARY) for _ in range(length)],
                prompt=prompt,
                finished=rng.random() < 0.6,
                logprobs=per_token(-3, -0.1, skip=prompt),
                ref_logprobs=per_token(-3, -0.1, skip=1),
                values=per_token(-2, 2),
                score=rng.uniform(-4, 4),
            )
        )
    return items


def to_batch(items: list[Item], *, first_id: int = 0) -> Batch:
    def ragged(name: str, dtype: torch.dtype) -> Ragged:
        return Ragged.of([getattr(item, name) for item in items], dtype=dtype)

    return Batch(
        tuple(range(first_id, first_id + len(items))),
        {
            "sequences": ragged("tokens", torch.int64),
            "logprobs": ragged("logprobs", torch.float32),
            "ref_logprobs": ragged("ref_logprobs", torch.float32),
            "values": ragged("values", torch.float32),
            "prompt_length": Ragged.scalars(torch.tensor([i.prompt for i in items], dtype=torch.int64)),
            "finished": Ragged.scalars(torch.tensor([float(i.finished) for i in items])),
            "score": Ragged.scalars(torch.tensor([i.score for i in items])),
        },
    )


def reference_reward(item: Item, config: PPOConfig) -> float:
    reward = (item.score - config.reward_bias) * config.reward_scale
    if config.reward_clip is not None:
        reward = min(max(reward, -config.reward_clip), config.reward_clip)
    if item.finished:
        return reward
    if config.truncated == "bootstrap":
        reward = 0.0
    return reward - config.missing_eos_penalty


def reference_advantages(
    item: Item, config: PPOConfig, *, coef: float, mean: float = 0.0, std: float = 1.0
) -> tuple[list[float], list[float]]:
    """Advantages and returns of each action, by the definition: a discounted sum of TD errors to the end."""
    state_values = [item.values[t - 1] * std + mean for t in item.actions]
    bootstraps = config.truncated == "bootstrap" and not item.finished
    state_values.append(item.values[-1] * std + mean if bootstraps else 0.0)
    rewards = [-coef * (item.logprobs[t] - item.ref_logprobs[t]) for t in item.actions]
    rewards[-1] += reference_reward(item, config)
    advantages = []
    for i in range(len(rewards)):
        advantage = 0.0
        for k in range(i, len(rewards)):
            delta = rewards[k] + config.gamma * state_values[k + 1] - state_values[k]
            advantage += (config.gamma * config.lam) ** (k - i) * delta
        advantages.append(advantage)
    return advantages, [a + v for a, v in zip(advantages, state_values, strict=False)]


def reference_kl(item: Item) -> float:
    return sum(item.logprobs[t] - item.ref_logprobs[t] for t in item.actions)


def mean_and_std(numbers: list[float]) -> tuple[float, float]:
    mean = sum(numbers) / len(numbers)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))


def action_rows(batch: Batch, key: str) -> list[list[float]]:
    """A field's numbers on the action tokens of each item."""
    prompts = batch["prompt_length"].values.tolist()
    return [row[p:].tolist() for row, p in zip(batch[key].rows(), prompts, strict=True)]


class TableModel:
    """A model that looks at nothing but the token itself, so that the batch around it does not matter."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.rand(2, VOCABULARY, generator=generator).sub(2.0).requires_grad_()

    def __call__(self, sequences: Ragged) -> ModelOutput:
        logprobs, values = self.table[:, sequences.values]
        return ModelOutput(sequences.lengths, logprobs, -logprobs.detach(), values)


def alone(tensor: Tensor) -> Tensor:
    """dp_sum of a single rank."""
    return tensor.clone()


def on_ranks(count: int, work: Callable[[int, Sum], T]) -> list[T]:
    """Run `work(rank, dp_sum)` in one thread per rank; dp_sum really waits for all of them."""
    slots: list[Tensor] = [torch.empty(0)] * count
    barrier = threading.Barrier(count, timeout=20)

    def run(rank: int) -> T:
        def dp_sum(tensor: Tensor) -> Tensor:
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        return work(rank, dp_sum)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def make_algorithm(config: PPOConfig, **generation: float) -> PPOAlgorithm:
    """The algorithm of a recipe with these settings."""
    recipe = {
        "algorithm": "ppo",
        "run_dir": "r",
        "data": {"train": "t", "eval": "e", "batch": config.minibatches},
        "models": {"actor": {"path": "a"}, "reward": {"path": "b"}},
        "ppo": config.model_dump(),
        "generation": generation,
    }
    experiment = parse_experiment(recipe)
    return PPOAlgorithm(experiment, build_graph(experiment), build_eval_graph(experiment))
