"""Newton-Schulz of a divided matrix, by all of its owners together."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._newton_schulz import NS_DTYPE, Products
from ..._newton_schulz_kernels import takes_gram
from ..._newton_schulz_variants import products_for
from ..process_groups import group_ranks, OWN_ERRORS, Ranks
from ..schedule.schedule import Schedule
from .matrices import LocalMatrix
from .transport import collective_error


# A Gram matrix is the float32 sum of at least this many products in the matrix's dtype. With fewer, their
# rounding would add a tenth to the distance from the exact polynomial.
_PARTS = 4


class DividedProducts(Products):
    """The products of a matrix whose long side is cut into a block for each rank of ``group``. All ranks of the
    group have the same Gram matrix, and each makes some rows of a polynomial of it.
    """

    def __init__(
        self,
        matrix: LocalMatrix,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._matrix, self._group, self._device = matrix, group, device
        self._ns_algorithm = "quintic"
        self.shape = matrix.layout.block_of
        self._ranks = group_ranks(group)
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)

    def for_algorithm(self, ns_algorithm: str) -> "DividedProducts":  # type: ignore[override]
        """The products that this algorithm takes."""
        products = copy.copy(self)
        products._ns_algorithm = ns_algorithm
        return products

    def norm(self, x: Tensor) -> Tensor:
        total = torch.linalg.vector_norm(x, dtype=torch.float32).square()
        self._run(dist.all_reduce, total)
        return total.sqrt().to(x.dtype)

    def gram(self, x: Tensor, transposed: Tensor) -> Tensor:
        """The Gram matrix, of shape (short, short), of the whole matrix with a block ``x`` of (short, n) and its
        ``transposed``.
        """
        total = self._gram_of_block(x, transposed)
        self._run(dist.all_reduce, total)
        return total.to(x.dtype)

    def _gram_of_block(self, x: Tensor, transposed: Tensor) -> Tensor:
        """In float32."""
        if takes_gram(x, self._ns_algorithm):
            from ..._muon_kernels import symmetric_product

            with torch.cuda.device_of(x):
                return symmetric_product(x, x, dtype=torch.float32)
        products = products_for(x, "quintic")
        count = -(-_PARTS // self._count)
        parts = zip(x.chunk(count, dim=1), transposed.chunk(count, dim=0))
        total = products.gram(*next(parts)).float()
        for part in parts:
            total += products.gram(*part)
        return total

    def combine(self, base, left, right, *, beta, alpha=1) -> Tensor:
        """``beta * base + alpha * left @ right``, all of shape (short, short): some rows on each rank."""
        rows = len(left)
        height = -(-rows // self._count)
        start = min(rows, height * self._rank)
        own = slice(start, min(rows, start + height))
        # Some ranks have fewer rows, and send zeros.
        block = left.new_zeros(height, rows)
        out = block[: own.stop - start]
        torch.addmm(base[own], left[own], right, beta=beta, alpha=alpha, out=out)
        return self._all_gather(block)[:rows]

    def _all_gather(self, rows: Tensor) -> Tensor:
        """The equally many ``rows`` of each rank, one below the other."""
        gathered = rows.new_empty(len(rows) * self._count, *rows.shape[1:])
        # Later versions have another name for it, and warn of the former one.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._run(all_gather, gathered, rows)
        return gathered

    def _run(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        """Runs a collective of the owners. Other errors of Newton-Schulz are this rank's own."""
        try:
            collective(*tensors, group=self._group)
        except OWN_ERRORS:
            raise
        except RuntimeError as error:
            failed = "Newton-Schulz", [self._matrix], self._ranks
            raise collective_error(*failed, error) from error

    def connect(self) -> None:
        """Runs each collective in its size, by which NCCL chooses an algorithm, and connects for it."""
        x = torch.zeros(min(self._matrix.layout.full_shape), 1, device=self._device)
        x = x.to(NS_DTYPE)
        gram = self.gram(x, x.mT)
        self.combine(gram, gram, gram, beta=1)
        self.norm(x)


def attach_products(
    matrices: Iterable[LocalMatrix],
    schedule: Schedule,
    groups: Mapping[Ranks, ProcessGroup | None],
    rank: int,
    device: torch.device,
) -> None:
    """Gives this rank's blocks of divided matrices the products that it computes with their other owners."""
    for matrix in matrices:
        team = groups.get(schedule.team(matrix.index))
        if team is not None and matrix.owner == rank:
            matrix.team_products = DividedProducts(matrix, team, device)
