"""Warnings about what is probably a mistake, each once and on one rank. No step waits for them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.optim._muon_engine.layouts import listed


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim._muon_engine.layouts import Layout
    from torch.optim._muon_engine.runtime import StepParam


# Steps after which nothing, or one parameter, having had a gradient is no accident.
STEPS_WITHOUT_ANY = 3
STEPS_WITHOUT_ONE = 20

_BUILT_TOO_EARLY = (
    "If the model was sharded after this Muon was built (fully_shard, parallelize_module, Fabric.setup), the model has "
    "other parameters now: build Muon from these"
)


class Hints:
    """What one optimizer has seen of its steps so far."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._steps = 0
        self._trains = False
        # Indices of parameters that have not had a gradient yet; None before the first step.
        self._without: set[int] | None = None
        self._said_untrained = False
        self._first: dict[int, Layout] = {}

    def parameters_changed(self) -> None:
        """Indices mean other parameters now."""
        self._steps, self._trains, self._without = 0, False, None
        self._said_untrained = False

    def untrained(self, layouts: Sequence[Layout]) -> list[str]:
        """What this rank can say of parameters that it has seen no gradient of."""
        if not self._steps or not self._without:
            return []
        named = dict.fromkeys(
            layout.describe() for layout in layouts if layout.key.index in self._without
        )
        return [f"no gradient here in {self._steps} steps: {listed([*named])}"]

    def look(
        self,
        params: Sequence[StepParam],
        layouts: Sequence[Layout],
        rank: int,
        world_size: int,
    ) -> None:
        """Looks at the parameters and gradients of a step; ``layouts`` has frozen ones, too."""
        self._steps += 1
        if self._without is None:
            on_mesh = any(isinstance(param.tensor, DTensor) for param in params)
            shared = on_mesh or any(len(layout.group) > 1 for layout in layouts)
            experts = any(layout.key.expert is not None for layout in layouts)
            if layouts and not shared and not experts and world_size > 1 and rank == 0:
                self._say_that_nothing_is_shared(world_size)
            # A rank whose shard is empty may have no gradient, nor an expert that nothing was routed to.
            # Only one rank speaks: of what nobody shares, such as whole tensors, the first of all.
            self._first = {
                layout.key.index: layout
                for layout in layouts
                if params[layout.key.index].tensor.requires_grad
                and not layout.shards.is_empty(rank)
                and layout.key.expert is None
                and self._speaks(rank, params[layout.key.index], layout, shared)
            }
            self._without = set(self._first)
        if not self._without:
            return
        self._without = {i for i in self._without if params[i].grad is None}
        if not self._without or self._said_untrained:
            return
        anything = any(param.grad is not None for param in params)
        self._trains = self._trains or anything
        if not self._trains and self._steps >= STEPS_WITHOUT_ANY:
            self._say(
                f"no parameter of this Muon has had a gradient in its {self._steps} steps, so it trains nothing. "
                f"{_BUILT_TOO_EARLY}"
            )
        elif self._trains and self._steps >= STEPS_WITHOUT_ONE:
            named = [self._first[i].describe() for i in sorted(self._without)]
            self._say(
                f"these have had no gradient in {self._steps} steps, though others have, and are not trained; freeze "
                f"them with requires_grad_(False) if that is meant: {listed(named)}"
            )
        else:
            return
        self._said_untrained = True

    @staticmethod
    def _speaks(rank: int, param: StepParam, layout: Layout, shared: bool) -> bool:
        if isinstance(param.tensor, DTensor):
            coordinate = param.tensor.device_mesh.get_coordinate()
            return coordinate is not None and not any(coordinate)
        return rank == (min(layout.group) if shared else 0)

    def _say_that_nothing_is_shared(self, world_size: int) -> None:
        self._say(
            f"there are {world_size} processes, and none of the parameters of this Muon is shared by any of them: "
            f"each process trains its own. {_BUILT_TOO_EARLY}. Under DDP use "
            "create_auto_config(ddp_process_group=...); give it the groups of another framework that cut plain "
            "tensors. Where each pipeline stage has one process, all is well"
        )

    def _say(self, text: str) -> None:
        # By its beginning: numbers in the text change.
        kind = text[:24]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(text, stacklevel=2)
