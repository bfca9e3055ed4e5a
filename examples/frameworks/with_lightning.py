"""Lightning with DDP, or with FSDP2 by its ModelParallelStrategy. The module steps two optimizers.

    torchrun --nproc-per-node 2 examples/frameworks/with_lightning.py FOLDER [ddp|fsdp2]

Started again, it goes on from its last checkpoint in FOLDER. ``configure_model`` shards, before the
optimizers. With ``parallelize_module`` over ``self.device_mesh["tensor_parallel"]`` before
``fully_shard`` it is FSDP2 x TP; nothing else changes.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny import Encoder, muon_and_adamw
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strategy = strategy
        self.model = Encoder()

    def configure_model(self):
        if self.strategy == "fsdp2":
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self):
        return list(muon_and_adamw(self, self.strategy))

    def training_step(self, tokens, index):
        loss = self.model(tokens)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True)


def main(folder: Path, strategy: str = "fsdp2") -> None:
    torch.manual_seed(0)
    # One for each epoch, and a link to the last one.
    checkpoints = ModelCheckpoint(folder, save_top_k=-1, save_last="link")
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        strategy=sharded if strategy == "fsdp2" else "ddp",
        devices=2,
        max_epochs=3,
        logger=False,
        callbacks=[checkpoints],
    )
    data = torch.utils.data.DataLoader(torch.randint(64, (8, 16)), batch_size=4)
    trainer.fit(Module(strategy), data, ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
