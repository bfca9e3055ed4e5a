"""Lightning Fabric with FSDP2: ``setup`` shards the model, and only then the optimizers are built.

    torchrun --nproc-per-node 2 examples/frameworks/fabric_fsdp2.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER.

Not ``fabric.setup(model, muon, adamw)`` under ModelParallelStrategy: optimizers of the plain
parameters would never see a gradient, AdamW either.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from installed_muon import Muon, partition_named_parameters
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from tiny import Encoder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW


def parallelize(model: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main(folder: Path) -> None:
    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(strategy=strategy, devices=2)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(Encoder())

    matrices, others = partition_named_parameters(model)
    muon, adamw = fabric.setup_optimizers(
        Muon(
            matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config="auto"
        ),
        AdamW(others, lr=3e-3),
    )
    data = torch.utils.data.DataLoader(torch.randint(64, (24, 16)), batch_size=4)
    state = {"model": model, "muon": muon, "adamw": adamw}
    done = max((int(path.name) for path in folder.glob("*")), default=0)
    if done:
        fabric.load(folder / str(done), state)
    batches = islice(fabric.setup_dataloaders(data), done, None)
    for step, tokens in enumerate(batches, done + 1):
        loss = model(tokens)
        fabric.backward(loss)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"step {step}, loss {fabric.all_reduce(loss):.4f}")
        fabric.save(folder / str(step), state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
