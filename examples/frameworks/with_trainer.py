"""Transformers' Trainer with DDP or FSDP2. It makes the optimizer by a factory.

    torchrun --nproc-per-node 2 examples/frameworks/with_trainer.py FOLDER [ddp|fsdp2]

Started again, it goes on from its last checkpoint in FOLDER. The Trainer calls the factory, and the
result with the plain model; under FSDP2, Accelerate shards model and optimizer together afterwards.
"""

import sys
from pathlib import Path

import torch
from tiny import factory, llama
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main(folder: Path, strategy: str = "fsdp2") -> None:
    options = {"use_cpu": not torch.accelerator.is_available()}
    if strategy == "fsdp2":
        wrap = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        loading = {"cpu_ram_efficient_loading": True}
        options = {"fsdp": True, "fsdp_config": {"version": 2, **wrap, **loading}}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        learning_rate=3e-3,
        **options,
    )
    torch.manual_seed(0)
    texts = torch.randint(64, (24, 16))
    given = {"strategy": strategy, "lr": arguments.learning_rate}
    trainer = Trainer(
        llama(),
        arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        optimizer_cls_and_kwargs=(factory, given),
    )
    last = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
