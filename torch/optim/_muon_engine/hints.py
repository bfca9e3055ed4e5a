"""Warnings about probable mistakes: each once for an engine, on the first rank of a group."""

import warnings
from collections.abc import Sequence

from .layouts import Layout
from .process_groups import listed
from .runtime.params import ParamInputs


STEPS_WITHOUT_ANY = 3
STEPS_WITHOUT_ONE = 20

_NO_GRADIENTS = (
    "no parameter of this Muon has had a gradient. If the model was sharded after this Muon was built (fully_shard, "
    "parallelize_module, Fabric.setup), the model has other parameters now: build Muon from these"
)


class Hints:
    """Looks for parameters without gradients, step by step."""

    def __init__(self, layouts: Sequence[Layout], rank: int) -> None:
        self.steps = 0
        self._trains = False
        # Parameters that this rank speaks for and that had no gradient yet. A rank with an empty shard
        # may have no gradient, and neither may an expert that no token was routed to.
        self._without = {
            layout.key.index: layout.describe()
            for layout in layouts
            if layout.key.expert is None
            and not layout.shards.is_empty(rank)
            and rank == (layout.holders[0] if len(layout.holders) > 1 else 0)
        }

    def look(self, inputs: Sequence[ParamInputs | None]) -> None:
        """Looks at the gradients of one step. There are no ``inputs`` of a frozen parameter."""
        self.steps += 1
        for index, of_param in enumerate(inputs):
            has_gradient = of_param is not None and of_param.user_gradient is not None
            if has_gradient or of_param is None:
                self._without.pop(index, None)
            self._trains = self._trains or has_gradient
        if not self._without:
            return
        text = ""
        if not self._trains and self.steps >= STEPS_WITHOUT_ANY:
            text = _NO_GRADIENTS
        elif self.steps >= STEPS_WITHOUT_ONE:
            names = listed([*self._without.values()])
            text = f"these have had no gradient in {self.steps} steps; if intended, freeze them with requires_grad_(False): {names}"
        if text:
            self._without = {}
            warnings.warn(text, stacklevel=2)
