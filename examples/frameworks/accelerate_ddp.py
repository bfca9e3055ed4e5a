"""Accelerate with DDP: replicas share the orthogonalization.

torchrun --nproc-per-node 2 examples/frameworks/accelerate_ddp.py
accelerate launch --cpu --num-processes 2 examples/frameworks/accelerate_ddp.py
"""

import torch
from accelerate import Accelerator
from tiny import llama
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


def main() -> None:
    accelerator = Accelerator()
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
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss, 'mean'):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
