"""Sizes of the errors of predicted times, by the source of a time.

A size is the standard deviation of ln(measured / predicted): of 0.1, two in three times are within about 10 %.
Those of profiled times were set by measured runs on CPUs (`bench/reality.py`; docs/notes/measurements.md says
which rows were used, and which were kept for the check). Nothing of this engine was measured on a GPU: sizes
for tables and data sheets are judgements from what others have published, and from what the sources of the
constants leave open.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TimeSource = Literal["run", "profile", "tables", "data sheet"]
"""Where the time of a call comes from: a run that has measured the call itself under the same strategy, a profile,
tables of measured operators, or formulas with figures of data sheets."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Sizes of the errors of calls, by what shares them."""

    machine: float
    """Error of all that one kind of device does: steps get longer or shorter, and their order hardly changes."""
    call: float
    """Error of one call under one strategy."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Error of a term in all calls on devices of a kind."""
    other_terms: float = 0.0
    """The same of terms that are not named. Bubbles have none: they scale with what they wait for."""

    def term(self, name: str) -> float:
        """Return the size of a term's error."""
        return self.terms.get(name, self.other_terms)


SPREADS: Mapping[TimeSource, Spread] = {
    # A run on another day. Its own calls have no error but that of their median.
    "run": Spread(machine=0.06, call=0.04),
    # Ranks of a CPU share cores and memory, which costs collectives most; on GPUs there was nothing to compare.
    "profile": Spread(
        machine=0.10,
        call=0.06,
        terms={"tensor": 0.25, "data": 0.2, "pipeline": 0.2, "launch": 0.2},
        other_terms=0.04,
    ),
    # An engine need not reach what operators take in a table: it has other attention kernels than vLLM, clocks drop
    # under sustained load, work is spread unevenly. Published training on H100 takes 11 to 32 % longer than
    # predicted, and decoding on A100 -5 to 10 % (`bench/published_rows.py`). Streaming, host and network are those
    # of data sheets. Residuals of the tables on rows held out, of 3 to 7 %, are added for each call.
    "tables": Spread(
        machine=0.18,
        call=0.08,
        terms={"compute": 0.08, "decode": 0.12, "tensor": 0.15, "launch": 0.4},
        other_terms=0.2,
    ),
    # The sources of `Efficiency` allow 0.65 to 0.8 of the peak for products, 0.3 to 0.6 for attention, and 0.77 to
    # 0.88 of a link; how long a host takes to launch, or ranks to meet, nothing but a measurement tells.
    "data sheet": Spread(
        machine=0.2,
        call=0.1,
        terms={"compute": 0.15, "launch": 0.4, "tensor": 0.3},
        other_terms=0.2,
    ),
}
"""Errors by source. Those of tables and data sheets are judgements."""

FUNCTION = Spread(machine=0.0, call=0.15)
"""Errors of functions on the host, whose times runs have measured."""

MOVES: Mapping[str, float] = {"reallocation": 0.4, "exchange": 0.4, "copies": 0.2}
"""Errors of what happens between calls, whose times come from the bandwidths of links on any cluster: a judgement.
Copies between device and host are those of PCIe, which varies less."""

TABLES_OF_TERMS: Mapping[str, str] = {
    "compute": "product",
    "decode": "decode",
    "tensor": "all_reduce",
    "data": "reduce_scatter",
}
"""Table of operators whose residual a term has in each call, by term."""
