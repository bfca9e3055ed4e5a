"""Lightning's ModelParallelStrategy: FSDP2 is applied in ``configure_model``, before the optimizers.

    torchrun --nproc-per-node 2 examples/frameworks/lightning_fsdp2.py FOLDER

Started again, it goes on from its last checkpoint in FOLDER.

With ``parallelize_module`` over ``self.device_mesh["tensor_parallel"]`` before ``fully_shard`` it is
FSDP2 x TP; nothing else changes.
"""

import sys
from pathlib import Path

import lightning
import torch
from installed_muon import Muon, partition_named_parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny import Encoder
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = Encoder()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self):
        matrices, others = partition_named_parameters(self)
        return [
            Muon(
                matrices,
                lr=3e-3,
                adjust_lr_fn="match_rms_adamw",
                distributed_config="auto",
            ),
            AdamW(others, lr=3e-3),
        ]

    def training_step(self, tokens, index):
        loss = self.model(tokens)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    # One for each epoch, and a link to the last one.
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, save_last="link")
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        max_epochs=3,
        logger=False,
        callbacks=[checkpoints],
    )
    data = torch.utils.data.DataLoader(torch.randint(64, (8, 16)), batch_size=4)
    trainer.fit(Module(), data, ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
