"""Training, decoding, GRPO and PPO on one GPU, beside the GPU's peaks and other systems measured in the same run.

Shapes are Qwen2.5 0.5B, 1.5B and 7B, with random bfloat16 weights. The peaks come from a large product
and a large copy. Training of the 7B shape uses 8 of 28 layers, since the optimizer state of more does not
fit. Results are written after each measurement, so an interrupted run keeps its results.

    python bench/gpu/run.py [--only training decoding grpo ppo] [--device cuda] [--out FILE.md]

`--device cpu` is a dry run with tiny models; it writes nothing unless `--out` is given.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from device import SHAPES, Device
from model_steps import BATCHES, measure_decoding, measure_training
from peers import compare
from ppo_step import measure_ppo

ROOT = Path(__file__).parents[2]
PEAKS = {"training": "share_of_product_peak", "decoding": "share_of_copy_bandwidth"}
KINDS = ("training", "decoding", "grpo", "ppo")
Measurement = Callable[[], Mapping[str, Any]]


def list_measurements(device: Device, kinds: list[str]) -> dict[str, Measurement]:
    """List the measurements by name."""
    found: dict[str, Measurement] = {}
    sizes = ["0.5B"] if device.tiny else list(SHAPES)
    for size in sizes:
        layers = 8 if size == "7B" else None
        found[f"training {size}"] = lambda size=size, layers=layers: measure_training(
            device, size, layers=layers
        )
        for rows in BATCHES[:2] if device.tiny else BATCHES:
            found[f"decoding {size}, {rows} rows"] = lambda size=size, rows=rows: measure_decoding(
                device, size, rows
            )
    for case in ["grpo-5M-smoke"] if device.tiny else ["grpo-0.5B-tailed", "grpo-1.5B-tailed"]:
        rounds = 1 if device.tiny else 5
        found[case.replace("-", " ", 1)] = lambda case=case, rounds=rounds: compare(
            case, rounds, 2, device=device.name
        )
    found["ppo 0.5B"] = lambda: measure_ppo(device, "0.5B")
    return {name: run for name, run in found.items() if name.split()[0] in kinds}


def write_page(path: Path, device: Device, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the results as a page of the documentation."""
    about = {"date": date.today().isoformat(), **device.describe()}
    about["product peak"] = f"{device.flops / 1e12:.0f} TFLOP/s"
    about["copy bandwidth"] = f"{device.bandwidth / 1e9:.0f} GB/s"
    lines = ["# Benchmarks on a GPU", "", "`make gpu-bench` (`bench/gpu/run.py`) wrote this page.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items()), ""]
    for name, result in results.items():
        lines += [f"## {name[0].upper()}{name[1:]}", "", "| | |", "|---|---|"]
        lines += [f"| {key.replace('_', ' ')} | {format_value(value)} |" for key, value in result.items()]
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def format_value(value: Any) -> str:
    """Format a figure, or all figures of a side."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {format_value(v)}" for name, v in value.items())
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA device; nothing was measured")
        return
    device = Device(arguments.device)
    out = arguments.out or (None if device.tiny else ROOT / "docs" / "notes" / "benchmarks-gpu.md")
    results: dict[str, Mapping[str, Any]] = {}
    for name, run in list_measurements(device, arguments.only).items():
        try:
            results[name] = run()
        except torch.OutOfMemoryError as error:
            results[name] = {"failed": str(error).splitlines()[0]}
        device.free()
        headline = results[name].get(PEAKS.get(name.split()[0], ""))
        print(name, "" if headline is None else f"{headline:.1%} of the peak", results[name], flush=True)
        if out is not None:
            write_page(out, device, results)


if __name__ == "__main__":
    main()
