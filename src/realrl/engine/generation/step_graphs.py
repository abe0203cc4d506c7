"""Decode steps as CUDA graphs: one launch per step, whatever it consists of."""

from typing import Any

import torch
from torch import Tensor

from realrl.engine.generation.decode_step import DecodeStep
from realrl.engine.generation.row_buffers import BufferedRows


class StepGraphs:
    """Graphs of a decode step, one per number of rows, in one pool of memory.

    They are captured when they are needed the second time: the first time the step runs operation by operation, for
    libraries and kernels to be loaded. Graphs know addresses of parameters, cache and buffers, and live no longer
    than a generate call.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._graphs: dict[int, _StepGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        """Run `DecodeStep.run`. What it returns is overwritten by the next step of as many rows."""
        width = len(rows.tokens)
        if width not in self._graphs:
            self._graphs[width] = None
            return self._step.run(rows, hidden)
        graph = self._graphs[width]
        if graph is None:
            graph = self._graphs[width] = _StepGraph(self._step, rows, hidden, self._pool)
        return graph.replay(hidden)


class _StepGraph:
    """Graph of a decode step of so many rows."""

    def __init__(self, step: DecodeStep, rows: BufferedRows, hidden: Tensor | None, pool: Any) -> None:
        self._hidden = None if hidden is None else torch.empty_like(hidden)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, such as NCCL's watchdog.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = step.run(rows, self._hidden)

    def replay(self, hidden: Tensor | None) -> Tensor:
        if self._hidden is not None and hidden is not None:
            self._hidden.copy_(hidden)
        self._graph.replay()
        return self._output
