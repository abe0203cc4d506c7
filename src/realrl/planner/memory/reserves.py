"""Memory that plans leave to others: drivers, processes, and what an allocator cannot use."""

_GIB = 1 << 30
DRIVER_BYTES = int(0.6 * _GIB)
"""Memory reserved by driver and libraries on a GPU: the CUDA context and the kernels that are used."""
PROCESS_BYTES = 4 * _GIB
"""Host memory reserved for a device's process: torch, CUDA, and a file of weights while a model is saved."""
FRAGMENTATION = 0.1
"""Fraction of dynamic memory that the caching allocator holds but cannot use.

Static memory consists of a few flat buffers and does not fragment; nor do the cache, packed weights and the memory
of graphs, which a call holds from its beginning to its end."""
