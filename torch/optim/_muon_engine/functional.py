"""The functional form of Muon: an engine for one step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .config import DistributedConfig
from .engine import Engine
from .layouts.fitting import fits
from .runtime.params import Param


def step_once(
    config: DistributedConfig,
    formulas: Any,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    bufs: Sequence[Tensor],
) -> None:
    """One step of the functional form, with an engine for this call."""
    live = [Param(i, p, None, 0, formulas) for i, p in enumerate(params)]
    for i, (param, buf) in enumerate(zip(live, bufs, strict=True)):
        # A step would replace a buffer that does not fit, and the caller would not see its new values.
        if not fits(param.tensor, buf, param.grad_dtype):
            raise ValueError(
                f"muon_momentum_bufs[{i}] must have the type, placement, device and grad_dtype of its parameter"
            )
    new = ({"momentum_buffer": buf} for buf in bufs)
    states: dict[Tensor, Any] = dict(zip(params, new, strict=True))
    takes_stacks = any(p.ndim > 2 for p in params)
    engine = Engine(config, live, states, takes_stacks, is_lasting=False)
    engine.step([formulas], states, grads)
    engine.synchronize()
