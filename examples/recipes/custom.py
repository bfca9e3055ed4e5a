"""Functions of one's own: another framework, another way to share matrices out."""

import io
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import place
import torch
import torch.distributed as dist
from gradients import average
from models import batch, batches, MLP, STEPS, Transformer
from one_process import OneProcess
from place import device
from runner import check, recipe
from torch import nn, Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import create_auto_config, DistributedConfig


@recipe(processes=4)
def functions() -> OneProcess:
    """Three functions for replicas: the owner broadcasts what it has orthogonalized."""

    def assign_fn(params: list[Tensor], state: dict) -> dict[int, list[int]]:
        return {0: [0, 1], 1: [2, 3]}  # the other ranks have no share

    def gather_fn(tensor: Tensor, rank: int, state: dict) -> Tensor:
        return tensor  # whole already

    def redistribute_fn(update: Tensor, rank: int, state: dict) -> Tensor:
        # All ranks come here, for each parameter; ``rank`` is the owner's. Were this to
        # return its argument, the others would apply the zeros that they are to fill.
        dist.broadcast(update, src=rank)
        return update

    config = DistributedConfig(
        assign_fn=assign_fn,
        gather_fn=gather_fn,
        redistribute_fn=redistribute_fn,
        state={"rank": dist.get_rank(), "world_size": dist.get_world_size()},
    )
    model = Transformer(layers=1).to(device())
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer(layers=1).to(device()), model, optimizer)
    for inputs, targets in batches(dist.group.WORLD):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average(model.parameters(), dist.group.WORLD, dist.get_world_size())
        optimizer.step()
    return alone


class Hub:
    """A small framework without torch.distributed: all processes are connected to the first.

    Args:
        address: a file name that they all know.
    """

    PATIENCE = 30  # seconds

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self.rank, self.world_size = rank, world_size
        if rank == 0:
            with Listener(address, backlog=world_size) as listener:
                arrived = [listener.accept() for _ in range(1, world_size)]
            by_rank = {self._receive(peer): peer for peer in arrived}
            self.peers = [by_rank[rank] for rank in range(1, world_size)]
        else:
            self.peers = [self._reach(address)]
            self._send(self.peers[0], rank)

    def _reach(self, address: str) -> Connection:
        until = time.monotonic() + self.PATIENCE
        while True:
            try:
                return Client(address)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @staticmethod
    def _send(peer: Connection, value: Any) -> None:
        packed = io.BytesIO()
        torch.save(value, packed)
        peer.send_bytes(packed.getvalue())

    def _receive(self, peer: Connection) -> Any:
        if not peer.poll(self.PATIENCE):
            raise TimeoutError(f"rank {self.rank} waits for one that says nothing")
        return torch.load(io.BytesIO(peer.recv_bytes()))

    def all_gather(self, value: Any) -> list[Any]:
        """What each process has, by rank."""
        if self.rank:
            self._send(self.peers[0], value)
            return self._receive(self.peers[0])
        values = [value, *(self._receive(peer) for peer in self.peers)]
        for peer in self.peers:
            self._send(peer, values)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.all_gather(tensor)).sum(0)

    def scatter(self, pieces: list[Tensor], src: int) -> Tensor:
        """This process's one of the pieces that ``src`` has."""
        return self.all_gather(pieces if self.rank == src else None)[src][self.rank]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def round_robin(params: list[Tensor], state: dict) -> dict[int, list[int]]:
    count = state["world_size"]
    return {rank: list(range(rank, len(params), count)) for rank in range(count)}


def gather_shards(piece: Tensor, rank: int, state: dict) -> Tensor:
    return torch.cat(state["framework"].all_gather(piece), state["shard_dim"])


def scatter_shards(update: Tensor, rank: int, state: dict) -> Tensor:
    # ``rank`` is the owner's: what the others have here are zeros.
    pieces = [
        piece.clone() for piece in update.chunk(state["world_size"], state["shard_dim"])
    ]
    return state["framework"].scatter(pieces, src=rank)


@recipe(processes=4, connect=False)
def other_framework() -> OneProcess:
    """Weights sharded by a framework of one's own. No process group exists."""
    rank, size, folder = place.here
    framework = Hub(rank, size, str(folder / "hub"))
    config = DistributedConfig(
        assign_fn=round_robin,
        gather_fn=gather_shards,
        redistribute_fn=scatter_shards,
        state={
            "rank": rank,
            "world_size": size,
            "framework": framework,
            "shard_dim": 0,
        },
    )
    model, shards = MLP(), MLP()
    for linear in shards.children():
        linear.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
    optimizer = Muon(shards.parameters(), lr=1e-3, distributed_config=config)

    def join(piece: Tensor) -> Tensor:
        return torch.cat(framework.all_gather(piece))

    alone = OneProcess(MLP(), shards, optimizer, gather=join)
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(size)[rank] for tensor in batch(step))
        model.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for shard, param in zip(shards.parameters(), model.parameters()):
            grad = framework.all_reduce(param.grad) / size
            shard.grad = grad.chunk(size)[rank].clone()
        optimizer.step()
        for shard, param in zip(shards.parameters(), model.parameters()):
            param.data.copy_(join(shard.detach()))
    framework.close()
    check(not dist.is_initialized(), "there is a process group after all")
    return alone


@recipe(processes=4)
def size_aware() -> tuple[OneProcess, str]:
    """An ``assign_fn`` of one's own on a config that the factory has made."""
    model = Transformer().to(device())
    # Before FSDP hides them. The slices that it leaves differ in size between ranks, and
    # all ranks have to come to the same assignment.
    sizes = [p.numel() for p in model.parameters()]
    model = FSDP(model, device_id=device(), use_orig_params=True)

    def assign_by_size(params: list[Tensor], state: dict) -> dict[int, list[int]]:
        assignments: dict[int, list[int]] = {r: [] for r in range(state["world_size"])}
        for index in sorted(range(len(params)), key=lambda i: -sizes[i]):
            least = min(
                assignments, key=lambda r: sum(sizes[i] for i in assignments[r])
            )
            assignments[least].append(index)
        return assignments

    config = create_auto_config(fsdp_process_group=dist.group.WORLD, module=model)
    config.assign_fn = assign_by_size
    config.state["rank"] = dist.get_rank()
    config.state["world_size"] = dist.get_world_size()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=model.process_group)
    for inputs, targets in batches(dist.group.WORLD):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    loads = [sum(sizes[i] for i in owned) for owned in optimizer.assignments.values()]
    check(len(set(loads)) == 1, f"elements of each rank: {loads}")
    return alone, f"{loads[0]} elements for each rank"
