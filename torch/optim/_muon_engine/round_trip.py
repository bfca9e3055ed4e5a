"""The whole tensor of a parameter, put together on every caller, and this rank's piece of it: for functions that users
call or wrap. It is correct and simple, not fast.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import all_gather_uneven
from .dtensors import matrices_of_dtensor, mesh_ranks, Reader
from .fitting import cut_out
from .local import device_of, local_part, summed
from .process_groups import spanning_group


def shape_of(reader: Reader, index: int) -> torch.Size:
    """The shape of the tensor that :meth:`whole` returns for parameter ``index``."""
    matrix = reader.by_param[index][0]
    (rows, columns), shape = matrix.shape, matrix.param.tensor.shape
    outer, inner = shape[:-2], ()
    if matrix.param.flatten:
        outer, inner = (), shape[2:]
    return torch.Size((*outer, rows, columns // math.prod(inner), *inner))


def whole(reader: Reader, tensor: Tensor, index: int, in_step: bool) -> Tensor:
    """The full tensor of parameter ``index``, of which ``tensor`` is this rank's piece."""
    param = reader.as_param(tensor, index)
    reader.check_tp_dim(param)
    matrices = reader.by_param.get(index, [])
    is_like = bool(matrices) and matrices[0].param.tensor.shape == tensor.shape
    # Outside of a step, shapes may have changed. A copy of FSDP1's flat piece cannot tell its shape.
    is_copy = tensor.ndim == 1 and not hasattr(tensor, "_fsdp_flattened")
    is_as_read = bool(matrices) and (in_step or is_copy)
    if param.is_dtensor:
        matrices = matrices_of_dtensor(param, reader.layouts, for_whole_mesh=True)
    elif not is_as_read or (len(matrices) == 1 and not is_like):
        matrices = reader.matrices_of(param)
    if len(matrices) > 1 and tensor.ndim < 3:
        raise ValueError(
            f"parameter {index} holds {len(matrices)} matrices, but gather_fn returns one: wrap each in an FSDP unit of its own"
        )
    # A step's own piece is like the parameter, and as large. It must not outlive the step.
    if not (in_step and is_like):
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
    # Backends of accelerators do not take an offloaded piece.
    sent = piece.reshape(-1).to(device_of([tensor], [group]))
    flat = [other.to(piece.device) for other in all_gather_uneven(sent, group)]
    pieces = dict(zip(ranks, flat, strict=True))
    # DTensor.full_tensor() is wrong on meshes whose ranks are not in ascending order.
    full = piece.new_zeros(shape)
    for matrix in matrices:
        first_replicas, *_ = matrix.layout.grid
        for rank, regions in zip(first_replicas, matrix.layout.shards):
            # A matrix without elements has no regions.
            for region in regions:
                target = full.view(-1, *matrix.shape)[matrix.sub]
                region.of_matrix(target).copy_(region.of_local(pieces[rank]))
    return full


def piece(reader: Reader, full: Tensor, index: int) -> Tensor:
    """This rank's piece of the tensor ``full``, cut without communication."""
    matrices = reader.by_param.get(index, [])
    if not matrices and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"redistribute_fn does not know which piece of parameter {index} is this rank's: call gather_fn before"
        )
    if not matrices:
        return full
    if full.shape != shape_of(reader, index):
        raise ValueError(
            f"redistribute_fn takes the whole parameter {index} of shape {tuple(shape_of(reader, index))}, not {tuple(full.shape)}"
        )
    return cut_out(matrices, full, matrices[0].param.tensor)
