"""How the bench repeats the exchanges of a step, and the options of a step."""

import torch
from torch.optim import Muon
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
