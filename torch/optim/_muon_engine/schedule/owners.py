"""Which rank orthogonalizes which matrix."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import Layout, Ranks
from ..process_groups import counters_of, larger_first, process_rank


def newton_schulz_flops(shape: Sequence[int], ns_algorithm: str = "quintic") -> int:
    """FLOPs of five iterations on an accelerator. Each iteration of the quintic has two products with the long
    side and one square product. The Gram form has four and fourteen in all. "symmetric" is the quintic there.
    """
    short, long = sorted(shape)
    wide, square = 2 * short * short * long, 2 * short**3
    if ns_algorithm == "gram":
        from ..._newton_schulz_variants import uses_gram

        if uses_gram(shape, ns_algorithm, is_cpu=False):
            return 4 * wide + 14 * square
    return 5 * (2 * wide + square)


def flops_of(layout: Layout) -> int:
    """The work of the owner of a matrix."""
    return newton_schulz_flops(layout.shape)


class Kind(NamedTuple):
    """What matrices have in common that cost their owners the same: a number of FLOPs, and the digest of the shards."""

    flops: int
    digest: str


# Ranks -> the equal matrices of each kind.
Members = Mapping[Ranks, Mapping[Kind, Sequence[int]]]


def assign_owners(
    layouts: Sequence[Layout],
    start: Callable[[Ranks], int] = lambda ranks: 0,
) -> list[int]:
    """One owner for each layout, out of all ranks of its group; the first one for a frozen layout.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive. Ties go
    to the first rank from place ``start`` in the group. Equal matrices of one parameter (heads, experts) go to
    ranks that store all of them, or else in runs. A group counts the work of its ranks in groups that
    contain all of them (dense matrices, for a group that shares experts). It counts no other work, in which
    its ranks differ.
    """
    owners = [layout.holders[0] for layout in layouts]
    members = _members(layouts)
    added: dict[Ranks, Tensor] = {}
    for ranks in larger_first(members):
        before = _load_of_wider_groups(ranks, added)
        group = _Group(layouts, ranks, start(ranks), before.clone())
        kinds = sorted(members[ranks].items(), key=lambda item: -item[0].flops)
        group.assign(dict(kinds), owners)
        added[ranks] = group.load - before
    return owners


def choose_owners(
    params: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[list[int], dict[int, list[int]]]:
    """One owner per layout, and the parameter indices of each rank that shares one with this rank."""
    owners = assign_owners(layouts, lambda ranks: counters_of(ranks).first_owner)
    sharing = {layout.holders for layout in layouts}
    owned: dict[int, list[int]] = {rank: [] for ranks in sharing for rank in ranks}
    # A parameter counts for its first matrix. A rank that holds no matrix of a stack lists it as its own.
    owner_of: dict[int, int] = {}
    for layout, owner in zip(layouts, owners, strict=True):
        owner_of.setdefault(layout.key.index, owner)
    for index in range(len(params)):
        owned.setdefault(owner_of.get(index, process_rank()), []).append(index)
    return owners, dict(sorted(owned.items()))


def _members(layouts: Sequence[Layout]) -> Members:
    members: dict[Ranks, dict[Kind, list[int]]] = {}
    for i, layout in enumerate(layouts):
        if layout.frozen:
            continue
        kind = Kind(flops_of(layout), layout.shards.digest)
        of_ranks = members.setdefault(layout.holders, {})
        of_ranks.setdefault(kind, []).append(i)
    return members


def _load_of_wider_groups(ranks: Ranks, added: Mapping[Ranks, Tensor]) -> Tensor:
    """The FLOPs (row 0) and the elements to receive (row 1) of each of ``ranks`` in groups that contain all of them."""
    load = torch.zeros(2, len(ranks), dtype=torch.int64, device="cpu")
    for wider, work in added.items():
        places = {rank: place for place, rank in enumerate(wider)}
        if places.keys() >= set(ranks):
            load += work[:, [places[rank] for rank in ranks]]
    return load


class _Group:
    """The ranks that share matrices. ``load`` has the FLOPs (row 0) and the elements to receive (row 1) of each, and
    grows with every matrix that gets an owner.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        ranks: Ranks,
        start: int,
        load: Tensor,
    ) -> None:
        self.load = load
        self._layouts = layouts
        self._ranks = ranks
        self._start = start

    def assign(self, members: Mapping[Kind, Sequence[int]], owners: list[int]) -> None:
        """Writes the owners of all ``members``, which are sorted by work, heaviest first."""
        in_runs: set[int] = set()
        dealt: set[int] = set()
        has_parts = self._has_parts(members)
        for kind, matrices in members.items():
            if has_parts and kind.flops not in dealt:
                from .runs import deal_parts

                dealt.add(kind.flops)
                equal: list[int] = []
                for other, its_matrices in members.items():
                    if other.flops == kind.flops:
                        equal += its_matrices
                in_runs.update(
                    deal_parts(
                        self.load,
                        self._ranks,
                        self._layouts,
                        equal,
                        kind.flops,
                        self._start,
                        owners,
                    )
                )
            remaining = [i for i in matrices if i not in in_runs]
            if not remaining:
                continue
            received = self._received(remaining[0])
            while remaining:
                places = self._give(kind.flops, received, len(remaining))
                for i, place in zip(remaining, places.tolist()):
                    owners[i] = self._ranks[place]
                remaining = remaining[len(places) :]

    def _has_parts(self, members: Mapping[Kind, Sequence[int]]) -> bool:
        """Whether a parameter has several matrices: heads, or experts of a stack."""
        of_params: Counter[int] = Counter()
        for matrices in members.values():
            of_params.update(self._layouts[i].key.index for i in matrices)
        return max(of_params.values(), default=0) > 1

    def _received(self, matrix: int) -> Tensor:
        """The elements that each rank would receive as the owner of a matrix."""
        layout = self._layouts[matrix]
        numels = [layout.numel - numel for numel in layout.shards.numels]
        order = torch.tensor(layout.shards.ranks, device="cpu").argsort()
        return torch.tensor(numels, device="cpu")[order]

    def _give(self, flops: int, received: Tensor, most: int) -> Tensor:
        """Gives some of ``most`` equal matrices to the ranks with the least work, and returns the places of these ranks.
        Ranks that receive the fewest elements come first.
        """
        places = torch.arange(len(self._ranks), device="cpu").roll(-self._start)
        busy = self.load[0, places]
        places = places[busy == busy.min()]
        elements = self.load[1, places] + received[places]
        places = places[elements.argsort(stable=True)[:most]]
        self.load[0, places] += flops
        self.load[1, places] += received[places]
        return places
