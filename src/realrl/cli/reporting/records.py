"""Text of `realrl data`: counts, lengths and the first records, with marks on what is trained."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import numpy as np

    from realrl.data.dataset import SourceCount
    from realrl.data.tokenization import Row

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS = 10
_BAR = 40
_SHOWN = 300
"""Maximum tokens shown at the beginning and at the end of a record."""


def format_counts(sources: "Sequence[SourceCount]") -> str:
    """Format the table of sources, and the first reasons for what was skipped of each."""
    from realrl.data.order import count_drawn

    head = ("source", "items", "malformed", "too long", "weight", "per epoch")
    rows = [
        (
            source.path,
            f"{source.items:,}",
            f"{source.skipped - source.too_long:,}",
            f"{source.too_long:,}",
            f"{source.weight:g}",
            f"{count_drawn((source.items, source.weight)):,}",
        )
        for source in sources
    ]
    lines = [_align(head, rows, row) for row in (head, *rows)]
    for source in sources:
        lines += [f"  skipped {reason}" for reason in source.reasons]
        if source.skipped > len(source.reasons):
            lines.append(f"  skipped {source.skipped - len(source.reasons):,} more of {source.path}")
    return "\n".join(lines)


def format_lengths(lengths: dict[str, Any]) -> str:
    """Format quantiles of the numbers of tokens, and a histogram of the last of them."""
    import numpy as np

    head = ("tokens", "least", *(f"{q} %" for q in _QUANTILES[1:-1]), "most", "mean")
    rows = []
    for name, values in lengths.items():
        numbers = np.asarray(values)
        quantiles = np.percentile(numbers, _QUANTILES, method="inverted_cdf")
        rows.append((name, *(f"{value:,.0f}" for value in quantiles), f"{numbers.mean():,.1f}"))
    lines = [_align(head, rows, row) for row in (head, *rows)]
    name, values = list(lengths.items())[-1]
    return "\n".join([*lines, "", *_draw_histogram(name, np.asarray(values))])


def _draw_histogram(name: str, values: "np.ndarray") -> Iterator[str]:
    import numpy as np

    least, most = int(values.min()), int(values.max())
    width = -(-(most - least + 1) // _BINS)
    counts = np.bincount((values - least) // width)
    digits = len(f"{most + width:,}")
    for first, count in zip(range(least, most + 1, width), counts.tolist(), strict=True):
        span = f"{first:>{digits},} to {first + width - 1:>{digits},}"
        bar = "█" * -(-count * _BAR // int(counts.max()))
        yield f"{name} {span}  {bar} {count:,}"


def _align(head: Sequence[str], rows: Sequence[Sequence[str]], row: Sequence[str]) -> str:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    first, *others = (
        f"{cell:{'<' if i == 0 else '>'}{width}}"
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others])


def format_item(tokenizer: Any, origin: str, rows: "Sequence[Row]", coloured: bool) -> str:
    """Format an item as the model sees it: tokens to learn in green, or else in [[ ]]."""
    names = ("chosen", "rejected") if len(rows) == 2 else [""] * len(rows)
    parts = []
    for name, row in zip(names, rows, strict=True):
        learnt = sum(row.loss_mask)
        about = f"{len(row.ids):,} tokens, {learnt:,} to learn" if row.answers else f"{len(row.ids):,} tokens"
        title = " ".join(filter(None, (origin, name, f"({about})")))
        parts.append(f"{typer.style(title, bold=True)}\n{_mark(tokenizer, row, coloured)}")
    return "\n".join(parts)


def _mark(tokenizer: Any, row: "Row", coloured: bool) -> str:
    mask = row.loss_mask
    left_out = len(row.ids) - 2 * _SHOWN
    if left_out <= 0:
        return _mark_tokens(tokenizer, row.ids, mask, coloured)
    beginning, end = (
        _mark_tokens(tokenizer, row.ids[part], mask[part], coloured)
        for part in (slice(_SHOWN), slice(-_SHOWN, None))
    )
    return f"{beginning}\n... {left_out:,} tokens ...\n{end}"


def _mark_tokens(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], coloured: bool) -> str:
    text = ""
    for learnt, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        part = tokenizer.decode([token for _, token in run])
        if coloured:
            text += typer.style(part, fg=typer.colors.GREEN) if learnt else typer.style(part, dim=True)
        else:
            text += f"[[{part}]]" if learnt else part
    return text
