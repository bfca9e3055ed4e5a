"""Muon on one process, and that several use the same implementation."""

import torch
import torch.distributed as dist
from models import batches, MLP, Transformer
from one_process import same_bits
from place import device
from runner import check, recipe
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim._muon import (
    _single_tensor_muon,
    _zeropower_via_newtonschulz,
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    muon,
)
from torch.optim.muon import create_dtensor_config


@torch.no_grad()
def muon_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    lr: float,
    beta: float,
    ns_steps: int,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """The algorithm. Nothing in it but the orthogonalization needs a matrix to be whole."""
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    for param, grad, momentum_buffer in zip(params, grads, momentum_buffers):
        # An average, and in place: the buffer has to outlive the step.
        momentum_buffer.lerp_(grad, 1 - beta)
        mixed = grad.lerp(momentum_buffer, beta) if nesterov else momentum_buffer
        update = _zeropower_via_newtonschulz(mixed, coefficients, ns_steps, EPS)
        rows, columns = param.shape
        param.mul_(1 - lr * weight_decay)
        param.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


@recipe(processes=1)
def update_rule() -> str:
    """Muon's update, written out. It has to see the whole matrix."""
    model, by_hand = MLP().to(device()), MLP().to(device())
    options = {"weight_decay": 0.0, "nesterov": False}
    optimizer = Muon(model.parameters(), lr=0.01, momentum=0.95, ns_steps=5, **options)
    params = list(by_hand.parameters())
    momentum_buffers = [torch.zeros_like(p) for p in params]

    for inputs, targets in batches():
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        muon_step(params, grads, momentum_buffers, lr=0.01, beta=0.95, ns_steps=5)
        for p, q in zip(model.parameters(), params):
            check(same_bits(p.detach(), q.detach()), "Muon does otherwise")

    whole, *_ = momentum_buffers
    arguments = ((DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, EPS)
    halves = [_zeropower_via_newtonschulz(h, *arguments) for h in whole.chunk(2)]
    right = _zeropower_via_newtonschulz(whole, *arguments)
    apart = ((torch.cat(halves) - right).norm() / right.norm()).item()
    check(apart > 0.1, f"halves orthogonalized by themselves are {apart:.2g} off")
    return f"bitwise the rule written out; by halves it would be {apart:.0%} off"


@recipe(processes=1)
def baseline() -> str:
    """One process, no config."""
    model, by_hand = Transformer().to(device()), Transformer().to(device())
    params = list(by_hand.parameters())
    momentum_buffers = [torch.zeros_like(p) for p in params]

    optimizer = Muon(model.parameters(), lr=1e-3, momentum=0.95)
    for epoch in range(2):
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()

            grads = [p.grad for p in model.parameters()]
            muon_step(params, grads, momentum_buffers, 1e-3, 0.95, 5, 0.1, True)
            for p, q in zip(model.parameters(), params):
                check(same_bits(p.detach(), q.detach()), "Muon does otherwise")
    return f"{len(params)} matrices bitwise those of the rule written out"


@recipe(processes=4)
def unified() -> str:
    """One functional form serves one process and many; only the config tells them apart."""
    options = {
        **dict(lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, eps=EPS),
        **dict(ns_steps=5, ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C)),
        **dict(adjust_lr_fn=None, has_complex=False),
    }
    model, one = fully_shard(MLP().to(device())), MLP().to(device())
    config = create_dtensor_config()
    shards, wholes = list(model.parameters()), list(one.parameters())
    shard_buffers, whole_buffers = (
        [torch.zeros_like(p.detach()) for p in params] for params in (shards, wholes)
    )
    for inputs, targets in batches(dist.group.WORLD):
        model.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        grads = [p.grad for p in shards]
        whole_grads = [grad.full_tensor() for grad in grads]
        with torch.no_grad():
            muon(shards, grads, shard_buffers, distributed_config=config, **options)
            _single_tensor_muon(wholes, whole_grads, whole_buffers, **options)
        for pairs in (zip(shards, wholes), zip(shard_buffers, whole_buffers)):
            for shard, whole in pairs:
                same = same_bits(shard.detach().full_tensor(), whole.detach())
                check(same, "with a config it does otherwise")
    return f"{len(wholes)} matrices bitwise equal, without an optimizer object"
