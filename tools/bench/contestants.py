"""The implementations that are compared, all on the same parameters and gradients."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon, _newton_schulz as ns, AdamW, Muon

from .catalog import prefetch_of
from .stock import stock_path


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from .layouts import Held


LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95


def make_ours(
    held: Sequence[Held], prefetch: int, all_owners_at_once: bool = True
) -> Muon:
    config = held[0].make_config(prefetch)
    config.async_gpu_parallelism = all_owners_at_once
    return Muon(
        [h.param for h in held],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        distributed_config=config,
    )


def make_stock(held: Sequence[Held]) -> torch.optim.Optimizer:
    # Under a name of its own beside ours; the package is torch.optim's for its relative imports.
    spec = importlib.util.spec_from_file_location(
        "torch.optim._stock_muon", stock_path()
    )
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    return stock.Muon(
        [h.param for h in held], lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM
    )


def make_adamw(held: Sequence[Held]) -> AdamW:
    return AdamW(
        [h.param for h in held], lr=LR, weight_decay=WEIGHT_DECAY, foreach=True
    )


def make_muon_fsdp2(held: Sequence[Held]) -> torch.optim.Optimizer:
    import muon_fsdp2

    # Its step leaves updates where gradients were.
    params = [nn.Parameter(h.param.detach().clone()) for h in held]
    for param, h in zip(params, held, strict=True):
        param.grad = h.param.grad.clone()
    group = {"params": params, "use_muon": True, "rms_scale": False}
    group |= {"lr": LR, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM}
    return muon_fsdp2.Muon([group])


class AllGatherMuon:
    """What one writes first: everybody gets every matrix whole, and orthogonalizes all of them.

    Elementwise passes are on the local parts and what travels is bf16, so that nothing but the idea
    itself is slow.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self.momentum = [torch.zeros_like(h.local) for h in held]

    @torch.no_grad()
    def step(self) -> None:
        for h, momentum in zip(self.held, self.momentum, strict=True):
            local = h.local
            momentum.lerp_(h.local_grad, 1 - MOMENTUM)
            whole = _whole(h, h.local_grad.lerp(momentum, MOMENTUM).bfloat16())
            triple = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
            update = ns.orthogonalize(whole, triple, ns.DEFAULT_NS_STEPS, ns.EPS)
            local.mul_(1 - LR * WEIGHT_DECAY)
            local.add_(
                update[h.rows, h.columns],
                alpha=-_muon._adjust_lr(LR, None, h.shape),
            )


def _whole(held: Held, part: Tensor) -> Tensor:
    param = held.param
    if isinstance(param, DTensor):
        return DTensor.from_local(
            part,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        ).full_tensor()
    if part.shape == held.shape:
        return part
    whole = part.new_empty(held.shape)
    dist.all_gather(list(whole.chunk(dist.get_world_size())), part)
    return whole


def make_step(name: str, held: Sequence[Held]) -> tuple[Callable[[], object], object]:
    """One step of implementation ``name`` as a function, and the optimizer behind it."""
    if name.startswith("ours-"):
        optimizer = make_ours(held, prefetch_of(name))
    else:
        make = {
            "stock": make_stock,
            "allgather": AllGatherMuon,
            "muon_fsdp2": make_muon_fsdp2,
            "adamw": make_adamw,
        }
        optimizer = make[name](held)
    return optimizer.step, optimizer
