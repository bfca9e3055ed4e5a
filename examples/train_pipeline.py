"""Train a small GPT in pipeline stages, with replicas of each stage.

    torchrun --nproc-per-node 4 examples/train_pipeline.py

The ranks are a grid, pp x dp. Along pp, stages exchange activations and their gradients. Along
dp, ranks hold replicas of a stage. Stages share no matrix, so each stage builds a Muon for its
own matrices and does not know those of other stages.
"""

import torch
import torch.distributed as dist
from common import average_gradients, batch_of, start, train
from gpt import GPT
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


STAGES, LAYERS = 2, 2


class Stage(nn.Module):
    """Some blocks of a GPT. The first stage also has the embeddings, the last one the head."""

    def __init__(self, model: GPT, stage: int) -> None:
        super().__init__()
        here = range(LAYERS)[stage * LAYERS // STAGES : (stage + 1) * LAYERS // STAGES]
        # Names as in the whole model, so that checkpoints fit any number of stages.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in here})
        self.is_first, self.is_last = stage == 0, stage == STAGES - 1
        if self.is_first:
            self.token, self.position = model.token, model.position
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    device = start()
    shape = (STAGES, dist.get_world_size() // STAGES)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    # Every rank draws the whole model and keeps its stage.
    model = Stage(GPT(64, LAYERS, heads=4, context=64), pp.rank()).to(device)
    stage = PipelineStage(model, pp.rank(), STAGES, device, group=pp)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=dp)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )

    def gradients(step: int) -> Tensor | None:
        # All stages of a replica take one batch.
        inputs, targets = (part.to(device) for part in batch_of(step, dp))
        losses: list[Tensor] = []
        given = (inputs,) if stage.is_first else ()
        schedule.step(*given, target=targets if stage.is_last else None, losses=losses)
        average_gradients(model, dp)
        # The first ranks know no loss.
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dist.all_reduce(mean)
        return mean / dp.size()

    train(gradients, [muon, AdamW(others, lr=3e-3)])


if __name__ == "__main__":
    main()
