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
        if name not in SENT:
            raise NotImplementedError(f"how many bytes does {name} send?")
        group = group_of(args)
        sent = SENT[name](args, group)
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


def all_to_all(sent: Tensor, splits: list[int], group: ProcessGroup) -> int:
    kept = splits[group.rank()]
    elements = len(sent) - kept
    return elements * sent.itemsize


def to_others(tensors: Any, group: ProcessGroup) -> int:
    others = group.size() - 1
    return nbytes(tensors) * others


def of_ring(tensors: Any, group: ProcessGroup) -> int:
    """The bytes of each pass of a ring, in which a rank sends all parts but one."""
    return to_others(tensors, group) // group.size()


def of_two_rings(tensors: Any, group: ProcessGroup) -> int:
    """A ring that reduces, and a ring that gathers."""
    return 2 * to_others(tensors, group) // group.size()


# The bytes that this process sends, by the splits or the ring algorithm.
SENT: dict[str, Callable[[Any, ProcessGroup], int]] = {
    "alltoall_base_": lambda args, group: all_to_all(args[1], args[4], group),
    "all_gather_into_tensor": lambda args, group: to_others(args[0], group),
    "allgather_": lambda args, group: to_others(args[1], group),
    "all_reduce": lambda args, group: of_two_rings(args[0], group),
    "allreduce_": lambda args, group: of_two_rings(args[0], group),
    "reduce_scatter_tensor": lambda args, group: of_ring(args[0], group),
    "shard_dim_alltoall": lambda args, group: of_ring(args[0], group),
}


def work(rank: int, world: int, job: Job) -> dict[str, Any]:
    """The traffic of this rank in one step, after a first step that made all state."""
    laid = lay(job.layout, job.workload, world)
    ours = contestants.make(job.names[0], laid)
    least = engine_view.least_bytes(ours)
    found: dict[str, Any] = {"least": least}
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
        sent_by_rank = [result[name][0] for result in results]
        sent = sum(sent_by_rank)
        busiest = max(sent_by_rank)
        _, _, calls_of_first = results[0][name]
        calls = [f"{count} {call}" for call, count in calls_of_first.items()]
        rows.append(
            [
                name,
                f"{sent / 1e6:.3f}",
                f"{busiest / 1e6:.3f}",
                f"{sent / least:.4f}",
                ", ".join(calls),
            ]
        )
    statuses = sum(result[job.names[0]][1] for result in results)
    head = ["", "MB", "MB, busiest rank", "x least", "collectives of rank 0"]
    at_least = f"at least {least / 1e6:.3f} MB"
    also = f"ours also sends {statuses} bytes of statuses"
    return f"{title(job, len(results))}: {at_least}; {also}\n{render(head, rows)}"
