"""CUDA graphs of work that is the same in every step, over memory that keeps its addresses. The host repeats a graph
with one launch (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..process_groups import is_dry_run


log = logging.getLogger("torch.optim.muon")


def has_graphs(device: torch.device) -> bool:
    """Whether work on a ``device`` can become graphs with memory of their own. Only NVIDIA's GPUs were tried."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # A dry run has no memory, and may have no GPU.
    if is_dry_run() or not torch.cuda.is_available():
        return False
    # Allocators of users have no pools for graphs.
    return torch.cuda.get_allocator_backend() != "pluggable"


class GraphMemory:
    """The pool of memory and the stream of all graphs of one GPU ``device``. They run one after another, so each may
    write to the memory that the others need for their own intermediate results.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        # The graphs with memory in the pool.
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def recording(self) -> "Recording":
        return Recording(self)

    def is_capturing(self) -> bool:
        """Whether the user makes a graph of the step."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of the launches of ``work``, which does not run. Raises torch.OutOfMemoryError if the device lacks
        memory for it.
        """
        if not self._graphs:
            # The allocator takes no graph for a pool whose graphs are gone.
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps memory for each stream. A graph must have its own, because that of another graph goes with it.
        torch._C._cuda_clearCublasWorkspaces()
        # torch.cuda.graph would wait for the device, and return all cached memory to it, before each capture. Other
        # threads, such as NCCL's, may ask for the state of their work meanwhile.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        self._graphs.add(graph)
        return graph


class Recording:
    """Work that a GPU repeats. It must launch the same kernels over the same memory at each call."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._has_run = False
        self._lacks_memory = False
        self._graph: Any = None

    def run(self, work: Callable[[], None]) -> None:
        """Does ``work``, from the second call on as a graph. The first call compiles and loads the kernels, which a capture
        must not do. Inside a graph of the user's, the work becomes part of that graph.
        """
        if not self._has_run or self._lacks_memory or self._memory.is_capturing():
            work()
            self._has_run = True
            return
        if self._graph is None:
            try:
                self._graph = self._memory.capture(work)
            except torch.OutOfMemoryError:
                # Nothing has run. Other ranks do not notice how this one does its work.
                log.info("no memory for a CUDA graph, so the host launches its kernels")
                self._lacks_memory = True
                work()
                return
        self._graph.replay()
