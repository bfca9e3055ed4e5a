"""Each layout under distributed_muon, on four processes, against stock Muon on one."""

import torch
from distributed_muon import create_auto_config, Muon
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, parallel, Replicate


SIDES = {
    "a": parallel.ColwiseParallel(output_layouts=Replicate()),
    "b": parallel.RowwiseParallel(input_layouts=Replicate()),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(12, 20, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x)], -1)


def backward(model, step):
    """Gradients are sums of small integers, which every order of addition gives exactly."""
    x = torch.arange(60.0).view(5, 12) % (5 + step) - 2
    (model(x) * (torch.arange(28) % 3 - 1)).sum().backward()


def train(model, muon):
    assert isinstance(muon, torch.optim.Optimizer)
    for step in range(3):
        backward(model, step)
        muon.step(), muon.zero_grad()


def check(name, model, expected):
    for a, b in zip(model.parameters(), expected, strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        assert torch.equal(a, b), name
    if dist.get_rank() == 0:
        print(name)


def from_file(optimizer, saved):
    path = f"{dist.get_rank()}.pt"
    torch.save(saved.state_dict(), path)
    optimizer.load_state_dict(torch.load(path))
    return optimizer


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD
line = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
alone = Model()
stock = torch.optim.Muon(alone.parameters(), lr=0.1)
train(alone, stock)
expected = [p.detach().clone() for p in alone.parameters()]

for name, place in {
    "FSDP2": lambda model: fully_shard(model, mesh=line),
    "HSDP": lambda model: fully_shard(model, mesh=grid),
    "TP": lambda model: parallel.parallelize_module(model, line, SIDES),
}.items():
    model = place(Model())
    train(model, Muon(model.parameters(), lr=0.1, distributed_config="auto"))
    check(name, model, expected)

model = FSDP(Model(), use_orig_params=True, device_id=torch.device("cpu"))
config = create_auto_config(fsdp_process_group=model.process_group, module=model)
train(model, Muon(model.parameters(), lr=0.1, distributed_config=config))
with FSDP.summon_full_params(model):
    check("FSDP1", model, expected)

model, shards = Model(), Model()
for layer in shards.children():
    layer.weight = nn.Parameter(layer.weight.detach().chunk(4)[rank].clone())
config = create_auto_config(tp_process_group=world, tp_dim_per_param=0)
muon = Muon(shards.parameters(), lr=0.1, distributed_config=config)
for step in range(3):
    model.zero_grad(), backward(model, step)
    for p, full in zip(shards.parameters(), model.parameters(), strict=True):
        p.grad = full.grad.chunk(4)[rank].clone()
    muon.step()
check("shards", shards, [p.chunk(4)[rank] for p in expected])

model = nn.parallel.DistributedDataParallel(Model())
config = create_auto_config(ddp_process_group=model.process_group)
muon = Muon(model.parameters(), lr=0.1, distributed_config=config)
train(model, muon)
check("DDP", model, expected)
# Each goes on from the other's file, with the learning rate in it.
train(alone, from_file(torch.optim.Muon(alone.parameters()), muon))
muon = Muon(model.parameters(), distributed_config=config)
train(model, from_file(muon, stock))
assert not torch.equal(alone.a.weight, expected[0])
check("checkpoints", model, alone.parameters())
