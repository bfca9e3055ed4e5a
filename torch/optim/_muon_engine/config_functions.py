"""The three functions of a factory's config, as users call or wrap them. A step does not call them, unless the user
replaced one of those that move data.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .layouts.reader import describe_state, Reader
from .layouts.readers import is_read_here, new_reader
from .schedule.owners import choose_owners


# Entries of a config's state: the layouts while an engine calls an ``assign_fn``, the step that calls the
# other functions, and the reader of functions that are called outside of a step.
LAYOUTS, STEP, READER = "_layouts", "_step", "_reader"


@contextmanager
def lent(state: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Gives ``state`` the ``entries`` while functions are called: an engine of another world must not find them."""
    before = {key: state[key] for key in entries if key in state}
    state.update(entries)
    try:
        yield
    finally:
        for key in entries:
            state.pop(key, None)
        state.update(before)


def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, list[int]]:
    """Gives each parameter to a rank that holds a piece of it. Fills ``state["param_metadata"]``."""
    layouts = state.get(LAYOUTS)
    if layouts is None:
        # An earlier reader describes other parameters.
        state.pop(READER, None)
        reader = _reader(state)
        layouts = reader.read(params)
        describe_state(reader, state)
    return choose_owners(params, layouts)[1]


def gather(tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
    """The whole tensor of ``state["current_param_idx"]`` (default: 0) on every caller, whoever owns it."""
    from .layouts.round_trip import whole

    index = state.get("current_param_idx", 0)
    return whole(_reader(state), tensor, index, in_step=STEP in state)


def redistribute(tensor: Tensor | None, rank: int, state: dict[str, Any]) -> Tensor:
    """This rank's piece of the whole ``tensor``; in ``step()``, of the owner's."""
    from .layouts.round_trip import piece, shape_of

    index, reader = state.get("current_param_idx", 0), _reader(state)
    if tensor is not None:
        reader.check_tp_dim(tensor, index)
    if STEP in state:
        tensor = state[STEP].broadcast(index, tensor, shape_of(reader, index))
    if tensor is None:
        raise ValueError(
            "redistribute_fn was given None outside of step(), where it receives nothing: pass the full matrix"
        )
    return piece(reader, tensor, index)


def _reader(state: dict[str, Any]) -> Reader:
    if READER not in state:
        if not is_read_here(state):
            raise RuntimeError("a factory's functions need the state of their config")
        state[READER] = new_reader(state)
    return state[READER]
