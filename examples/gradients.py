"""What DistributedDataParallel does, where its one process group is not enough."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def average(
    parameters: Iterable[nn.Parameter], group: ProcessGroup, count: int
) -> None:
    """Makes each gradient the sum over ``group``, divided by ``count``; in one all-reduce."""
    grads = [parameter.grad for parameter in parameters]
    flat = parameters_to_vector(grads)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat / count, grads)
