"""The configs that factories make: their three functions as users call or wrap them, and what reads their parameters. A
step does not call the functions, unless the user replaced one of those that move data.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .config import DistributedConfig
from .dtensors import Reader
from .params import Matrix, Param
from .plan import assign_owners, Owners
from .process_groups import counters_of, process_rank


# Entries of a config's state: the matrices while an engine calls an ``assign_fn``, the step that calls the
# other functions, and the reader of functions that are called outside of a step.
MATRICES, STEP, READER = "_matrices", "_step", "_reader"


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


def _assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, list[int]]:
    """Gives each parameter to a rank that holds a piece of it. Fills ``state["param_metadata"]``."""
    matrices = state.get(MATRICES)
    if matrices is None:
        # An earlier reader describes other parameters.
        state.pop(READER, None)
        reader = _reader(state)
        matrices = reader.read([Param(i, p) for i, p in enumerate(params)])
        describe_state(reader, state)
    return choose_owners(len(params), matrices)[1]


def _gather(tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
    """The whole tensor of ``state["current_param_idx"]`` (default: 0) on every caller, whoever owns it."""
    from .round_trip import whole

    index = state.get("current_param_idx", 0)
    return whole(_reader(state), tensor, index, in_step=STEP in state)


def _redistribute(tensor: Tensor | None, rank: int, state: dict[str, Any]) -> Tensor:
    """This rank's piece of the whole ``tensor``; in ``step()``, of the owner's."""
    from .round_trip import piece, shape_of

    index, reader = state.get("current_param_idx", 0), _reader(state)
    if tensor is not None:
        reader.check_tp_dim(reader.as_param(tensor, index))
    if STEP in state:
        tensor = state[STEP].broadcast(index, tensor, shape_of(reader, index))
    if tensor is None:
        raise ValueError(
            "redistribute_fn was given None outside of step(), where it receives nothing: pass the full matrix"
        )
    return piece(reader, tensor, index)


_FUNCTIONS = {"assign": _assign, "gather": _gather, "redistribute": _redistribute}


def factory_config(
    state: dict[str, Any],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
) -> DistributedConfig:
    """A config with the factory's functions."""
    state = {"reader": "dtensor", "is_dtensor": True, "param_metadata": {}, **state}
    return DistributedConfig(
        _assign, _gather, _redistribute, state, async_gpu_parallelism, prefetch_count
    )


def is_from_factory(config: DistributedConfig, name: str) -> bool:
    """Whether the function ``name`` of ``config`` is the one that a factory made."""
    return getattr(config, f"{name}_fn") is _FUNCTIONS[name]


def users_functions(config: DistributedConfig) -> list[str]:
    """Those of the two functions that move data which are not a factory's."""
    return [n for n in ("gather", "redistribute") if not is_from_factory(config, n)]


def reader_of(config: DistributedConfig, takes_stacks: bool = False) -> Reader | None:
    """A new reader; None if the user wrote the config from scratch, or for another framework."""
    is_elsewhere = "rank" in config.state and not dist.is_initialized()
    if is_elsewhere and len(users_functions(config)) == 2:
        return None
    return _new_reader(config.state, takes_stacks)


def _reader(state: dict[str, Any]) -> Reader:
    reader = state.get(READER) or _new_reader(state)
    if reader is None:
        raise RuntimeError("a factory's functions need the state of their config")
    state[READER] = reader
    return reader


def _new_reader(state: Mapping[str, Any], takes_stacks: bool = False) -> Reader | None:
    """A reader for a factory's ``state``; None for another one."""
    kind = state.get("reader")
    if kind == "process_groups":
        from .groups import GroupsReader

        return GroupsReader(state, takes_stacks)
    return Reader() if kind == "dtensor" else None


def choose_owners(
    param_count: int, matrices: Sequence[Matrix]
) -> tuple[Owners, dict[int, list[int]]]:
    """One owner for each matrix, and the parameter indices of each rank that shares one with this rank."""
    owners = assign_owners(matrices, lambda grid: counters_of(grid).first_owner)
    sharing = {matrix.layout.ranks for matrix in matrices}
    owned: dict[int, list[int]] = {rank: [] for ranks in sharing for rank in ranks}
    # A parameter counts for its first matrix. A rank that holds no matrix of a stack lists it as its own.
    owner_of: dict[int, int] = {}
    for matrix, owner in owners.items():
        owner_of.setdefault(matrix.index, owner)
    for index in range(param_count):
        owned.setdefault(owner_of.get(index, process_rank()), []).append(index)
    return owners, dict(sorted(owned.items()))


def describe_state(reader: Reader, state: dict[str, Any]) -> None:
    """Writes the entries into a config's ``state`` that users are promised."""
    metadata: dict[int, dict[str, Any]] = {}
    for index, param in reader.params.items():
        if isinstance(param.tensor, DTensor):
            mesh, placements = param.tensor.device_mesh, param.tensor.placements
            metadata[index] = {"device_mesh": mesh, "placements": placements}
    state["param_metadata"] = metadata


def either(**spellings: Any) -> Any:
    """The one value that is not None. Raises ValueError if there are two."""
    spelled = {name: value for name, value in spellings.items() if value is not None}
    if len(spelled) > 1:
        raise ValueError(f"{' and '.join(spelled)} are two spellings; pass one of them")
    return next(iter(spelled.values()), None)
