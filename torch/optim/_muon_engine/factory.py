"""The configs that factories make: their three functions, and what reads their parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .config import DistributedConfig
from .layouts.layout import Layout
from .layouts.reader import describe_state, DTensorReader, Reader
from .process_groups import counters_of, process_rank, ranks_per_node
from .schedule.owners import assign_owners


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


def reader_of(config: DistributedConfig, takes_stacks: bool = False) -> Reader | None:
    """A new reader; None if the user wrote the config from scratch, or for another framework."""
    is_elsewhere = "rank" in config.state and not dist.is_initialized()
    moves_nothing = len(own_functions(config)) == 2
    if not _is_factorys(config.state) or (is_elsewhere and moves_nothing):
        return None
    return _new_reader(config.state, takes_stacks)


def _new_reader(state: Mapping[str, Any], takes_stacks: bool = False) -> Reader:
    if state["reader"] == "dtensor":
        return DTensorReader()
    from .layouts.groups import GroupsReader

    return GroupsReader(state, takes_stacks)


def choose_owners(
    params: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[list[int], dict[int, list[int]]]:
    """One owner per layout, and the parameter indices of each rank that shares one with this rank."""
    per_node = ranks_per_node()
    owners = assign_owners(layouts, lambda g: counters_of(g).first_owner, per_node)
    sharing = {layout.holders for layout in layouts}
    owned: dict[int, list[int]] = {rank: [] for ranks in sharing for rank in ranks}
    # A parameter counts for its first matrix. A rank that holds no matrix of a stack lists it as its own.
    owner_of: dict[int, int] = {}
    for layout, owner in zip(layouts, owners, strict=True):
        owner_of.setdefault(layout.key.index, owner)
    for index in range(len(params)):
        owned.setdefault(owner_of.get(index, process_rank()), []).append(index)
    return owners, dict(sorted(owned.items()))


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
    return piece(reader, tensor, index, rank)


_FACTORYS = {"assign": assign, "gather": gather, "redistribute": redistribute}


def factory_config(
    state: dict[str, Any],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    owners_per_matrix: int | str = 1,
    keep_buffers: bool = False,
) -> DistributedConfig:
    """A config with the factory's functions. Raises ValueError if an option is invalid."""
    owners = owners_per_matrix
    if owners != "auto" and (type(owners) is not int or owners < 1):
        raise ValueError(f'owners_per_matrix is {owners!r}, not "auto" or an int >= 1')
    state = {"reader": "dtensor", "is_dtensor": True, "param_metadata": {}, **state}
    state |= {"owners_per_matrix": owners, "keep_buffers": keep_buffers}
    return DistributedConfig(
        assign, gather, redistribute, state, async_gpu_parallelism, prefetch_count
    )


def is_from_factory(config: DistributedConfig, name: str) -> bool:
    """Whether the function ``name`` of ``config`` is the one that a factory made."""
    return getattr(config, f"{name}_fn") is _FACTORYS[name]


def own_functions(config: DistributedConfig) -> list[str]:
    """Those of the two functions that move data which are not a factory's."""
    return [n for n in ("gather", "redistribute") if not is_from_factory(config, n)]


def _is_factorys(state: Mapping[str, Any]) -> bool:
    return state.get("reader") in ("dtensor", "process_groups")


def _reader(state: dict[str, Any]) -> Reader:
    if READER not in state:
        if not _is_factorys(state):
            raise RuntimeError("a factory's functions need the state of their config")
        state[READER] = _new_reader(state)
    return state[READER]
