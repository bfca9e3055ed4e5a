"""Train a small GPT in pipeline stages, with replicas of each stage.

    torchrun --nproc-per-node 4 examples/train_pipeline.py

The ranks are a grid, pp x dp. Along pp, stages exchange activations and their gradients. Along
dp, ranks hold replicas of a stage. Stages share no matrix, so each stage builds a Muon for its
own matrices and does not know those of other stages.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT
from text import load, sample
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


class Stage(nn.Module):
    """Some blocks of a GPT. The first stage also has the embeddings, the last one the head."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.blocks)
        here = range(stage * count // stages, (stage + 1) * count // stages)
        # Names as in the whole model, so that checkpoints fit any number of stages.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in here})
        self.is_first, self.is_last = stage == 0, stage == stages - 1
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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="windows per replica")
    parser.add_argument("--microbatches", type=int, default=4, help="of each batch")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    shape = (args.stages, dist.get_world_size() // args.stages)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")

    torch.manual_seed(0)  # every rank draws the whole model and keeps its stage
    model = GPT(width=128, layers=4, heads=4, context=64)
    model = Stage(model, pp.rank(), args.stages).to(device)
    stage = PipelineStage(model, pp.rank(), args.stages, device, group=pp)
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=dp)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    adamw = AdamW(others, lr=3e-3)

    text, _ = load()
    for step in range(args.steps):
        seed = step * dp.size() + dp.rank()  # all stages of a replica take one batch
        inputs, targets = (t.to(device) for t in sample(text, args.batch, 64, seed))
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(inputs)
        elif stage.is_last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)
            p.grad /= dp.size()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if losses and dp.rank() == 0 and (step + 1) % 10 == 0:
            loss = torch.stack(losses).mean()
            print(f"step {step + 1}/{args.steps}, loss {loss:.4f}", flush=True)
    muon.synchronize()  # raises if ranks differed in the last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
