"""Numbers, names and columns as text, for pages and for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.dataflow.call import Call
    from realrl.plan.placement import Placement
    from realrl.planner.cluster.cluster_spec import ClusterSpec
    from realrl.planner.report.report import PlanReport
    from realrl.planner.simulate.estimate import Interval, MemoryPart
    from realrl.planner.simulate.scenario import Scenario
    from realrl.program.memory import StoredModel

_COLOURS = 8
_FACTORS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits and a unit, for example `27.4 s` or `620 ms`."""
    value, unit = (seconds, "s") if abs(seconds) >= 0.9995 else (seconds * 1e3, "ms")
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}" if value else "0 s"


def format_span(interval: "Interval") -> str:
    """Format an interval of seconds, for example `38 to 53 s` or `1.8 to 2.6 s`."""
    factor, unit = (1.0, "s") if interval.high >= 0.9995 else (1e3, "ms")
    bounds = (
        f"{bound:,.0f}" if bound >= 9.95 else f"{bound:.2g}"
        for bound in (interval.low * factor, interval.high * factor)
    )
    return f"{' to '.join(bounds)} {unit}"


def format_share(share: float) -> str:
    """Format a percentage with two digits, for example `2.8 %`."""
    digits = 0 if abs(share) >= 0.0995 or not share else 1
    return f"{share:.{digits}%}".replace("%", " %")


def format_measured(seconds: float) -> str:
    """Format measured seconds without a unit, to 0.001 s below 10 s, to 0.1 s below 1,000 s, otherwise to 1 s."""
    return f"{seconds:.{3 if seconds < 10 else 1 if seconds < 1000 else 0}f}"


def format_count(number: float) -> str:
    """Format a count with three digits and a factor, for example `1.84 M`; below ten thousand in full."""
    if number < 9999.5:
        return f"{number:,.0f}"
    factor, letter = next((f, letter) for f, letter in _FACTORS if number >= f * 0.9995)
    value = number / factor
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {letter}"


def format_count_of(number: int, noun: str) -> str:
    """Format a number with its noun: `1 device`, `2 devices`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_interval(numbers: Sequence[int]) -> str:
    """Format consecutive numbers as the first and the last number."""
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def format_strategy(placement: "Placement") -> str:
    """Format the degrees of parallelism that are not 1, for example `dp 3 × tp 8 × pp 4`."""
    degrees = [
        f"{axis} {degree}" for axis, degree in placement.strategy.all_degrees.named().items() if degree > 1
    ]
    return " × ".join(degrees) or "one device"


def format_degrees(placement: "Placement", *, function: bool = False) -> str:
    """Format degrees of parallelism, for example `2×8×4`; for a function, only its data-parallel degree."""
    return f"{placement.strategy.dp}" if function else placement.strategy.all_degrees.in_table()


def format_layout(placement: "Placement") -> str:
    """Format the layout of parameters, for example `2×8×4 @0-63`, or `8×1×1 @0-7 ZeRO-3 bfloat16`."""
    s = placement.strategy
    how = ["ZeRO-3"] * s.shards_parameters + ([s.dtype] if s.dtype else [])
    return " ".join([f"{format_degrees(placement)} @{placement.mesh}", *how])


def format_extras(placement: "Placement") -> str:
    """Format the settings of a strategy, without its degrees and its micro-batch size."""
    return ", ".join(placement.strategy.settings)


def format_flags(placement: "Placement") -> str:
    """Format the settings of a strategy without sequence parallelism, which most tensor-parallel calls have."""
    return ", ".join(name for name in placement.strategy.settings if name != "sequence parallel")


def find_role_class(report: "PlanReport", role: str) -> str:
    """Find the CSS class that gives a role its colour."""
    return f"r{report.scenario.graph.roles.index(role) % _COLOURS}"


def find_call_class(report: "PlanReport", call: "Call") -> str:
    """Find the CSS class that gives a call its colour: the class of its role, or `function`."""
    return "function" if call.role is None else find_role_class(report, call.role)


def make_tip(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Format a tooltip: a title, then a name, a tab and a value per line. Empty values are left out."""
    return "\n".join([title, *(f"{name}\t{value}" for name, value in rows if value)])


def name_model(model: "StoredModel") -> str:
    """Name a model by its published shape, or by its number of parameters if the shape is not known."""
    from realrl.families.sizes import SHAPES

    plain = model.shape.model_copy(update={"lora": None, "quantised": None})
    known = next((name for name, shape in SHAPES.items() if shape == plain), None)
    return known or f"{format_parameters(model)} parameters"


def format_parameters(model: "StoredModel") -> str:
    """Format the number of parameters of a model, for example `70.6 B`, or `30.5 B (3.35 B active)`.

    The active parameters of a mixture are the ones that one token passes through.
    """
    from realrl.families.quantisation import is_scale
    from realrl.families.registry import model_tensors
    from realrl.families.sizes import count_block_weights

    tensors = model_tensors(model.shape, model.head)
    number = sum(tensor.numel for tensor in tensors if not is_scale(tensor))
    text, mixture = format_count(number).replace("G", "B"), model.shape.mixture
    if mixture is None:
        return text
    layers = model.shape.layers - len(model.shape.dense_layers)
    others = layers * (mixture.experts - mixture.per_token) * count_block_weights(model.shape)
    return f"{text} ({format_count(number - others).replace('G', 'B')} active)"


def format_dtype(model: "StoredModel") -> str:
    """Format the type of a model's weights, for example `bfloat16` or `int8 and bfloat16`."""
    rest = "bfloat16" if model.element_bytes == 2 else "float32"
    return rest if model.shape.quantised is None else f"{model.shape.quantised} and {rest}"


def format_devices(spec: "ClusterSpec") -> str:
    """Format the devices of a cluster, for example `16 × 8 h100`."""
    return " + ".join(f"{g.nodes} × {g.devices_per_node} {g.device.name}" for g in spec.groups)


def format_batch(scenario: "Scenario") -> str:
    """Format the records of a step and their lengths in tokens."""
    workload = scenario.workload
    if not any(workload.answers):
        each = max(workload.work(call).per_item for call in scenario.graph.calls)
        records = f"{format_count_of(workload.items, 'record')} of {each} sequences"
        sequences = format_count_of(workload.items, "sequence") if each == 1 else records
        return f"{sequences} of {_lengths(workload.prompts)} tokens"
    prompts = _lengths(workload.prompts)
    answers = _lengths(workload.answers, workload.longest_answer)
    count = format_count_of(workload.items // workload.samples, "prompt")
    samples = f"{workload.samples} answers each" if workload.samples > 1 else "answers"
    turns = ""
    if workload.environment is not None:
        seconds = format_seconds(workload.environment.seconds)
        turns = f", with {workload.environment.turns:.3g} turns each, and an environment that answers in {seconds}"
    return f"{count} of {prompts} tokens, {samples} of {answers}{turns}"


def _lengths(lengths: Sequence[int], longest: int = 0) -> str:
    if lengths[0] == lengths[-1]:
        return f"{lengths[0]:,}"
    rare = f", the longest of a step {longest:,}" if longest > lengths[-1] else ""
    return f"{lengths[0]:,} to {lengths[-1]:,} (mean {sum(lengths) / len(lengths):,.0f}{rare})"


def align_columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Align columns of text. Rows may have fewer cells. `right`: align all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


def find_largest(parts: "Mapping[MemoryPart, int]") -> "MemoryPart":
    """Find the largest memory part."""
    return max(parts, key=lambda part: parts[part])
