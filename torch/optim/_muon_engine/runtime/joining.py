"""Regions that follow each other in memory are one: heads of a fused weight, matrices of a stack. Fewer and larger
copies are faster.
"""

from collections.abc import Sequence

from torch import Tensor

from ..layouts.layout import Region
from .bound import Entry, Pair
from .matrices import LocalMatrix


def joined_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Joins entries whose regions follow each other both in local storage and in the other tensor: heads of a fused
    weight.
    """
    joined: list[Entry] = []
    for entry in entries:
        both = _joined_entry(joined[-1], entry) if joined else None
        if both is None:
            joined.append(entry)
        else:
            joined[-1] = both
    return joined


def _joined_entry(first: Entry, second: Entry) -> Entry | None:
    """One entry for two, if a step takes both or neither, and if it scales their updates alike."""
    shapes = first.matrix.layout.shape, second.matrix.layout.shape
    if shapes[0] != shapes[1] or not _have_one_gradient(first.matrix, second.matrix):
        return None
    region = _below(first.region, second.region)
    if region is None:
        return None
    if first.tensor is None and second.tensor is None:
        return Entry(first.matrix, region, None)
    # One that has an update and one that has none stay apart.
    if first.tensor is None or second.tensor is None:
        return None
    tensor = _one_below_another(first.tensor, second.tensor)
    return None if tensor is None else Entry(first.matrix, region, tensor)


def joined_pairs(pairs: Sequence[tuple[int, Pair]]) -> list[Pair]:
    """``pairs``, each with a rank, of which those of one rank whose tensors follow each other are one."""
    joined: list[Pair] = []
    for _, pair in sorted(pairs, key=lambda of_rank: of_rank[0]):
        last = joined[-1] if joined else None
        if last is not None and _have_one_gradient(last.matrix, pair.matrix):
            target = _one_below_another(last.target, pair.target)
            source = _one_below_another(last.source, pair.source)
            if target is not None and source is not None:
                joined[-1] = Pair(last.matrix, target, source)
                continue
        joined.append(pair)
    return joined


def _have_one_gradient(first: LocalMatrix, second: LocalMatrix) -> bool:
    """Whether a step takes both or neither."""
    return first.gradient_key == second.gradient_key


def _below(first: Region, second: Region) -> Region | None:
    """One region for two, if the rows of the second one follow those of the first one in local storage."""
    if first.repeat[1] > 1 or second.repeat[1] > 1:
        return None
    is_alike = first.width == second.width and first.stride == second.stride
    if is_alike and second.offset == first.offset + first.height * first.stride:
        return first._replace(height=first.height + second.height)
    return None


def _one_below_another(first: Tensor, second: Tensor) -> Tensor | None:
    """A view of both matrices, if the rows of the second one follow those of the first one in memory."""
    if first.ndim != 2 or second.ndim != 2 or first.stride() != second.stride():
        return None
    if first.shape[1] != second.shape[1]:
        return None
    start, row = first.storage_offset(), first.stride(0)
    is_one_memory = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    if not is_one_memory or second.storage_offset() != start + len(first) * row:
        return None
    shape = len(first) + len(second), first.shape[1]
    return first.as_strided(shape, first.stride(), start)
