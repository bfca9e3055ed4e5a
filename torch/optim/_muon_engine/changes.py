"""What an engine does when parameters took the places of others: who inherits whose momentum and index, and how the
ranks meet before they build the engine again.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .agreement import Agreement
from .layouts.reader import Reader
from .process_groups import (
    group_timeout,
    is_dry_run,
    larger_first,
    of_world,
    Ranks,
    short_name,
)
from .runtime.params import Lineage, Param, States
from .store import check_in, default_store, FailureNotes, missing


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


def wait_for_all(ranks: Ranks, timeout: timedelta | None, name: str) -> None:
    """Waits over the store until all of ``ranks`` have come to ``name``. A collective would pair up with
    whichever collective the other ranks start next. A counter in the store pairs up with nothing. A
    RuntimeError names the ranks that did not come within ``timeout``.
    """
    if len(ranks) == 1 or dist.group.WORLD is None or is_dry_run():
        return
    store, me, met = default_store(), dist.get_rank(), of_world("met")
    key = f"muon/met/{short_name(ranks)}/{name}/{met.get((ranks, name), 0)}"
    if check_in(key) == len(ranks):
        store.set(f"{key}/all", "=")
    try:
        store.wait([f"{key}/all"], *([] if timeout is None else [timeout]))
    except RuntimeError as error:
        absent = missing(key, ranks)
        # Otherwise a later rendezvous would count this rank as present.
        store.delete_key(f"{key}/{me}")
        store.add(key, -1)
        raise RuntimeError(
            f"rank {me} found changed parameters in step() and timed out waiting for ranks {absent}, which share "
            "parameters with it, to change them too. All of these ranks must make the change before the same step()"
        ) from error
    met[ranks, name] = met.get((ranks, name), 0) + 1


def meet(
    reader: Reader,
    agreement: Agreement,
    tensors: Sequence[Tensor],
    notes: FailureNotes,
) -> None:
    """Waits in ``step()`` until all ranks that share matrices have found that parameters changed to ``tensors``."""
    groups: dict[Any, Any] = {}
    for ranks in agreement.serials:
        groups[ranks] = [agreement.groups[ranks]]
    groups |= reader.rendezvous_groups(tensors)
    # Ranks that are in the step already find this note after their collective failed.
    notes.leave(
        "it found changed parameters in step(), and waits for the other ranks to change them too"
    )
    for ranks in larger_first(groups):
        timeout = group_timeout(groups[ranks])
        wait_for_all(ranks, timeout, str(agreement.serials.get(ranks)))
    notes.take_back()
