"""Which rank orthogonalizes which matrix."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import Layout, Ranks
from ..process_groups import (
    counters_of,
    larger_first,
    process_rank,
    local_world_size,
)


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
    """The work of one owner of a matrix."""
    return newton_schulz_flops(layout.full_shape) // layout.key.block[1]


class Kind(NamedTuple):
    """What matrices have in common that cost their owners the same: a number of FLOPs, and the shards of each block."""

    flops: int
    digests: tuple[str, ...]


# Ranks -> the equal matrices of each kind. A divided matrix counts for its first block.
Members = Mapping[Ranks, Mapping[Kind, Sequence[int]]]


def assign_owners(
    layouts: Sequence[Layout],
    start: Callable[[Ranks], int] = lambda ranks: 0,
    ranks_per_node: int = 1,
) -> list[int]:
    """One owner for each layout, out of all ranks of its group; the first one for a frozen layout.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive. Ties go
    to the first rank from place ``start`` in the group. Equal matrices of one parameter (heads, experts) go to
    ranks that store all of them, or else in runs. A group counts the work of its ranks in groups that
    contain all of them (dense matrices, for a group that shares experts). It counts no other work, in which
    its ranks differ. The blocks of a matrix, which follow each other, go to neighbours.
    """
    owners = [layout.holders[0] for layout in layouts]
    members = _members(layouts)
    added: dict[Ranks, Tensor] = {}
    for ranks in larger_first(members):
        before = _load_of_wider_groups(ranks, added)
        group = _Group(layouts, ranks, start(ranks), ranks_per_node, before.clone())
        kinds = sorted(members[ranks].items(), key=lambda item: -item[0].flops)
        group.assign(dict(kinds), owners)
        added[ranks] = group.load - before
    return owners


def choose_owners(
    params: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[list[int], dict[int, list[int]]]:
    """One owner per layout, and the parameter indices of each rank that shares one with this rank."""
    per_node = local_world_size()
    owners = assign_owners(layouts, lambda g: counters_of(g).first_owner, per_node)
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
        place, count = layout.key.block
        if place > 0 or layout.frozen:
            continue
        digests = tuple(block.shards.digest for block in layouts[i : i + count])
        of_ranks = members.setdefault(layout.holders, {})
        of_ranks.setdefault(Kind(flops_of(layout), digests), []).append(i)
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
        ranks_per_node: int,
        load: Tensor,
    ) -> None:
        self.load = load
        self._layouts = layouts
        self._ranks = ranks
        self._start = start
        self._ranks_per_node = ranks_per_node
        # Number of owners -> the places of neighbours in the group, of shape (teams, owners).
        self._teams: dict[int, Tensor] = {}

    def assign(self, members: Mapping[Kind, Sequence[int]], owners: list[int]) -> None:
        """Writes the owners of all ``members``, which are sorted by work, heaviest first."""
        in_runs: set[int] = set()
        dealt: set[int] = set()
        has_parts = self._has_parts(members)
        for kind, matrices in members.items():
            count = len(kind.digests)
            if has_parts and count == 1 and kind.flops not in dealt:
                from .runs import deal_parts

                dealt.add(kind.flops)
                equal: list[int] = []
                for other, its_matrices in members.items():
                    if other.flops == kind.flops and len(other.digests) == 1:
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
            received = self._received(remaining[0], count)
            while remaining:
                chosen = self._give(kind.flops, count, received, len(remaining))
                for i, team in zip(remaining, chosen.tolist()):
                    owners[i : i + count] = [self._ranks[place] for place in team]
                remaining = remaining[len(chosen) :]

    def _has_parts(self, members: Mapping[Kind, Sequence[int]]) -> bool:
        """Whether a parameter has several matrices: heads, or experts of a stack."""
        of_params: Counter[int] = Counter()
        for matrices in members.values():
            of_params.update(self._layouts[i].key.index for i in matrices)
        return max(of_params.values(), default=0) > 1

    def _received(self, first_block: int, count: int) -> Tensor:
        """The elements that each rank would receive as the owner of each of the ``count`` blocks of a matrix."""
        blocks = self._layouts[first_block : first_block + count]
        numels = [[block.numel - n for n in block.shards.numels] for block in blocks]
        order = torch.tensor(blocks[0].shards.ranks, device="cpu").argsort()
        return torch.tensor(numels, device="cpu")[:, order]

    def _teams_of(self, count: int) -> Tensor:
        """The places of ``count`` neighbours each, on one node if each node has enough ranks."""
        if count not in self._teams:
            on_node = Counter(rank // self._ranks_per_node for rank in self._ranks)
            sizes = list(on_node.values())
            if min(sizes) < count:
                sizes = [len(self._ranks)]
            parts = torch.arange(len(self._ranks), device="cpu").split(sizes)
            teams = torch.cat([part.unfold(0, count, count) for part in parts])
            self._teams[count] = teams.roll(-(self._start // count), 0)
        return self._teams[count]

    def _give(self, flops: int, count: int, received: Tensor, most: int) -> Tensor:
        """Gives some of ``most`` equal matrices with ``count`` blocks to the least loaded teams, and returns these.
        Teams that receive the fewest elements come first.
        """
        teams = self._teams_of(count)
        busy = self.load[0, teams].amax(1)
        teams = teams[busy == busy.min()]
        rows = torch.arange(count, device="cpu")
        elements = self.load[1, teams] + received[rows, teams]
        teams = teams[elements.sum(1).argsort(stable=True)[:most]]
        self.load[0, teams] += flops
        self.load[1, teams] += received[rows, teams]
        return teams
