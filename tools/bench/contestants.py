"""The implementations that are compared, on the same parameters and gradients."""

from collections.abc import Iterable

from torch.optim import AdamW, Muon, Optimizer
from torch.testing._internal.distributed._muon.common_stock import stock

from .layouts import Laid


OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
# The Muon that the overlay replaced, and AdamW with foreach or, on GPUs, fused. Both have the same parameters as ours.
OTHERS = "stock", "adamw"


def able(names: Iterable[str], layout: str) -> tuple[str, ...]:
    """The implementations of ``names`` that support ``layout``; stock Muon refuses flat shards."""
    if layout == "fsdp1":
        return tuple(name for name in names if name != "stock")
    return tuple(names)


def make(name: str, laid: Laid) -> Optimizer:
    """The optimizer ``name``. That of ours-a has ns_algorithm=a; ours-a-fused also fused=True."""
    if name == "stock":
        return stock().Muon(laid.params, **OPTIONS)
    if name == "adamw":
        is_cpu = laid.params[0].device.type == "cpu"
        return AdamW(laid.params, foreach=is_cpu, fused=not is_cpu, **OPTIONS)
    _, algorithm, *rest = name.split("-")
    return Muon(
        laid.params,
        distributed_config=laid.config,
        ns_algorithm=algorithm,
        fused=True if "fused" in rest else None,
        **OPTIONS,
    )
