"""Transformers' Trainer under FSDP2, which allows no ``optimizers=``: override ``create_optimizer``.

    torchrun --nproc-per-node 2 examples/frameworks/trainer_fsdp2.py

It is called with the plain model; Accelerate shards model and optimizer together afterwards.
"""

import tempfile

import torch
from combined import Combined
from tiny import llama
from torch.optim import AdamW, Muon
from torch.optim.muon import partition_named_parameters
from transformers import Trainer, TrainingArguments


class MuonTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            matrices, others = partition_named_parameters(self.model)
            self.optimizer = Combined(
                Muon(
                    matrices,
                    lr=3e-3,
                    adjust_lr_fn="match_rms_adamw",
                    distributed_config="auto",
                ),
                AdamW(others, lr=3e-3),
            )
        return self.optimizer


def main() -> None:
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
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
    MuonTrainer(model, arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
