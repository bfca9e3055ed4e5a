"""The engine's internals that the bench reads. No other module for measurements depends on their structure."""

import torch
from torch.optim import _newton_schulz as ns, Muon
from torch.optim._muon_engine.step import BucketFlight
from torch.optim._muon_formulas import MuonFormulas


def default_formulas() -> MuonFormulas:
    """Those of a parameter group with default options."""
    (group,) = Muon([torch.nn.Parameter(torch.empty(1, 1))]).param_groups
    return MuonFormulas.of_group(group)


def exchange(optimizer: Muon) -> None:
    """The transfers of a step, each after the one before."""
    engine = optimizer._engine
    device = engine.runner.device
    for bucket in engine.plan.buckets:
        flight = BucketFlight(bucket, engine.groups[bucket.grid], device)
        flight.start_gather()
        flight.wait()
        flight.start_scatter()
        flight.wait()
        for _ in bucket.rounds:
            flight.start_rounds(1)
            flight.rounds.pop().wait()


def least_bytes(optimizer: Muon) -> int:
    """The bytes that must travel between all ranks in a step, given the layouts and owners.

    The owner must receive the elements that it lacks, and each other rank its part of the update.
    """
    plan = optimizer._engine.plan
    elements = 0
    for matrix, owner in plan.owners.items():
        kept = matrix.layout.numel_of(owner)
        updates = len(matrix.layout.grid) * matrix.numel
        elements += matrix.numel - kept + updates - kept
    return elements * ns.NS_DTYPE.itemsize
