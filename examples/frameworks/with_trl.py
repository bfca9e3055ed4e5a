"""TRL's SFTTrainer with LoRA of PEFT under DDP: Muon is made after TRL has put the adapters in.

    torchrun --nproc-per-node 2 examples/frameworks/with_trl.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER. ``optimizers=`` would need an optimizer
before the adapters exist, so the trainer makes it by a factory.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import factory, llama, tokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer


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
    given = {"strategy": "ddp", "lr": arguments.learning_rate}
    trainer = SFTTrainer(
        llama(),
        arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        optimizer_cls_and_kwargs=(factory, given),
    )
    last = get_last_checkpoint(folder) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
