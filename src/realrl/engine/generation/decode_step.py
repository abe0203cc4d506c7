"""Decode step of one stage, run operation by operation or as a CUDA graph."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from realrl.engine.generation.row_buffers import BufferedRows
from realrl.engine.generation.sampler import Sampler
from realrl.engine.model import Model
from realrl.model.kv_cache import PagedCache
from realrl.model.matrices import DecodeWeights


class DecodeStep:
    """One stage's part of a decode step, including sampling and bookkeeping on the last stage.

    Shapes depend only on the number of rows, and nothing waits for the device.
    """

    def __init__(self, model: Model, weights: DecodeWeights, cache: PagedCache, sampler: Sampler) -> None:
        self._model = model
        self._weights = weights
        self._cache = cache
        self._sampler = sampler

    def run(self, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        """Run the step. `hidden` comes from the previous stage, [B, H]; None on the first stage.

        Returns hidden states [B, H]; on the last stage tokens [B], which are already recorded in the buffers.
        """
        transformer = self._model.transformer
        x = rows.tokens if hidden is None else hidden
        x = transformer.decode(x, self._weights, self._cache, rows.cached)
        if not self._model.shard.last:
            return x
        noise = rows.noise.index_select(0, rows.step).squeeze(0)
        logits = transformer.compute_logits(x, self._weights)
        if rows.choices is None:
            tokens, logprobs = self._sampler.sample(logits, rows.cached.own_lengths, noise)
        else:
            tokens, logprobs = self._sampler.sample_by_row(
                logits, rows.cached.own_lengths, noise, rows.choices
            )
        tokens, logprobs = self._agree(tokens, logprobs)
        rows.advance(tokens, logprobs)
        return tokens

    def _agree(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Take the tokens that the first context-parallel rank has chosen. Logits of the other ranks might be
        rounded differently, and their rows would then go on with other tokens."""
        group = self._model.groups.context
        if group.size == 1:
            return tokens, logprobs
        # float64 holds tokens and float32 numbers exactly.
        both = group.broadcast(torch.stack((tokens.double(), logprobs.double())))
        return both[0].long(), both[1].float()


class StepGraphs:
    """CUDA graphs of a decode step, one per number of rows, in one memory pool.

    A graph is captured when it is needed for the second time. The first time, the step runs operation by operation,
    which loads the libraries and kernels that it needs. Graphs contain the addresses of parameters, cache and
    buffers, which must not move.
    """

    def __init__(self, step: DecodeStep, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graphs: dict[int, _StepGraph | None] = {}
        self._pool: Any = None

    def run(self, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        """Do what `DecodeStep.run` does, by a graph if there is one. The result is overwritten by the next step
        with the same number of rows."""
        width = len(rows.tokens)
        if width not in self._graphs:
            self._graphs[width] = None
            return self._step.run(rows, hidden)
        graph = self._graphs[width]
        if graph is None:
            graph = self._graphs[width] = self._capture(rows, hidden)
        return graph.replay(hidden)

    def _capture(self, rows: BufferedRows, hidden: Tensor | None) -> "_StepGraph":
        """Capture a graph. If memory runs out, release the memory that torch caches, and try again."""
        stream = _find_capture_stream(self._device)
        try:
            return self._capture_in(stream, rows, hidden)
        except torch.cuda.OutOfMemoryError:
            # During a capture, torch's allocator does not release cached memory by itself.
            torch.cuda.empty_cache()
        return self._capture_in(stream, rows, hidden)

    def _capture_in(
        self, stream: torch.cuda.Stream, rows: BufferedRows, hidden: Tensor | None
    ) -> "_StepGraph":
        if not any(self._graphs.values()):
            self._pool = torch.cuda.graph_pool_handle()  # the pool of a failed capture cannot be used again
        return _StepGraph(self._step, rows, hidden, self._pool, stream)


class _StepGraph:
    """Graph of a decode step for one number of rows."""

    def __init__(
        self,
        step: DecodeStep,
        rows: BufferedRows,
        hidden: Tensor | None,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        self._hidden = None if hidden is None else torch.empty_like(hidden)
        self._graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would wait for the device, and release all memory that torch caches.
        stream.wait_stream(torch.cuda.current_stream(rows.tokens.device))
        with torch.cuda.stream(stream):
            # Thread-local, because other threads, such as NCCL's watchdog, may use the device meanwhile.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._output = step.run(rows, self._hidden)
            finally:
                self._graph.capture_end()

    def replay(self, hidden: Tensor | None) -> Tensor:
        if self._hidden is not None and hidden is not None:
            self._hidden.copy_(hidden)
        self._graph.replay()
        return self._output


@cache
def _find_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the capture stream of the process. There is only one, because torch never frees the workspace that
    cuBLAS allocates for each stream.

    The first products run in it outside any graph, so that this workspace is not allocated in a graph's pool.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        torch.addmm(x[0], x, x @ x)
    return stream
