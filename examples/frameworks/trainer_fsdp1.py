"""Transformers' Trainer under FSDP1, where ``create_optimizer`` is given the wrapped model.

    torchrun --nproc-per-node 2 examples/frameworks/trainer_fsdp1.py

Transformers calls FSDP1 deprecated. For new code, see trainer_fsdp2.py.
"""

import tempfile

import torch
from combined import Combined
from installed_muon import create_auto_config, Muon, partition_named_parameters
from tiny import llama
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments


class MuonTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            matrices, others = partition_named_parameters(model)
            # Only the wrapped model knows which slices of which matrices its parameters are.
            config = create_auto_config(
                fsdp_process_group=model.process_group, module=model
            )
            self.optimizer = Combined(
                Muon(
                    matrices,
                    lr=3e-3,
                    adjust_lr_fn="match_rms_adamw",
                    distributed_config=config,
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
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    )
    torch.manual_seed(0)
    model = llama()
    texts = torch.randint(64, (24, 16))
    data = [{"input_ids": text, "labels": text} for text in texts]
    MuonTrainer(model, arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
