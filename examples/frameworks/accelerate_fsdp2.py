"""Accelerate with FSDP2: Muon is built from the plain model, and ``prepare`` shards both.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_fsdp2.py

``accelerate launch`` with a config file works too. The plugin is then in the file, so write
``Accelerator()`` here.
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny import llama
from torch.optim import AdamW, Muon
from torch.optim.muon import partition_named_parameters


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        # The first rank alone holds the weights until the model is sharded.
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = llama()
    matrices, others = partition_named_parameters(model)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config="auto"
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
