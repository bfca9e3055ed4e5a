"""What an engine does when parameters took the places of others: who inherits whose momentum and index."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .runtime.params import Lineage, Param, States


class Replacement(NamedTuple):
    """A parameter, the one that took its place, and whether this one inherits the momentum."""

    former: Param
    current: Param
    inherits: bool


def take_places(lineage: Lineage, params: Sequence[Param]) -> list[Replacement]:
    """Brings ``lineage`` up to date: parameters take the indices of those whose places they took."""
    replaced = _replaced(lineage.seen, params)
    lineage.seen = params
    for old, new, _ in replaced:
        # A parameter that left may have no index.
        if old.tensor in lineage.config_indices:
            index = lineage.config_indices.pop(old.tensor)
            lineage.config_indices[new.tensor] = index
    return replaced


def _replaced(former: Sequence[Param], now: Sequence[Param]) -> list[Replacement]:
    """Each parameter that took another one's place. It inherits the momentum if the shape and the name are the
    same and nothing else in its group moved. Without names, the type, placement, dtype or device must differ as
    well: a framework has sharded the parameter. Otherwise it is another layer of equal shape, whose momentum
    starts at zero as in stock Muon.
    """
    stayed = {param.tensor for param in former} & {param.tensor for param in now}
    replaced: list[Replacement] = []
    for param_group in dict.fromkeys(param.param_group for param in now):
        before = [param for param in former if param.param_group == param_group]
        after = [param for param in now if param.param_group == param_group]
        moved = 0
        pairs: list[tuple[Param, Param]] = []
        for old, new in zip(before, after):
            if old.tensor is not new.tensor:
                moved += 1
                if old.tensor not in stayed and new.tensor not in stayed:
                    pairs.append((old, new))
        for old, new in pairs:
            inherits = len(pairs) == moved and _is_same(old, new)
            replaced.append(Replacement(old, new, inherits))
    return replaced


def _is_same(old: Param, new: Param) -> bool:
    """Whether a parameter is another form of the one whose place it took."""
    if old.tensor.shape != new.tensor.shape or old.key.name != new.key.name:
        return False
    if new.key.name:
        return True
    # Freezing a parameter does not make it another kind of tensor.
    return old.traits[1:] != new.traits[1:]


def inherit_momentum(replaced: Iterable[Replacement], states: States) -> list[str]:
    """Gives momentum to parameters that replace others. Returns those that get none. The momentum of a parameter
    that left the groups stays with that parameter, too.
    """
    restarted = []
    for old, new, inherits in replaced:
        if "momentum_buffer" in states.get(old.tensor, {}) and new.tensor not in states:
            if inherits:
                states[new.tensor] = dict(states[old.tensor])
            else:
                restarted.append(new.described)
    return restarted


def fit_momentum(params: Sequence[Param], states: States) -> list[str]:
    """Deletes momentum of another shape. Returns the parameters that had it."""
    restarted = []
    for param in params:
        state = states.get(param.tensor, {})
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != param.tensor.shape:
            restarted.append(param.described)
            del state["momentum_buffer"]
    return restarted
