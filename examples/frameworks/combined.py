"""Several optimizers as one, for trainers that take only one."""

from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class Combined(Optimizer):
    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([g for each in optimizers for g in each.param_groups], {})
        self._share()

    def _share(self) -> None:
        # The dictionaries themselves, not copies: schedulers write into them, and Accelerate
        # replaces the parameters in them.
        self.param_groups = [g for each in self.optimizers for g in each.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {p: s for each in self.optimizers for p, s in each.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """The optimizers have their own; only ``Optimizer.__init__`` comes here."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = iter(state_dict["param_groups"])
        for each in self.optimizers:
            mine = list(islice(groups, len(each.param_groups)))
            states = {
                index: state_dict["state"][index]
                for group in mine
                for index in group["params"]
                if index in state_dict["state"]
            }
            each.load_state_dict({"state": states, "param_groups": mine})
        self._share()
