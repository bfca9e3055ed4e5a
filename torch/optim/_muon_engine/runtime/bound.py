"""Lists and views that stay the same between steps: regions that foreach functions take together, and views of packs
and of whole matrices.

Nothing here refers to tensors of parameters, momentum or gradients, because their owner may free or replace them
between steps. A region knows how to find its view in them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..layouts.layout import Region
from .matrices import LocalMatrix
from .params import StepInputs


class Entry(NamedTuple):
    """A region of a parameter on this rank, and the tensor that it is copied to, or updated from. Without an
    update, that is None. The ``matrix`` is the first one of those that have the region.
    """

    matrix: LocalMatrix
    region: Region
    tensor: Any
    # Whether the region is all that this rank stores of the parameter, so that no view is needed.
    is_whole: bool = False


class BlendedRegions(NamedTuple):
    """Regions of one parameter group whose momentum one foreach call blends with the gradients, into ``targets``."""

    param_group: int
    entries: list[Entry]
    targets: list[Tensor]
    # On a CPU, memory for the result of the one entry.
    scratch: Tensor | None = None
    # Whether the gradients come into momentum here, in the same pass, and not before.
    accumulates: bool = False

    def limited_to(self, entries: list[Entry]) -> "BlendedRegions":
        """The same for some of the entries."""
        return self._replace(entries=entries, targets=[e.tensor for e in entries])


class UpdatedRegions(NamedTuple):
    """Regions of one parameter group that one foreach call decays and updates. Their whole matrices have one ``shape``,
    which scales the learning rate. Without ``updates``, they only decay.
    """

    param_group: int
    shape: tuple[int, ...]
    entries: list[Entry]
    updates: list[Tensor] | None

    def limited_to(self, entries: list[Entry]) -> "UpdatedRegions":
        """The same for some of the entries."""
        updates = None
        if self.updates is not None:
            updates = [entry.tensor for entry in entries]
        return self._replace(entries=entries, updates=updates)

    def present(self, inputs: StepInputs) -> "UpdatedRegions":
        """Those whose update this step applies."""
        entries = [entry for entry in self.entries if entry.matrix.applies(inputs)]
        return self.limited_to(entries)


class Preparation(NamedTuple):
    """A part of the work before a gather. A CPU takes one matrix after another, while it is in the cache."""

    matrices: Sequence[LocalMatrix]
    # Parameter group -> the parameters whose gradients come into momentum here.
    accumulated: Mapping[int, Sequence[int]]
    blended: Sequence[BlendedRegions]


class Pair(NamedTuple):
    """A copy of a region of ``matrix``."""

    matrix: LocalMatrix
    target: Tensor
    source: Tensor


class Copies(NamedTuple):
    """Copies that one foreach call makes: from each of ``sources`` to one of ``targets``. There may be none."""

    matrices: list[LocalMatrix]
    targets: list[Tensor]
    sources: list[Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Copies":
        return cls(
            [pair.matrix for pair in pairs],
            [pair.target for pair in pairs],
            [pair.source for pair in pairs],
        )

    def part(self, matrix_indices: Collection[int]) -> "Copies":
        """The copies of some matrices."""
        pairs = map(Pair, self.matrices, self.targets, self.sources)
        return Copies.of(
            [pair for pair in pairs if pair.matrix.index in matrix_indices]
        )


class Batch(NamedTuple):
    """Matrices of one shape with equal options that this rank orthogonalizes together."""

    matrices: Sequence[LocalMatrix]
    # Of shape (matrices, rows, columns): the momenta, and then their updates.
    whole: Tensor
    # This rank's own regions, blended into ``whole``.
    own: Sequence[BlendedRegions]
    # From received packs to ``whole``.
    received: Copies
    # From ``whole`` to the packs of the other holders, and of this rank's relays.
    results: Copies
    # From ``whole`` to this rank's own regions of parameters.
    applied: Sequence[UpdatedRegions]

    def part(self, places: Sequence[int]) -> "Batch":
        """This batch with the work on the matrices at some of its places. ``matrices`` and ``whole`` stay."""
        indices = {self.matrices[place].index for place in places}
        return self._replace(
            own=_parts(self.own, indices),
            received=self.received.part(indices),
            results=self.results.part(indices),
            applied=_parts(self.applied, indices),
        )


def _parts(work: Sequence[Any], matrix_indices: Collection[int]) -> list[Any]:
    """The blended or updated regions of some matrices."""
    parts: list[Any] = []
    for together in work:
        entries = [
            entry for entry in together.entries if entry.matrix.index in matrix_indices
        ]
        if entries:
            parts.append(together.limited_to(entries))
    return parts


class BoundBucket(NamedTuple):
    """Everything that this rank does with a bucket, but for its collectives."""

    preparations: Sequence[Preparation]
    batches: Sequence[Batch]
    # Matrix index -> its packed results, which are zeros if it has no gradient.
    packed_results: Mapping[int, Sequence[Tensor]]
    # From received packs to parameters.
    applied: Sequence[UpdatedRegions]
    # From each relay's pack to parameters.
    relayed: Mapping[Any, Sequence[UpdatedRegions]]
