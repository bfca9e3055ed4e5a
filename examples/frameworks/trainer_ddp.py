"""Transformers' Trainer under DDP: ``optimizers=`` takes one optimizer, so two are combined.

    torchrun --nproc-per-node 2 examples/frameworks/trainer_ddp.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER.
"""

import sys
from pathlib import Path

import torch
from combined import Combined
from installed_muon import create_auto_config, Muon, partition_named_parameters
from tiny import llama
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main(folder: Path) -> None:
    # It makes the process group, so it comes first.
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    torch.manual_seed(0)
    model = llama().to(arguments.device)
    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
    optimizer = Combined(
        Muon(
            matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
        ),
        AdamW(others, lr=3e-3),
    )

    texts = torch.randint(64, (24, 16))
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        # The Trainer makes the scheduler.
        optimizers=(optimizer, None),
    )
    last = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
