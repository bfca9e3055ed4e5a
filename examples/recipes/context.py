"""Context parallelism: ranks see different parts of each sequence."""

import torch.distributed as dist
from gradients import average
from models import batches, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import create_auto_config


@recipe(processes=4)
def split_sequences() -> OneProcess:
    """All ranks have all of the model; attention fetches keys and values from the others."""
    cp_pg = dist.group.WORLD
    model = Transformer().to(device())
    for layer in model.layers:
        layer.attention.context = cp_pg

    config = create_auto_config(cp_process_group=cp_pg)
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    for sequences in batches():
        # As many positions on each rank: each one's mean loss counts the same.
        inputs, targets = (s.chunk(cp_pg.size(), 1)[cp_pg.rank()] for s in sequences)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        # The sum alone would be that of as many batches.
        average(model.parameters(), cp_pg, cp_pg.size())
        optimizer.step()
    return alone
