"""Change of scores and log-probabilities where a reward model or a reference is quantised, and what that takes.

The models of the first two stages of the demo, at other precisions beside float32: scores of the ends of rated
sentences, and log-probabilities of the tokens of reference sentences. A change is a mean of differences; its share
is that of the standard deviation of what is compared. Also bytes of weights, seconds of all passes, each the
shortest of three, and of widening a matrix of 4096 x 1024 numbers, on one thread.

    make demo && python bench/quantised.py [--sentences N] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from results_file import ResultsFile
from torch import Tensor
from transformers import AutoTokenizer

from realrl.data.batch import Ragged
from realrl.data.records import read_records
from realrl.data.rejects import Rejects
from realrl.engine.model import Model, make_unsharded_model
from realrl.families.shape import Head
from realrl.families.tensors import Quantisation
from realrl.huggingface import model_files
from realrl.huggingface.stored import quantise
from realrl.model.packing import Packing
from realrl.model.quantised import QuantisedMatrix

REWARD, REFERENCE = "runs/demo/reward/final", "runs/demo/sft/final"
PAIRS, TEXTS = "data/demo/reward_eval.jsonl", "data/demo/sft_eval.jsonl"
TYPES: dict[str, tuple[torch.dtype, Quantisation | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "fp8": (torch.float32, "fp8"),
    "int8, bfloat16": (torch.bfloat16, "int8"),
    "fp8, bfloat16": (torch.bfloat16, "fp8"),
}
"""Type of the computation, and of matrices where they have another."""
AT_ONCE = 32
"""Sentences of a micro-batch."""
MATRIX = (4096, 1024)


def read_sentences(path: str, model: str, fields: tuple[str, ...], count: int) -> list[Tensor]:
    """Read the tokens of sentences, with their ends."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    records = [record for _, record in read_records(path, Rejects("fail"))][: count // len(fields)]
    texts = [record["prompt"] + record[field] for record in records for field in fields]
    return [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]


def open_model(path: str, head: Head, dtype: torch.dtype, quantisation: Quantisation | None) -> Model:
    """Open a model, some of whose matrices may be quantised."""
    shape = model_files.read_shape(path).model_copy(update={"quantised": quantisation})
    model = make_unsharded_model(shape, head, dtype=dtype, device=torch.device("cpu"))
    model_files.load(path, shape, model.layout.specs, model.parameters)
    return model


@torch.no_grad()
def compute(model: Model, sentences: list[Tensor]) -> Iterator[Tensor]:
    """Compute scores of the ends of sentences, or log-probabilities of all tokens but the first."""
    for first in range(0, len(sentences), AT_ONCE):
        rows = Ragged.of(sentences[first : first + AT_ONCE])
        packing = Packing.of(rows.lengths, model.device)
        output = model.compute_output(model.forward(rows, packing, None), rows, packing)
        if output.values is not None:
            yield torch.stack([row[-1] for row in Ragged(output.values, rows.lengths).rows()]).double()
        elif output.logprobs is not None:
            yield torch.cat([row[1:] for row in Ragged(output.logprobs, rows.lengths).rows()]).double()


def measure(function: Callable[[], object], times: int = 3) -> float:
    """Time a function: the shortest of some times, in seconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def compare(path: str, head: Head, sentences: list[Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compare what a model computes at every precision with float32."""
    expected = torch.empty(0)
    for name, (dtype, quantisation) in TYPES.items():
        model = open_model(path, head, dtype, quantisation)
        found = torch.cat([*compute(model, sentences)])
        if name == "float32":
            expected = found
        difference = found - expected
        figures: dict[str, Any] = {
            "weights_mb": sum(held.memory.nbytes for held in model.sets.values()) / 1e6,
            "seconds": measure(lambda model=model: [*compute(model, sentences)]),  # type: ignore[misc]
            "mean_change": difference.abs().mean().item(),
            "largest_change": difference.abs().max().item(),
            "spread": expected.std().item(),
            "share": (difference.abs().mean() / expected.std()).item(),
            "shift": difference.mean().item(),
        }
        if head == "scalar":
            chosen, rejected = found[0::2], found[1::2]
            figures["accuracy"] = (chosen > rejected).double().mean().item()
        yield name, figures


def time_widening() -> Iterator[tuple[str, dict[str, Any]]]:
    """Time widening a matrix, and copying one in float32."""
    matrix = torch.randn(MATRIX)
    yield "a copy in float32", {"ms": 1e3 * measure(matrix.clone, 30)}
    kinds: tuple[Quantisation, ...] = ("int8", "fp8")
    for kind in kinds:
        quantised = QuantisedMatrix.of(*quantise(matrix, kind), kind)
        for dtype in (torch.float32, torch.bfloat16):
            seconds = measure(lambda m=quantised, d=dtype: m.widen(d), 30)  # type: ignore[misc]
            yield f"{kind} to {str(dtype).removeprefix('torch.')}", {"ms": 1e3 * seconds}


def main() -> None:
    """Measure, and print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=1200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = ResultsFile(arguments.json)
    pairs = read_sentences(PAIRS, REWARD, ("chosen", "rejected"), arguments.sentences)
    texts = read_sentences(TEXTS, REFERENCE, ("answer",), arguments.sentences)
    for what, cases in (
        ("scores", compare(REWARD, "scalar", pairs)),
        ("log-probabilities", compare(REFERENCE, "lm", texts)),
        ("widening", time_widening()),
    ):
        for name, figures in cases:
            results.add(f"{what}: {name}", figures)
            shown = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{what:18} {name:16} {shown}", flush=True)


if __name__ == "__main__":
    main()
