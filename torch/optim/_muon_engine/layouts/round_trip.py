"""The whole tensor of a parameter, put together on every caller, and this rank's piece of it: for functions that users
call or wrap. It is correct and simple, not fast.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..agreement import all_gather_uneven
from ..process_groups import spanning_group
from . import dtensor
from .fitting import cut_out
from .layout import Key
from .local import is_sum, local_part, summed
from .reader import Reader


def shape_of(reader: Reader, index: int) -> torch.Size:
    """The shape of the tensor that :meth:`whole` returns for parameter ``index``."""
    layouts, like = reader.by_param[index]
    rows, columns = layouts[0].shape
    _, flatten = reader.info(index).form
    outer, inner = ((), like.shape[2:]) if flatten else (like.shape[:-2], ())
    return torch.Size((*outer, rows, columns // math.prod(inner), *inner))


def whole(reader: Reader, tensor: Tensor, index: int, in_step: bool) -> Tensor:
    """The full tensor of parameter ``index``, of which ``tensor`` is this rank's piece."""
    reader.check_tp_dim(tensor, index)
    layouts, like = reader.by_param.get(index, ([], tensor))
    given = tensor
    if isinstance(tensor, DTensor) and is_sum(tensor):
        tensor = summed(tensor)
    _, flatten = reader.info(index).form
    # Outside of a step, shapes may have changed. A copy of FSDP1's flat piece cannot tell its shape.
    is_copy = tensor.ndim == 1 and not hasattr(tensor, "_fsdp_flattened")
    is_as_read = layouts and (in_step or is_copy)
    if isinstance(tensor, DTensor):
        layouts = reader.dtensors.of(Key(index), tensor, flatten, for_whole_mesh=True)
    elif not is_as_read or (len(layouts) == 1 and like.shape != tensor.shape):
        layouts = reader.layouts_of(tensor, index)
    if len(layouts) > 1 and tensor.ndim < 3:
        raise ValueError(
            f"parameter {index} holds {len(layouts)} matrices, but gather_fn returns one: wrap each in an FSDP unit of its own"
        )
    # A step's own piece is like the parameter, and as large. It must not outlive the step.
    if not (in_step and tensor.shape == like.shape):
        reader.by_param[index] = layouts, given
    piece, shape = local_part(tensor), shape_of(reader, index)
    # The ranks of a mesh may have different matrices of a stack.
    mesh = getattr(tensor, "device_mesh", None)
    ranks = dtensor.mesh_ranks(mesh) if mesh else layouts[0].holders
    if len(ranks) == 1:
        return piece if piece.shape == shape else piece.reshape(shape)
    # The engine's group, if it has read this parameter.
    sharing = reader.sharing or reader.dtensors.sharing([tensor], [0] * flatten)
    group = spanning_group(ranks, sharing.get(ranks, reader.shared.values()))
    # Backends of accelerators do not take an offloaded piece.
    sent = piece.reshape(-1).to(dtensor.device_of([tensor], [group]))
    flat = [other.to(piece.device) for other in all_gather_uneven(sent, group)]
    pieces = dict(zip(ranks, flat, strict=True))
    # DTensor.full_tensor() is wrong on meshes whose ranks are not in ascending order.
    full = piece.new_zeros(shape)
    for layout in layouts:
        for rank, *_ in layout.shards.replica_sets:
            for region in layout.shards.of(rank):
                matrix = full.view(-1, *layout.shape)[layout.key.sub]
                region.of_matrix(matrix).copy_(region.of_local(pieces[rank]))
    return full


def piece(reader: Reader, full: Tensor, index: int) -> Tensor:
    """This rank's piece of the tensor ``full``, cut without communication."""
    layouts, like = reader.by_param.get(index, ([], full))
    if not layouts and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"redistribute_fn does not know which piece of parameter {index} is this rank's: call gather_fn before"
        )
    if layouts and full.shape != shape_of(reader, index):
        raise ValueError(
            f"redistribute_fn takes the whole parameter {index} of shape {tuple(shape_of(reader, index))}, not {tuple(full.shape)}"
        )
    if not isinstance(like, DTensor):
        if not layouts or len(layouts[0].holders) == 1:
            return full if full.shape == like.shape else full.reshape(like.shape)
    return cut_out(layouts, full, like)
