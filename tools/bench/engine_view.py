"""The engine's internals that the bench reads. No other module here depends on their structure."""

import functools

import torch
from torch.optim import _muon_formulas, _newton_schulz as ns, Muon
from torch.optim._muon_reports import describe
from torch.optim._muon_engine.layouts.layout import Region
from torch.optim._muon_engine.schedule.schedule import Schedule


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
            options = {"dtype": ns.NS_DTYPE, "device": engine.device}
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


def buffer_bytes(schedule: Schedule, rank: int, prefetch: int) -> int:
    """The bytes of the buffers of ``rank`` in a step."""
    memory = 0
    for ranks in {bucket.ranks for bucket in schedule.buckets}:
        if rank in ranks:
            of_group = describe.bytes_of(schedule, ranks, rank, prefetch)
            memory += of_group.memory
    return memory
