"""Counts the collectives of a step, and the bytes that they send, as the dispatcher sees them.

However a collective is called (``torch.distributed``, functional, by DTensor), it comes by there.
What an operation sends is taken from its ring algorithm, or from its splits: for n ranks and an
input of b bytes, all-gather (n - 1) b, reduce-scatter (n - 1) b / n, all-reduce twice that, and
all-to-all b less the part that stays.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup


NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SILENT = ("wait_tensor", "_wrap_tensor_autograd")


class Traffic(TorchDispatchMode):
    """While active, adds up what this process sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its collectives are only seen once it has taken the operation apart.
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name not in SILENT:
            self.calls[name.rstrip("_")] += 1
            self.bytes += sent_by(name, args)
        return func(*args, **(kwargs or {}))


def sent_by(name: str, args: Sequence[Any]) -> int:
    """Bytes that this process sends in the operation ``name``.

    Raises:
        NotImplementedError: for an operation that is not listed; a silent zero would flatter it.
    """
    count = _SENT.get(name)
    if count is None:
        raise NotImplementedError(f"the bench does not know what {name} sends: {args}")
    return count(args)


def _group(args: Sequence[Any]) -> ProcessGroup:
    """The group among the arguments: boxed, or by its name, which stands last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return _resolve_process_group(args[-1])


def _all_gather(args: Sequence[Any], which: int) -> int:
    return (_group(args).size() - 1) * _bytes(args[which])


def _reduce_scatter(args: Sequence[Any], which: int) -> int:
    size = _group(args).size()
    return (size - 1) * _bytes(args[which]) // size


def _all_to_all(args: Sequence[Any], sent: Tensor, splits: Sequence[int]) -> int:
    group = _group(args)
    rows = sent.shape[0]
    if not rows:
        return 0
    own = splits[group.rank()] if splits else rows // group.size()
    return (rows - own) * (sent.nbytes // rows)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_bytes(tensor) for tensor in tensors)


_SENT: dict[str, Callable[[Sequence[Any]], int]] = {
    "alltoall_base_": lambda a: _all_to_all(a, a[1], a[4]),
    "all_to_all_single": lambda a: _all_to_all(a, a[0], a[2]),
    "all_gather_into_tensor": lambda a: _all_gather(a, 0),
    "_allgather_base_": lambda a: _all_gather(a, 1),
    "allgather_": lambda a: _all_gather(a, 1),
    "all_reduce": lambda a: 2 * _reduce_scatter(a, 0),
    "all_reduce_": lambda a: 2 * _reduce_scatter(a, 0),
    "allreduce_": lambda a: 2 * _reduce_scatter(a, 0),
    "reduce_scatter_tensor": lambda a: _reduce_scatter(a, 0),
    "_reduce_scatter_base_": lambda a: _reduce_scatter(a, 1),
    "shard_dim_alltoall": lambda a: _reduce_scatter(a, 0),
}
