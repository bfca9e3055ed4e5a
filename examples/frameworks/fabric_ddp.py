"""Lightning Fabric with DDP: model and optimizers go through ``setup`` together.

    torchrun --nproc-per-node 2 examples/frameworks/fabric_ddp.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from installed_muon import create_auto_config, Muon, partition_named_parameters
from lightning.fabric import Fabric
from tiny import Encoder
from torch.optim import AdamW


def main(folder: Path) -> None:
    fabric = Fabric(strategy="ddp", devices=2)
    # It makes the process group that the config names.
    fabric.launch()
    torch.manual_seed(0)
    model = Encoder().to(fabric.device)

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    model, muon, adamw = fabric.setup(model, muon, AdamW(others, lr=3e-3))

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
