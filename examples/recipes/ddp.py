"""DistributedDataParallel: all ranks have all of the model."""

import torch.distributed as dist
from models import batches, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import create_auto_config


def train(model: nn.Module, optimizer: Muon) -> None:
    for inputs, targets in batches(dist.group.WORLD):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()  # here DDP averages the gradients
        optimizer.step()


@recipe(processes=4)
def unconfigured() -> OneProcess:
    """Right without a config, but every rank orthogonalizes every matrix."""
    model = DDP(Transformer().to(device()))
    optimizer = Muon(model.parameters(), lr=0.01, momentum=0.95)

    alone = OneProcess(Transformer().to(device()), model, optimizer, once=False)
    train(model, optimizer)
    return alone


@recipe(processes=4)
def shared_out() -> OneProcess:
    """With a config the ranks share out the matrices, and tell each other the results."""
    model = DDP(Transformer().to(device()))

    config = create_auto_config(ddp_process_group=dist.group.WORLD)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    train(model, optimizer)
    return alone


@recipe(processes=4)
def by_another_name() -> OneProcess:
    """Ranks of context parallelism hold replicas too: ``cp_process_group`` does as well."""
    model = DDP(Transformer().to(device()))

    config = create_auto_config(cp_process_group=dist.group.WORLD)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    train(model, optimizer)
    return alone
