"""``bytes``: what each implementation sends in a step, and the least that must travel."""

from collections import Counter
from collections.abc import Sequence
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
        self.bytes = 0
        self.statuses = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It first decomposes the operation.
        name = func.overloadpacket.__name__
        if func.namespace in self.NAMESPACES and name not in self.SILENT:
            self.count(name, args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        sent = sent_bytes(name, args)
        self.calls[name.rstrip("_")] += 1
        if name == "allreduce_" and not args[0][0].is_floating_point():
            self.statuses += sent  # by which ranks tell each other of gradients
        else:
            self.bytes += sent


def group_of(args: Any) -> ProcessGroup:
    """The group among the arguments of a collective: boxed, or by its name, which comes last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(nbytes, tensors))


# How a tensor travels: to each other rank, or around a ring of all ranks once or twice.
DIRECTLY = "directly"
HOW_SENT = {
    "broadcast_": DIRECTLY,
    "all_gather_into_tensor": DIRECTLY,
    "all_reduce": 2,
    "allreduce_": 2,
    "reduce_scatter_tensor": 1,
}


def sent_bytes(name: str, args: Any) -> int:
    """The bytes that this process sends in the collective ``name``."""
    group = group_of(args)
    others = group.size() - 1
    if name == "alltoall_base_":
        _, source, _, _, sizes, *_ = args
        return (len(source) - sizes[group.rank()]) * source.itemsize
    if name not in HOW_SENT:
        raise ValueError(f"HOW_SENT does not say how {name} sends its bytes")
    if name == "broadcast_" and args[2] != group.rank():
        return 0
    how = HOW_SENT[name]
    sent = nbytes(args[0]) * others
    return sent if how == DIRECTLY else how * sent // group.size()


def work(rank: int, world: int, job: Job) -> dict[str, Any]:
    """The traffic of this rank in one step, after a first step that made all state."""
    laid = lay(job.layout, job.workload, world)
    ours = contestants.make(job.names[0], laid)
    least = engine_view.least_bytes(ours)
    found: dict[str, Any] = {"least": least}
    for name in job.names:
        optimizer = contestants.make(name, laid)
        optimizer.step()
        with Wire() as wire:
            optimizer.step()
        found[name] = wire.bytes, wire.statuses, dict(wire.calls)
    return found


def text(job: Job, results: Sequence[dict[str, Any]]) -> str:
    least = results[0]["least"]
    rows = []
    for name in job.names:
        sent = sum(result[name][0] for result in results)
        _, _, calls_of_first = results[0][name]
        calls = ", ".join(f"{n} {call}" for call, n in calls_of_first.items())
        rows.append([name, f"{sent / 1e6:.3f}", f"{sent / least:.4f}", calls])
    statuses = sum(result[job.names[0]][1] for result in results)
    head = ["", "MB", "x least", "collectives of rank 0"]
    at_least = f"at least {least / 1e6:.3f} MB"
    also = f"ours also sends {statuses} bytes of statuses"
    return f"{title(job, len(results))}: {at_least}; {also}\n{render(head, rows)}"
