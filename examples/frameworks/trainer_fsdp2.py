"""Transformers' Trainer under FSDP2, which allows no ``optimizers=``: it makes them by a factory.

    torchrun --nproc-per-node 2 examples/frameworks/trainer_fsdp2.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER. The Trainer calls the factory, and the
result with the plain model; Accelerate shards model and optimizer together afterwards.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from combined import Combined
from installed_muon import Muon, partition_named_parameters
from tiny import llama
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def factory() -> Callable[..., Combined]:
    def muon_and_adamw(model: torch.nn.Module, lr: float) -> Combined:
        matrices, others = partition_named_parameters(model)
        scale = "match_rms_adamw"
        muon = Muon(matrices, lr, adjust_lr_fn=scale, distributed_config="auto")
        return Combined(muon, AdamW(others, lr))

    return muon_and_adamw


def main(folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        learning_rate=3e-3,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": True,
        },
    )
    torch.manual_seed(0)
    model = llama()
    texts = torch.randint(64, (24, 16))
    data = [{"input_ids": text, "labels": text} for text in texts]
    made_by = factory, {"lr": arguments.learning_rate}
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizer_cls_and_kwargs=made_by
    )
    last = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
