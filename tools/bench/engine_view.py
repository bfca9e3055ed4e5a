"""The engine's internals that the bench reads. No other module here depends on their structure."""

import math
import time
import timeit
from collections.abc import Callable
from typing import Any
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
        if group is not None:
            packs = engine.schedule.packs(bucket, engine.rank)
            for receive, send in (
                (packs.gather_recv, packs.gather_send),
                (packs.scatter_recv, packs.scatter_send),
            ):
                splits = list(receive.split_sizes), list(send.split_sizes)
                how = {"dtype": send.dtype, "device": engine.device}
                flat = [torch.zeros(sum(sizes), **how) for sizes in splits]
                calls.append((*flat, *splits, group))
    return calls


def regions(optimizer: Muon) -> list[Region]:
    """The rectangle of each parameter that this rank holds."""
    engine = optimizer._engine
    return [layout.shards.of(engine.rank)[0] for layout in engine.schedule.layouts]


def is_source(optimizer: Muon, index: int) -> bool:
    """Whether this rank's shard of a parameter is part of the orthogonalized matrix."""
    return optimizer._engine.schedule.is_source(index, optimizer._engine.rank)


def batch_size(shape: tuple[int, int]) -> int:
    """How many matrices of ``shape`` a step orthogonalizes together on an accelerator."""
    nbytes = math.prod(shape) * ns.NS_DTYPE.itemsize
    return max(1, _muon_formulas._BATCH_BYTES // nbytes)


def least_bytes(optimizer: Muon) -> int:
    """The bytes that must travel between all ranks in a step, given the layouts and owners.

    The owner must receive the elements that it lacks, and each other rank its part of the update.
    """
    schedule = optimizer._engine.schedule
    elements = 0
    for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
        kept = layout.shards.numel_of(owner)
        elements += layout.numel - kept + sum(layout.shards.numels) - kept
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
    return mock.patch.object(_muon_formulas, "newton_schulz", lambda x, *_, **__: x)


def passes(optimizer: Muon) -> tuple[Callable[[], None], Callable[[], None]]:
    """The passes of a step before and after Newton-Schulz over plain storage, in the batches of a step.

    They have the phases of the formulas, and the copy to and from the batch.
    """
    (group,) = optimizer.param_groups
    formulas = _muon_formulas.MuonFormulas.of_group(group)
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for param in group["params"]:
        by_shape.setdefault(tuple(param.shape), []).append(param)
    batches = []
    for shape, params in by_shape.items():
        size = batch_size(shape)
        for first in range(0, len(params), size):
            batch = params[first : first + size]
            momenta = [optimizer.state[p]["momentum_buffer"] for p in batch]
            stored = [
                [local_of(tensor) for tensor in tensors]
                for tensors in (batch, [p.grad for p in batch], momenta)
            ]
            whole = torch.zeros_like(torch.stack(stored[0]), dtype=ns.NS_DTYPE)
            batches.append((shape, *stored, list(whole.unbind())))

    @torch.no_grad()
    def before() -> None:
        for _, _, grads, momenta, wholes in batches:
            formulas.accumulate(momenta, grads)
            torch._foreach_copy_(wholes, list(formulas.blend(momenta, grads)))

    @torch.no_grad()
    def after() -> None:
        for shape, params, _, _, wholes in batches:
            step_size = formulas.step_size(shape, params[0].device)
            formulas.apply(params, wholes, step_size)

    return before, after


def described(schedule: Schedule, rank: int, prefetch: int) -> tuple[str, int]:
    """The tables of ``Muon.describe()`` on ``rank``, and the bytes of the buffers that it keeps."""
    tables, memory = [], 0
    for ranks in dict.fromkeys(b.ranks for b in schedule.buckets if rank in b.ranks):
        tables.append("\n".join(describe._table(schedule, ranks, rank, prefetch)))
        memory += describe.bytes_of(schedule, ranks, rank, prefetch)[2]
    return "\n\n".join(tables), memory
