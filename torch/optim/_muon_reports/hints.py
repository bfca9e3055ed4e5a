"""Warnings about probable mistakes: each once for an engine, on the first rank of a group."""

import warnings
from collections.abc import Sequence
from typing import Any

from .._muon_engine.process_groups import listed


# Steps in a row, at any time of training.
STEPS_WITHOUT_ANY = 3
STEPS_WITHOUT_ONE = 20

_CAUSES = (
    "The model may have other parameters now: if it was sharded (fully_shard, parallelize_module, Fabric.setup) or a weight was "
    "replaced (load_state_dict(assign=True)) after this Muon was built, build Muon from the new ones. If FSDP2 had unsharded the "
    "model at that time, as a forward without a backward leaves it, call model.reshard() and build Muon again"
)


class Hints:
    """Looks for parameters without gradients in the steps of ``engine``."""

    def __init__(self, engine: Any) -> None:
        self._trained = sum(not param.frozen for param in engine.params)
        # Parameters that this rank speaks for. A rank with an empty shard may have no gradient, and neither may
        # an expert that no token was routed to.
        self._watched: dict[int, str] = {}
        for layout in engine.schedule.layouts:
            speaker = layout.holders[0] if len(layout.holders) > 1 else 0
            is_expert = layout.key.expert is not None
            if engine.rank == speaker and not is_expert:
                if not layout.shards.is_empty(engine.rank):
                    self._watched[layout.key.index] = layout.describe()
        self._last_step = 0
        # Of those that had no gradient in the last step: how many steps in a row.
        self._steps_without: dict[int, int] = {}
        self._steps_without_any = 0

    def look(self, step: int, without_gradient: Sequence[Any]) -> None:
        """Looks at a step in which some parameters had no gradient. Other steps need no look."""
        if step != self._last_step + 1:
            self._steps_without, self._steps_without_any = {}, 0
        self._last_step = step
        counts: dict[int, int] = {}
        for param in without_gradient:
            index = param.key.index
            if index in self._watched:
                counts[index] = self._steps_without.get(index, 0) + 1
        self._steps_without = counts
        if len(without_gradient) == self._trained and counts:
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
        late = [index for index, steps in counts.items() if steps >= STEPS_WITHOUT_ONE]
        if late:
            names = listed([self._watched.pop(index) for index in late])
            warnings.warn(
                f"these have had no gradient in {STEPS_WITHOUT_ONE} steps; if intended, freeze them with requires_grad_(False): "
                f"{names}. {_CAUSES}",
                stacklevel=2,
            )
