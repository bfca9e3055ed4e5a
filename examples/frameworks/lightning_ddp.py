"""Lightning with DDP: two optimizers, so the module steps them itself.

    torchrun --nproc-per-node 2 examples/frameworks/lightning_ddp.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER.
"""

import sys
from pathlib import Path

import lightning
import torch
from installed_muon import create_auto_config, Muon, partition_named_parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Encoder
from torch.optim import AdamW


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = Encoder()

    def configure_optimizers(self):
        matrices, others = partition_named_parameters(self)
        config = create_auto_config(ddp_process_group=torch.distributed.group.WORLD)
        return [
            Muon(
                matrices,
                lr=3e-3,
                adjust_lr_fn="match_rms_adamw",
                distributed_config=config,
            ),
            AdamW(others, lr=3e-3),
        ]

    def training_step(self, tokens, index):
        loss = self.model(tokens)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    # One for each epoch, and a link to the last one.
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, save_last="link")
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=2,
        max_epochs=3,
        logger=False,
        callbacks=[checkpoints],
    )
    data = torch.utils.data.DataLoader(torch.randint(64, (8, 16)), batch_size=4)
    trainer.fit(Module(), data, ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
