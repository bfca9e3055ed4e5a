"""The configs that factories make: their three functions as users call or wrap them, and what reads their parameters. A
step does not call the functions, unless the user replaced one of those that move data. The functions are correct and
simple, not fast.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .agreement import gathered_along
from .config import DistributedConfig
from .dtensors import matrices_of_dtensor, mesh_ranks, Reader
from .inputs import cut_out
from .params import device_of, local_part, Matrix, Param, summed
from .plan import assign_owners, Owners
from .process_groups import matrix_counts, process_rank, spanning_group


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
    """The whole tensor of ``state["current_param_idx"]`` (default: 0) on every caller, whoever owns it. ``tensor`` is this
    rank's piece.
    """
    index, reader = state.get("current_param_idx", 0), _reader(state)
    param = reader.as_param(tensor, index)
    reader.check_tp_dim(param)
    matrices = reader.by_param.get(index, [])
    is_like = bool(matrices) and matrices[0].param.tensor.shape == tensor.shape
    # Outside of a step, shapes may have changed. A detached piece of FSDP1's does not know its own shape.
    is_detached = tensor.ndim == 1 and not hasattr(tensor, "_fsdp_flattened")
    is_as_read = is_like and (STEP in state or is_detached)
    if param.is_dtensor:
        matrices = matrices_of_dtensor(param, reader.layouts, for_whole_mesh=True)
    elif not is_as_read:
        matrices = reader.matrices_of(param)
    if len(matrices) > 1 and tensor.ndim < 3:
        raise ValueError(
            f"parameter {index} holds {len(matrices)} matrices, but gather_fn returns one: wrap each in an FSDP unit of its own"
        )
    # The piece of a step is as large as its parameter, and must not outlive it.
    if not is_as_read:
        reader.by_param[index] = matrices
    if param.is_sum:
        tensor = summed(tensor)
    piece, shape = local_part(tensor), shape_of(reader, index)
    # The ranks of a mesh may have different matrices of a stack.
    mesh = getattr(tensor, "device_mesh", None)
    ranks = mesh_ranks(mesh) if mesh else matrices[0].layout.ranks
    if len(ranks) == 1:
        return piece.reshape(shape)
    if not reader.candidates:
        # No engine has read this parameter.
        reader.read_meshes([param])
    group = spanning_group(ranks, reader.candidates)
    # Objects travel on the current device, which DDP does not ask its users to set.
    with torch.accelerator.device_index(device_of([tensor], [group]).index):
        # A copy, because pickling a view would send all of its storage.
        pieces = gathered_along([group], piece.flatten().clone().cpu())
    # DTensor.full_tensor() is wrong on meshes whose ranks are not in ascending order.
    full = piece.new_zeros(shape)
    for matrix in matrices:
        first_replicas, *_ = matrix.layout.grid
        for holder, regions in zip(first_replicas, matrix.layout.shards):
            # A matrix without elements has no regions.
            for region in regions:
                target = full.view(-1, *matrix.shape)[matrix.sub]
                region.of_matrix(target).copy_(region.of_local(pieces[holder]))
    return full


def _redistribute(tensor: Tensor | None, rank: int, state: dict[str, Any]) -> Tensor:
    """This rank's piece of the whole ``tensor``. In ``step()``, the owner's ``tensor`` is broadcast first. Outside of it,
    there is no communication.
    """
    index, reader = state.get("current_param_idx", 0), _reader(state)
    if tensor is not None:
        reader.check_tp_dim(reader.as_param(tensor, index))
    if STEP in state:
        tensor = state[STEP].broadcast(index, tensor, shape_of(reader, index))
    if tensor is None:
        raise ValueError(
            "redistribute_fn was given None outside of step(), where it receives nothing: pass the full matrix"
        )
    matrices = reader.by_param.get(index, [])
    if not matrices:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"redistribute_fn does not know which piece of parameter {index} is this rank's: call gather_fn before"
            )
        return tensor
    if tensor.shape != shape_of(reader, index):
        raise ValueError(
            f"redistribute_fn takes the whole parameter {index} of shape {tuple(shape_of(reader, index))}, not {tuple(tensor.shape)}"
        )
    return cut_out(matrices, tensor, matrices[0].param.tensor)


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


def reader_of(config: DistributedConfig, takes_stacks: bool) -> Reader | None:
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
    owners = assign_owners(matrices, matrix_counts())
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


def shape_of(reader: Reader, index: int) -> torch.Size:
    """The shape of what ``gather_fn`` returns for parameter ``index``."""
    matrix = reader.by_param[index][0]
    (rows, columns), shape = matrix.shape, matrix.param.tensor.shape
    outer, inner = shape[:-2], ()
    if matrix.param.flatten:
        outer, inner = (), shape[2:]
    return torch.Size((*outer, rows, columns // math.prod(inner), *inner))
