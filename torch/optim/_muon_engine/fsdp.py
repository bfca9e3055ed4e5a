"""What FSDP knows of its parameters: the matrices in FSDP1's flat ones, from their own metadata, and whether FSDP2
shows other tensors than its shards, as it does from a forward or ``unshard()`` to the next reshard.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .params import matrix_shape, not_2d
from .process_groups import listed
from .regions import Region


class FlatTensor(NamedTuple):
    """An original parameter, how ``tp`` had cut it before FSDP did, and which elements this rank stores."""

    name: str
    shape: tuple[int, ...]
    tp: DTensorSpec | None
    # Whether FSDP flattened it row by row, and not in another order of its memory.
    contiguous: bool
    # FSDP's ShardParamInfo. Its indices count the elements in the order of flattening.
    shard: Any

    def regions(self, shape: tuple[int, int], place: int) -> tuple[Region, ...]:
        """The stored part of the ``place``-th matrix of ``shape``: the end of a row, whole rows, the start of one."""
        if not self.shard.in_shard:
            return ()
        (rows, columns), start = shape, self.shard.intra_param_start_idx
        first, offset = place * rows * columns, self.shard.offset_in_shard
        end = min(self.shard.intra_param_end_idx + 1, first + rows * columns)
        at, parts = max(start, first), []
        while at < end:
            row, column = divmod(at - first, columns)
            width = min(columns - column, end - at)
            height = (end - at) // columns if width == columns else 1
            parts.append(Region(row, column, height, width, offset + at - start, width))
            at += height * width
        return tuple(parts)


# A matrix in a flat tensor: the tensor, the matrix's shape, and what this rank stores of it.
FlatMatrix = tuple[FlatTensor, tuple[int, int], tuple[Region, ...]]
# Parameters that FSDP1 manages -> the tensors in them, and by kind ("fsdp" and "ddp") the groups that share
# these; no groups if only the module, which was not given, knows them.
FlatView = tuple[Sequence[FlatTensor], Mapping[str, ProcessGroup]]
Views = dict[Tensor, FlatView]
# The name and unsharded shape of each tensor in a parameter.
Inside = list[tuple[str, tuple[int, ...]]]


def views(module: nn.Module) -> Views:
    """The parameters of ``module`` that FSDP1 manages, with what is in them."""
    by_param: Views = {}
    for name, unit in module.named_modules():
        # A unit whose parameters all went to nested units has none of its own.
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        flat = unit._handle.flat_param
        groups = {"fsdp": unit._handle.process_group}
        if getattr(unit, "_inter_node_pg", None) is not None:
            groups["ddp"] = unit._inter_node_pg
        tensors = tensors_of(flat, clean_tensor_name(f"{name}." if name else ""))
        by_param[flat] = tensors, groups
        for tensor, param in zip(tensors, flat._params or ()):
            # An original parameter is the slice itself, not the unit's storage that it is cut from.
            shard = tensor.shard._replace(offset_in_shard=0)
            by_param[param] = [tensor._replace(shard=shard)], groups
    return by_param


def view_of(
    param: Tensor, described: str, flat_views: Views | None, given: ProcessGroup | None
) -> FlatView | None:
    """The view of ``param``; None if FSDP1 did not flatten it. ``flat_views`` are those of the user's module, and
    ``given`` is the group that the user gave. Raises ValueError if the user must say more.
    """
    if not getattr(param, "_fsdp_flattened", False):
        return None
    if flat_views and param in flat_views:
        return flat_views[param]
    is_flat = getattr(param, "_is_flat_param", False)
    if is_flat and given is not None:
        return tensors_of(param), {}
    which = "an" if flat_views is None else "another"
    group = "fsdp_process_group=model.process_group, or " * is_flat
    raise ValueError(
        f"{described} is of {which} FSDP1 model, which alone knows its shape; give create_auto_config {group}module=model"
    )


def tensors_of(flat: Any, prefix: str = "") -> list[FlatTensor]:
    """The original parameters in a flat one, from its own metadata."""
    names, shapes = (prefix + name for name in flat._fqns), map(tuple, flat._shapes)
    tps, shards = flat._param_extensions, flat._shard_param_infos
    return list(map(FlatTensor, names, shapes, tps, flat._contiguities, shards))


def mixed(described: str, inside: Collection[str]) -> ValueError:
    """The error for a flat parameter of which only a part is for Muon, with a tensor of each kind ``inside``."""
    return ValueError(
        f"{described} is a flat parameter that mixes matrices for Muon with others, or with other splits: {inside}. Wrap with "
        "use_orig_params=True and give create_auto_config module=model, or wrap the others in units of their own"
    )


def matrices_of(
    tensors: Sequence[FlatTensor], described: str, takes_stacks: bool, flatten: bool
) -> Iterator[FlatMatrix]:
    """The matrices in ``tensors``, those of stacks one by one. Raises ValueError for a tensor without any."""
    most_dims = math.inf if takes_stacks or flatten else 2
    others = [t for t in tensors if not 2 <= len(t.shape) <= most_dims]
    if 0 < len(others) < len(tensors):
        raise mixed(described, {f"{len(t.shape)}D": t.name for t in tensors})
    if others:
        names = listed([tensor.name for tensor in others], 4)
        raise not_2d(f"{described}, which is {names} of shape {others[0].shape}")
    for tensor in tensors:
        named = f"{tensor.name!r} of shape {tensor.shape}"
        stacked = () if flatten else tensor.shape[:-2]
        if stacked and tensor.tp is not None:
            raise ValueError(f"{named} is a stack that TP cut, too; use fully_shard")
        if not tensor.contiguous:
            raise ValueError(f"{named} is not contiguous; make it so before wrapping")
        shape = matrix_shape(tensor.shape, flatten)
        for number in range(math.prod(stacked)):
            yield tensor, shape, tensor.regions(shape, number)


def logical_matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Inside]]:
    """The name of each parameter of ``module``, the parameter, and what is in it."""
    flat_views = views(module)
    for name, param in module.named_parameters():
        name = clean_tensor_name(name)
        inside: Inside = [(name, tuple(param.shape))]
        if param in flat_views:
            tensors, _ = flat_views[param]
            inside = [(tensor.name, tensor.shape) for tensor in tensors]
        yield name, param, inside


def check_resharded(module: nn.Module) -> None:
    """Raises ValueError if FSDP2 shows other tensors than its shards in ``module``."""
    units: list[str] = []
    for name, unit in module.named_modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            # In torch 2.11, a module has one group of parameters.
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group]
            if not all(group is None or group.is_sharded for group in groups):
                units.append(name)
    if units:
        raise ValueError(
            f"FSDP2 has unsharded {units} ('' is the model), as a forward without a backward leaves them. No optimizer can train "
            "these tensors: call reshard() of each first"
        )
