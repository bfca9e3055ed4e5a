"""Accelerate with DDP or FSDP2: Muon is built from the plain model, and ``prepare`` takes both.

    torchrun --nproc-per-node 2 examples/frameworks/with_accelerate.py FOLDER [ddp|fsdp2]

Started again, it goes on from its last checkpoint in FOLDER. ``accelerate launch`` works too, but on
CPUs it starts a single process, whatever ``--num-processes`` says. With a config file, the plugin is
in the file, so write ``Accelerator()`` here.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from combined import Combined
from tiny import llama, muon_and_adamw


def main(folder: Path, strategy: str = "fsdp2") -> None:
    if strategy == "ddp":
        # Without ``cpu``, each process of torchrun trains alone if there is no accelerator.
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    else:
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
    # ``save_state`` takes one optimizer for each model under FSDP2.
    optimizer = Combined(*muon_and_adamw(model, strategy))
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
    main(Path(sys.argv[1]), *sys.argv[2:])
