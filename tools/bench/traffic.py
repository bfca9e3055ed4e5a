"""``bytes``: what each implementation sends in a step, and the least that must travel."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import contestants, engine_view
from .layouts import lay
from .step import Job, title
from .table import render


class Wire(TorchDispatchMode):
    """Counts the collectives of this process and the bytes that it sends.

    The dispatcher sees every collective. One that this class cannot weigh is an error, because a silent
    zero would flatter the implementation.
    """

    NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    SILENT = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.statuses = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It first decomposes the operation.
        name = func.overloadpacket.__name__
        if func.namespace in self.NAMESPACES and name not in self.SILENT:
            if name not in SENT:
                raise NotImplementedError(f"how many bytes does {name} send?")
            sent = SENT[name](args, group_of(args))
            self.calls[name.rstrip("_")] += 1
            if name == "allreduce_" and not args[0][0].is_floating_point():
                self.statuses += sent  # by which ranks tell each other of gradients
            else:
                self.bytes += sent
        return func(*args, **(kwargs or {}))


def group_of(args: Any) -> ProcessGroup:
    """The group among the arguments of a collective: boxed, or by its name, which comes last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(nbytes, tensors))


def all_to_all(sent: Tensor, splits: list[int], group: ProcessGroup) -> int:
    return (sent.shape[0] - splits[group.rank()]) * sent.itemsize


def to_others(tensors: Any, group: ProcessGroup) -> int:
    return nbytes(tensors) * (group.size() - 1)


# The bytes that this process sends, by the splits or the ring algorithm.
SENT: dict[str, Callable[[Any, ProcessGroup], int]] = {
    "alltoall_base_": lambda args, group: all_to_all(args[1], args[4], group),
    "all_gather_into_tensor": lambda args, group: to_others(args[0], group),
    "allgather_": lambda args, group: to_others(args[1], group),
    "all_reduce": lambda args, group: 2 * to_others(args[0], group) // group.size(),
    "allreduce_": lambda args, group: 2 * to_others(args[0], group) // group.size(),
    "reduce_scatter_tensor": lambda args, g: to_others(args[0], g) // g.size(),
    "shard_dim_alltoall": lambda args, group: to_others(args[0], group) // group.size(),
}


def work(rank: int, world: int, job: Job) -> dict[str, Any]:
    """The traffic of this rank in one step, after a first step that made all state."""
    laid = lay(job.layout, job.workload, world)
    ours = contestants.make(job.names[0], laid)
    found: dict[str, Any] = {"least": engine_view.least_bytes(ours)}
    for name in job.names:
        optimizer = contestants.make(name, laid, ours)
        optimizer.step()
        with Wire() as wire:
            optimizer.step()
        found[name] = wire.bytes, wire.statuses, dict(wire.calls)
    return found


def text(job: Job, results: Sequence[dict[str, Any]]) -> str:
    least = results[0]["least"]
    rows = []
    for name in job.names:
        sent = [result[name][0] for result in results]
        calls = ", ".join(f"{n} {call}" for call, n in results[0][name][2].items())
        mb = [f"{size / 1e6:.3f}" for size in (sum(sent), max(sent))]
        rows.append([name, *mb, f"{sum(sent) / least:.4f}", calls])
    statuses = sum(result[job.names[0]][1] for result in results)
    head = ["", "MB", "MB, busiest rank", "x least", "collectives of rank 0"]
    return (
        f"{title(job, len(results))}: at least {least / 1e6:.3f} MB; ours also sends {statuses} bytes of statuses\n"
        + render(head, rows)
    )
