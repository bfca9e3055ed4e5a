"""Warnings about probable mistakes: each once for an engine, on the first rank of a group."""

import warnings
from collections.abc import Sequence

from .layouts.layout import Layout
from .process_groups import listed
from .runtime.params import ParamInputs


# Steps in a row, at any time of training.
STEPS_WITHOUT_ANY = 3
STEPS_WITHOUT_ONE = 20

_CAUSES = (
    "The model may have other parameters now: if it was sharded (fully_shard, parallelize_module, Fabric.setup) or a weight was "
    "replaced (load_state_dict(assign=True)) after this Muon was built, build Muon from the new ones. If FSDP2 had unsharded the "
    "model at that time, as a forward without a backward leaves it, call model.reshard() and build Muon again"
)


class Hints:
    """Looks for parameters without gradients, step by step."""

    def __init__(self, layouts: Sequence[Layout], rank: int) -> None:
        self.steps = 0
        # Parameters that this rank speaks for. A rank with an empty shard may have no gradient, and neither may
        # an expert that no token was routed to.
        self._watched = {
            layout.key.index: layout.describe()
            for layout in layouts
            if layout.key.expert is None
            and not layout.shards.is_empty(rank)
            and rank == (layout.holders[0] if len(layout.holders) > 1 else 0)
        }
        # Of those that had no gradient in the last step: how many steps in a row.
        self._steps_without: dict[int, int] = {}
        self._steps_without_any = 0

    def look(self, inputs: Sequence[ParamInputs | None]) -> None:
        """Looks at the gradients of one step. There are no ``inputs`` of a frozen parameter."""
        self.steps += 1
        missing = []
        for index in self._watched:
            of_param = inputs[index]
            if of_param is not None and of_param.user_gradient is None:
                missing.append(index)
        if not missing:
            self._steps_without, self._steps_without_any = {}, 0
            return
        counts = {index: self._steps_without.get(index, 0) + 1 for index in missing}
        self._steps_without = counts
        trained = [of_param for of_param in inputs if of_param is not None]
        if all(of_param.user_gradient is None for of_param in trained):
            self._steps_without_any += 1
        else:
            self._steps_without_any = 0
        if self._steps_without_any >= STEPS_WITHOUT_ANY:
            # This names all of them.
            self._watched = {}
            warnings.warn(
                f"no parameter of this Muon has had a gradient in {self._steps_without_any} steps. {_CAUSES}",
                stacklevel=2,
            )
            return
        late = [i for i, steps in counts.items() if steps >= STEPS_WITHOUT_ONE]
        if late:
            names = listed([self._watched.pop(index) for index in late])
            warnings.warn(
                f"these have had no gradient in {STEPS_WITHOUT_ONE} steps; if intended, freeze them with requires_grad_(False): "
                f"{names}. {_CAUSES}",
                stacklevel=2,
            )
