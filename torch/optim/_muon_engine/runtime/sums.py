"""Matrices that are sums (Partial): their owner adds the contributions."""

from typing import Any

import torch
from torch import Tensor

from .matrices import LocalMatrix
from .params import StepInputs
from .transport import LocalBucket


def add_contributions(
    matrix: LocalMatrix,
    out: Tensor,
    bucket: LocalBucket,
    rank: int,
    inputs: StepInputs,
) -> None:
    """Writes a sum to ``out``, the owner's whole matrix: the contributions that it received in ``bucket`` and its own. It
    adds them in the order of their numbers, whichever ``rank`` is the owner.
    """
    shards, dtype = matrix.layout.shards, matrix.layout.dtype
    contributions: list[tuple[int, Any, Tensor]] = []
    for holder, region, view in bucket.gather_recv.of(matrix.index):
        contributions.append((shards.contribution_of(holder), region, view))
    of_param = inputs.params[matrix.param_index]
    formulas = inputs.formulas[matrix.param_group]
    for region in matrix.sent:
        momentum = region.of_local(of_param.momentum)
        gradient = momentum
        if of_param.gradient is not None:
            gradient = region.of_local(of_param.gradient)
        (blended,) = formulas.blend([momentum], [gradient])
        contributions.append((shards.contribution_of(rank), region, blended))
    total = torch.zeros(matrix.layout.shape, dtype=dtype, device=out.device)
    for _, region, tensor in sorted(contributions, key=lambda entry: entry[0]):
        region.of_matrix(total).add_(tensor.to(total.device))
    out.copy_(total)
