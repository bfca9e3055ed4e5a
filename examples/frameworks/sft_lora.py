"""TRL's SFTTrainer with LoRA of PEFT under DDP: Muon is made after TRL has put the adapters in.

    torchrun --nproc-per-node 2 examples/frameworks/sft_lora.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER. ``optimizers=`` would need an optimizer
before the adapters exist, so the trainer makes it by a factory.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from combined import Combined
from datasets import Dataset
from installed_muon import create_auto_config, Muon, partition_named_parameters
from peft import LoraConfig
from tiny import llama, tokenizer
from torch.optim import AdamW
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer


def factory() -> Callable[..., Combined]:
    def muon_and_adamw(model: torch.nn.Module, lr: float) -> Combined:
        matrices, others = partition_named_parameters(model)
        config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
        scale = "match_rms_adamw"
        muon = Muon(matrices, lr, adjust_lr_fn=scale, distributed_config=config)
        return Combined(muon, AdamW(others, lr))

    return muon_and_adamw


def main(folder: Path) -> None:
    arguments = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        learning_rate=3e-3,
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    )
    torch.manual_seed(0)
    data = Dataset.from_dict({"input_ids": torch.randint(64, (24, 16)).tolist()})
    trainer = SFTTrainer(
        llama(),
        arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        optimizer_cls_and_kwargs=(factory, {"lr": arguments.learning_rate}),
    )
    last = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
