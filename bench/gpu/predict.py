"""Predict what run.py would measure for training and decoding. No GPU is needed.

    python bench/gpu/predict.py [--device h100]

Prints the table of docs/gpu.md. Predictions come from the planner's tables and data sheets; no measurement of this
code on a GPU has tested them. Shares refer to the data sheet's peaks, while run.py uses measured peaks.
"""

import argparse

from device import SHAPES as NAMES
from model_steps import (
    BATCHES,
    CONTEXT,
    LENGTH,
    LONG,
    SHORT,
    count_decoding_bytes,
    count_training_operations,
    count_training_tokens,
)

from realrl.dataflow.call import Call, Kind
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), work=("prompts",))


def predict(spec: ClusterSpec, shape: ModelShape, call: Call, workload: Workload, tokens: int) -> float:
    """Predict the seconds of a call on one device."""
    model = StoredModel(shape, "lm", "bfloat16", trained=call is TRAIN)
    placement = Placement(Mesh(0, 1), Strategy(micro_batch_tokens=tokens))
    return CostModel(spec).call(call, model, placement, workload).seconds


def predict_training(spec: ClusterSpec, shape: ModelShape, tokens: int) -> float:
    """Predict the model FLOPs utilisation of a training step."""
    seconds = predict(spec, shape, TRAIN, Workload(tokens // LENGTH, (LENGTH,)), tokens)
    peak = spec.groups[0].device.flops("bfloat16")
    return count_training_operations(shape, tokens, LENGTH) / seconds / peak


def predict_decoding(spec: ClusterSpec, shape: ModelShape, rows: int) -> tuple[float, float]:
    """Predict the seconds of a decode step, and the share of the memory's bandwidth that it uses."""

    def run(new_tokens: int) -> float:
        work = Workload(rows, (CONTEXT,), (new_tokens,), new_tokens)
        return predict(spec, shape, GENERATE, work, 2 * rows * (CONTEXT + LONG))

    seconds = (run(LONG) - run(SHORT)) / (LONG - SHORT)
    moved = count_decoding_bytes(shape, rows, CONTEXT + (SHORT + LONG) / 2)
    return seconds, moved / seconds / spec.groups[0].device.memory_bytes_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="h100")
    arguments = parser.parse_args()
    spec = ClusterSpec.parse(f"{arguments.device}:1x1")
    print("| shape | training, MFU | " + " | ".join(f"decoding, {rows} rows" for rows in BATCHES) + " |")
    print("|---|---|" + "---|" * len(BATCHES))
    for size, name in NAMES.items():
        shape = SHAPES[name]
        layers = 8 if size == "7B" else None
        trained = shape if layers is None else shape.model_copy(update={"layers": layers})
        share = predict_training(spec, trained, count_training_tokens(layers))
        cells = [f"{share:.0%}"]
        for rows in BATCHES:
            seconds, bandwidth = predict_decoding(spec, shape, rows)
            cells.append(f"{1e3 * seconds:.1f} ms, {bandwidth:.0%}")
        of = f"{size} ({layers} of {shape.layers} layers trained)" if layers else size
        print(f"| {of} | " + " | ".join(cells).replace("%", " %") + " |")


if __name__ == "__main__":
    main()
