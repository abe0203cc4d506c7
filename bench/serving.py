"""Measure the engine of `realrl serve`: conversations at the same time, compared with one after another.

    python bench/serving.py [--conversations 64] [--turns 4] [--json FILE]

A conversation begins with a prompt of 100 random tokens. Each turn samples 32 tokens and adds 20 random ones, as a
user would. The model has random weights: 8 layers of width 512, as on a CPU in float32. Reported are tokens per
second, and the share of prompt tokens of later turns whose keys and values came from the cache.
"""

import queue
import threading
import time
from dataclasses import dataclass

import torch
from harness import Results, make_parser

from realrl.engine.dtypes import find_products
from realrl.engine.model import make_unsharded_model
from realrl.families.shape import ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.serving.engine import Piece, SamplingOptions
from realrl.serving.local import LocalEngine

SHAPE = ModelShape(
    family="qwen3", vocab_size=8192, hidden_size=512, intermediate_size=1408, layers=8, heads=8, kv_heads=4,
    head_dim=64, max_positions=2048,
)  # fmt: skip
PROMPT, ANSWER, ADDED = 100, 32, 20


@dataclass
class Turn:
    number: int
    prompt: int
    cached: int


def talk(engine: LocalEngine, seed: int, turns: int, told: list[Turn]) -> None:
    """Have one conversation."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SHAPE.vocab_size, (PROMPT,), generator=draw).tolist()
    for number in range(turns):
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        options = SamplingOptions(max_tokens=ANSWER, ignore_eos=True, seed=seed)
        engine.submit(tuple(tokens), options, pieces.put)
        before, answered = len(tokens), False
        while not answered:
            piece = pieces.get()
            assert piece.error is None, piece.error
            tokens += piece.tokens
            answered = piece.finish is not None
        told.append(Turn(number, before, piece.cached_tokens))
        tokens += torch.randint(1, SHAPE.vocab_size, (ADDED,), generator=draw).tolist()


def measure(engine: LocalEngine, seeds: range, turns: int, *, together: bool) -> dict[str, float]:
    """Measure conversations that run together, or one after another."""
    told: list[Turn] = []
    threads = [threading.Thread(target=talk, args=(engine, seed, turns, told)) for seed in seeds]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    later = [turn for turn in told if turn.number]
    return {
        "tokens_per_second": len(told) * ANSWER / seconds,
        "cached": sum(turn.cached for turn in later) / sum(turn.prompt for turn in later),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--alone", type=int, default=8, help="conversations that run one after another")
    arguments = parser.parse_args()
    cpu = torch.device("cpu")
    model = make_unsharded_model(
        SHAPE, "lm", dtype=torch.float32, device=cpu, products=find_products("float32", cpu)
    )
    initialise(model.parameters, model.layout.specs, SHAPE, 1)
    engine = LocalEngine(
        model, name="bench", stop_token_ids=(0,), context_tokens=2048, rows=64, kv_tokens=1 << 16
    )
    measure(engine, range(2), arguments.turns, together=True)  # compiles kernels
    results = Results(arguments.json)
    found = {}
    for name, count, together in (
        ("alone", arguments.alone, False),
        ("together", arguments.conversations, True),
    ):
        found[name] = measure(engine, range(100, 100 + count), arguments.turns, together=together)
        told = found[name]
        print(
            f"{name:<9}{told['tokens_per_second']:8.1f} tokens/s  {told['cached']:.0%} of later prompts cached"
        )
    ratio = found["together"]["tokens_per_second"] / found["alone"]["tokens_per_second"]
    print(f"together, {ratio:.1f} times the tokens per second")
    results.add("conversations", {**found, "ratio": ratio})
    engine.close()


if __name__ == "__main__":
    main()
