"""Accelerate with DDP: replicas share the orthogonalization.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_ddp.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER. ``accelerate launch`` works too, but on
CPUs it starts a single process, whatever ``--num-processes`` says.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from installed_muon import create_auto_config, Muon, partition_named_parameters
from tiny import llama
from torch.optim import AdamW


def main(folder: Path) -> None:
    # Without ``cpu``, each process of torchrun trains alone if there is no accelerator.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    model = llama().to(accelerator.device)
    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    adamw = AdamW(others, lr=3e-3)

    data = torch.utils.data.DataLoader(torch.randint(64, (24, 16)), batch_size=4)
    model, muon, adamw, data = accelerator.prepare(model, muon, adamw, data)
    done = max((int(path.name) for path in folder.glob("*")), default=0)
    if done:
        accelerator.load_state(folder / str(done))
        data = accelerator.skip_first_batches(data, done)
    for step, tokens in enumerate(data, done + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}, loss {accelerator.reduce(loss, 'mean'):.4f}")
        accelerator.save_state(folder / str(step))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
