"""The engine's internals that the bench reads. No other module here depends on their structure."""

import functools
import time
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.optim import _muon_formulas, _newton_schulz as ns, Muon
from torch.optim._muon_reports import describe
from torch.optim._muon_engine.layouts.layout import Region
from torch.optim._muon_engine.schedule.schedule import Schedule

from .layouts import local_of


def all_to_alls(optimizer: Muon) -> list[tuple]:
    """The ``all_to_all_single`` calls of a step on this rank, with memory for them."""
    engine = optimizer._engine
    calls = []
    for bucket in engine.schedule.buckets:
        group = engine.groups.get(bucket.ranks)
        if group is None:
            continue
        packs = engine.schedule.packs(bucket, engine.rank)
        for receive, send in (
            (packs.gather_recv, packs.gather_send),
            (packs.scatter_recv, packs.scatter_send),
        ):
            received = list(receive.split_sizes)
            sent = list(send.split_sizes)
            options = {"dtype": send.dtype, "device": engine.device}
            target = torch.zeros(sum(received), **options)
            source = torch.zeros(sum(sent), **options)
            calls.append((target, source, received, sent, group))
    return calls


def regions(optimizer: Muon) -> list[Region]:
    """The rectangle of each parameter that this rank holds."""
    engine = optimizer._engine
    found = []
    for layout in engine.schedule.layouts:
        of_rank = layout.shards.of(engine.rank)
        found.append(of_rank[0])
    return found


def is_source(optimizer: Muon, index: int) -> bool:
    """Whether this rank's shard of a parameter is part of the orthogonalized matrix."""
    engine = optimizer._engine
    return engine.schedule.is_source(index, engine.rank)


@functools.cache
def _formulas(algorithm: str) -> _muon_formulas.MuonFormulas:
    param = torch.nn.Parameter(torch.empty(1, 1))
    (group,) = Muon([param], ns_algorithm=algorithm).param_groups
    return _muon_formulas.MuonFormulas.of_group(group)


def batch_size(shape: tuple[int, int], algorithm: str = "quintic") -> int:
    """How many matrices of ``shape`` a step orthogonalizes together on an accelerator."""
    return _formulas(algorithm).batch_size(shape, torch.device("cuda"))


def least_bytes(optimizer: Muon) -> int:
    """The bytes that must travel between all ranks in a step, given the layouts and owners.

    The owner must receive the elements that it lacks, and each other rank its part of the update.
    """
    schedule = optimizer._engine.schedule
    elements = 0
    for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
        kept = layout.shards.numel_of(owner)
        gathered = layout.numel - kept
        scattered = sum(layout.shards.numels) - kept
        elements += gathered + scattered
    return elements * ns.NS_DTYPE.itemsize


def planning_and_packing(groups: list[dict], config: object) -> list[float]:
    """CPU seconds of this thread, which leave out waits: to plan, and for a step without Newton-Schulz."""
    began = time.thread_time()
    muon = Muon(groups, distributed_config=config)
    muon._engine._make_runner()
    planned = time.thread_time() - began
    with without_newton_schulz():
        steps = timeit.repeat(muon.step, timer=time.thread_time, number=1)
    return [planned, min(steps)]


def without_newton_schulz() -> Any:
    """A context in which a step has all but the products of Newton-Schulz."""

    def identity(matrix: Tensor, *_: Any, **__: Any) -> Tensor:
        return matrix

    return mock.patch.object(_muon_formulas, "newton_schulz", identity)


class _Batch(NamedTuple):
    """Plain storage of parameters of one shape, and the matrices that a step orthogonalizes together."""

    shape: tuple[int, ...]
    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    matrices: list[Tensor]

    @classmethod
    def of(
        cls, optimizer: Muon, shape: tuple[int, ...], params: list[Tensor]
    ) -> "_Batch":
        momenta = [optimizer.state[param]["momentum_buffer"] for param in params]
        stored = [local_of(param) for param in params]
        stack = torch.zeros_like(torch.stack(stored), dtype=ns.NS_DTYPE)
        return cls(
            shape,
            stored,
            [local_of(param.grad) for param in params],
            [local_of(momentum) for momentum in momenta],
            list(stack.unbind()),
        )


def passes(optimizer: Muon) -> tuple[Callable[[], None], Callable[[], None]]:
    """The passes of a step before and after Newton-Schulz over plain storage, in the batches of a step.

    They have the phases of the formulas, and the copy to and from the batch.
    """
    (group,) = optimizer.param_groups
    formulas = _muon_formulas.MuonFormulas.of_group(group)
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for param in group["params"]:
        shape = tuple(param.shape)
        by_shape.setdefault(shape, []).append(param)
    batches = []
    for shape, params in by_shape.items():
        size = batch_size(shape)
        for first in range(0, len(params), size):
            batch = params[first : first + size]
            batches.append(_Batch.of(optimizer, shape, batch))

    @torch.no_grad()
    def before() -> None:
        for batch in batches:
            formulas.accumulate(batch.momenta, batch.grads)
            blended = formulas.blend(batch.momenta, batch.grads)
            torch._foreach_copy_(batch.matrices, list(blended))

    @torch.no_grad()
    def after() -> None:
        for batch in batches:
            step_size = formulas.step_size(batch.shape, batch.params[0].device)
            formulas.apply(batch.params, batch.matrices, step_size)

    return before, after


def described(schedule: Schedule, rank: int, prefetch: int) -> tuple[str, int]:
    """The tables of ``Muon.describe()`` on ``rank``, and the bytes of the buffers that it keeps."""
    tables, memory = [], 0
    names = [layout.key.short for layout in schedule.layouts]
    # Without repetitions, in the order of buckets.
    groups = dict.fromkeys(bucket.ranks for bucket in schedule.buckets)
    for ranks in groups:
        if rank in ranks:
            lines = describe.table(schedule, ranks, rank, prefetch, names)
            tables.append("\n".join(lines))
            _, _, nbytes = describe.bytes_of(schedule, ranks, rank, prefetch)
            memory += nbytes
    return "\n\n".join(tables), memory
