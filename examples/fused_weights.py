"""Parameters that are not simply one matrix: a fused QKV weight, and convolutions.

    torchrun --nproc-per-node 2 examples/fused_weights.py

Muon orthogonalizes whole matrices. Two options of a parameter group say what a matrix is:

- ``split`` gives sizes along dimension 0. Query, key and value are separate matrices.
- ``flatten=True`` makes a weight of three or more dimensions one matrix: dimension 0 by the rest.

Both work under every kind of parallelism. Here it is FSDP2. ``partition_named_parameters`` makes the groups: a
split of the convolution's output channels fits only if the convolution is flattened.
"""

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention
from torch.optim import AdamW, Muon
from torch.optim.muon import partition_named_parameters


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(*heads.chunk(3, dim=1))
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Convolutions cut an image into patches, and attention mixes these."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.patches = nn.Conv2d(width, width, kernel_size=4, stride=4)
        self.attention = Attention(width, heads=4)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(relu(self.stem(images))).flatten(2).transpose(1, 2)
        return self.head(self.attention(patches).mean(1))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)  # the same model on every rank
    width = 32
    model = fully_shard(Model(width).to(device))

    # Muon for convolutions, except the first one, which reads pixels.
    split = {"*.qkv.weight": (width, width, width), "patches.weight": (width,)}
    groups, others = partition_named_parameters(model, split=split)
    scale = "match_rms_adamw"
    muon = Muon(groups, lr=3e-3, adjust_lr_fn=scale, distributed_config="auto")
    adamw = AdamW(others, lr=3e-3)
    if dist.get_rank() == 0:
        print(muon.describe(model, adamw))

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(30):
        # Images whose brightest row is their class.
        labels = torch.randint(10, (32,), generator=generator)
        images = torch.rand(32, 1, 12, 12, generator=generator)
        images[torch.arange(32), 0, labels] += 1
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}, loss {loss:.4f}", flush=True)
    muon.synchronize()  # raises if ranks differed in the last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
