"""Train a small GPT with DDP. The replicas share the orthogonalization.

    torchrun --nproc-per-node 4 examples/train_ddp.py

Under DDP every rank holds every matrix. Stock Muon orthogonalizes all of them on each rank. With
a ``distributed_config``, each rank orthogonalizes its share and sends the results to the others.
"""

import torch
import torch.distributed as dist
from common import batch_of, loss_of, start, train
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


def main() -> None:
    device = start()
    model = GPT(width=64, layers=2, heads=4, context=64).to(device)
    model = DistributedDataParallel(model)

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=model.process_group)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )

    def gradients(step: int) -> torch.Tensor:
        loss = loss_of(model, batch_of(step, dist.group.WORLD))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    train(gradients, [muon, AdamW(others, lr=3e-3)])


if __name__ == "__main__":
    main()
