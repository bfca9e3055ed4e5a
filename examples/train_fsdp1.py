"""Train a small GPT with FSDP1 (FullyShardedDataParallel).

    torchrun --nproc-per-node 4 examples/train_fsdp1.py

FSDP1 keeps parameters as slices of flat storage. With ``use_orig_params=True`` each slice is a
parameter of its own, so that Muon and AdamW can share a unit. Only the wrapped model knows the
shapes of the matrices, so the config takes ``module=``.
"""

import torch
import torch.distributed as dist
from common import batch_of, loss_of, start, train
from gpt import Block, GPT
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


def main() -> None:
    device = start()
    model = FullyShardedDataParallel(
        GPT(width=64, layers=2, heads=4, context=64),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,  # also on a CPU, where FSDP1 asks for it
        use_orig_params=True,
    )

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(fsdp_process_group=model.process_group, module=model)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )

    def gradients(step: int) -> torch.Tensor:
        loss = loss_of(model, batch_of(step, dist.group.WORLD))
        loss.backward()
        model.clip_grad_norm_(1.0)
        return loss

    train(gradients, [muon, AdamW(others, lr=3e-3)])


if __name__ == "__main__":
    main()
