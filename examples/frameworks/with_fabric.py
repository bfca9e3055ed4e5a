"""Lightning Fabric with DDP, or with FSDP2: ``setup`` takes the model, then the optimizers are built.

    torchrun --nproc-per-node 2 examples/frameworks/with_fabric.py FOLDER [ddp|fsdp2]

Started again, it goes on from its last checkpoint in FOLDER.

Not ``fabric.setup(model, muon, adamw)`` under ModelParallelStrategy: optimizers of the plain
parameters would never see a gradient, AdamW either.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from tiny import Encoder, muon_and_adamw, shard


def main(folder: Path, strategy: str = "fsdp2") -> None:
    sharded = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(strategy=sharded if strategy == "fsdp2" else "ddp", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(Encoder())
    muon, adamw = fabric.setup_optimizers(*muon_and_adamw(model, strategy))

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
    main(Path(sys.argv[1]), *sys.argv[2:])
