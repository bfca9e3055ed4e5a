"""Newton-Schulz of a divided matrix, by all of its owners together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._newton_schulz import _addmm, Products, products_for


# A Gram matrix is the float32 sum of at least this many products in the matrix's dtype. With fewer, their
# rounding would add a tenth to the distance from the exact polynomial.
_PARTS = 4


class SharedProducts(Products):
    """The products of a matrix whose long side is cut into a block for each rank of ``group``.

    All ranks of the group have the same Gram matrix, and each makes some rows of a polynomial of it.
    """

    def __init__(self, shape: Sequence[int], group: ProcessGroup) -> None:
        super().__init__(shape)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._group = group
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)

    def norm(self, x: Tensor) -> Tensor:
        """The Frobenius norm of the whole matrix, of which ``x`` is this rank's block."""
        total = torch.linalg.vector_norm(x, dtype=torch.float32).square()
        dist.all_reduce(total, group=self._group)
        return total.sqrt().to(x.dtype)

    def gram(self, x: Tensor) -> Tensor:
        """The Gram matrix, of shape (short, short), of the whole matrix with a block ``x`` of (short, n)."""
        products = products_for(x, "quintic")
        first, *others = x.chunk(-(-_PARTS // self._count), dim=1)
        total = products.gram(first).float()
        for part in others:
            total += products.gram(part)
        dist.all_reduce(total, group=self._group)
        return total.to(x.dtype)

    def combine(self, base, left, right, beta, alpha=1) -> Tensor:
        """``beta * base + alpha * left @ right``, all of shape (short, short): some rows on each rank."""
        rows = len(left)
        height = -(-rows // self._count)
        start = min(rows, height * self._rank)
        own = slice(start, min(rows, start + height))
        block = left.new_empty(height, rows)
        out = block[: own.stop - start]
        _addmm(base[own], left[own], right, beta, alpha, out)
        return self._all_gather(block)[:rows]

    def _all_gather(self, rows: Tensor) -> Tensor:
        """The equally many ``rows`` of each rank, one below the other."""
        gathered = rows.new_empty(len(rows) * self._count, *rows.shape[1:])
        # Later versions have another name for it, and warn of the former one.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        all_gather(gathered, rows, group=self._group)
        return gathered

    def connect(self, device: torch.device) -> None:
        """Runs each of the collectives once."""
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self._all_gather(torch.zeros(1, device=device))
