"""The implementations that are compared, on the same parameters and gradients."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import _newton_schulz as ns, AdamW, Muon, Optimizer
from torch.testing._internal.distributed._muon.common_stock import stock

from . import engine_view
from .layouts import Laid, local_of, Shape


LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95
OPTIONS = {"lr": LR, "weight_decay": WEIGHT_DECAY}
IMPLEMENTATIONS = {
    "ours": "Muon(distributed_config=...); ours-p-a has prefetch_count=p and ns_algorithm=a, ours-p-a-foreach foreach=True, "
    "ours-p-a-fused fused=True",
    "stock": "the Muon that the overlay replaced, on the same parameters",
    "allgather": "bf16 all-gather of each matrix, Newton-Schulz of all on every rank",
    "adamw": "AdamW(foreach=True), on GPUs AdamW(fused=True)",
}


def able(names: Iterable[str], layout: str) -> tuple[str, ...]:
    """The implementations of ``names`` that support ``layout``; stock Muon refuses flat shards."""
    if layout == "fsdp1":
        return tuple(name for name in names if name != "stock")
    return tuple(names)


def make(
    name: str, laid: Laid, ours: Muon | None = None
) -> "Optimizer | AllGatherMuon":
    """The optimizer ``name``. ``ours`` has read the layouts already."""
    if name.startswith("ours"):
        _, prefetch, *rest = name.split("-")
        config = laid.make_config(int(prefetch))
        return Muon(
            laid.params,
            momentum=MOMENTUM,
            distributed_config=config,
            ns_algorithm=rest[0] if rest else "quintic",
            foreach=True if "foreach" in rest else None,
            fused=True if "fused" in rest else None,
            **OPTIONS,
        )
    if name == "stock":
        return stock().Muon(laid.params, momentum=MOMENTUM, **OPTIONS)
    if name == "adamw":
        is_cpu = laid.params[0].device.type == "cpu"
        return AdamW(laid.params, foreach=is_cpu, fused=not is_cpu, **OPTIONS)
    return AllGatherMuon(laid, ours)


class AllGatherMuon:
    """The simplest distributed Muon: every rank gathers and orthogonalizes every matrix.

    It makes elementwise passes over local parts and gathers in bf16, so that only the idea itself is slow.
    """

    def __init__(self, laid: Laid, ours: Muon) -> None:
        regions = engine_view.regions(ours)
        momenta = [torch.zeros_like(local_of(param)) for param in laid.params]
        columns = laid.params, laid.shapes, regions, momenta
        self.matrices = list(zip(*columns, strict=True))

    @torch.no_grad()
    def step(self) -> None:
        coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
        for param, shape, region, momentum in self.matrices:
            local, grad = local_of(param), local_of(param.grad)
            momentum.lerp_(grad, 1 - MOMENTUM)
            ahead = grad.lerp(momentum, MOMENTUM)
            whole = _whole(param, shape, ahead.bfloat16())
            update = ns.newton_schulz(whole, coefficients, ns.DEFAULT_NS_STEPS, ns.EPS)
            rows, columns = shape
            scale = max(1, rows / columns) ** 0.5
            local.mul_(1 - LR * WEIGHT_DECAY)
            rectangle = local.view(region.height, region.width)
            rectangle.add_(region.of_matrix(update), alpha=-LR * scale)


def _whole(param: Tensor, shape: Shape, part: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        mesh, placements = param.device_mesh, param.placements
        distributed = DTensor.from_local(part, mesh, placements, run_check=False)
        return distributed.full_tensor()
    if part.shape == shape:
        return part
    whole = part.new_empty(shape)
    parts = whole.view(-1).chunk(dist.get_world_size())
    dist.all_gather(list(parts), part)
    return whole
