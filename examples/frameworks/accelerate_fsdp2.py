"""Accelerate with FSDP2: Muon is built from the plain model, and ``prepare`` shards both.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_fsdp2.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER. ``accelerate launch`` with a config
file works too. The plugin is then in the file, so write ``Accelerator()`` here.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from combined import Combined
from installed_muon import Muon, partition_named_parameters
from tiny import llama
from torch.optim import AdamW


def main(folder: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        # The first rank alone holds the weights until the model is sharded.
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        raise SystemExit("Without accelerators, Accelerate would ignore the plugin")
    torch.manual_seed(0)
    model = llama()
    matrices, others = partition_named_parameters(model)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config="auto"
    )
    # ``save_state`` takes one optimizer for each model.
    optimizer = Combined(muon, AdamW(others, lr=3e-3))

    data = torch.utils.data.DataLoader(torch.randint(64, (24, 16)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    done = max((int(path.name) for path in folder.glob("*")), default=0)
    if done:
        accelerator.load_state(folder / str(done))
        data = accelerator.skip_first_batches(data, done)
    for step, tokens in enumerate(data, done + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}, loss {accelerator.reduce(loss, 'mean'):.4f}")
        accelerator.save_state(folder / str(step))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
