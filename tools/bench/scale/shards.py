"""``Shards`` as vectors over the ranks of their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.optim._muon_engine.layouts import Shards


@dataclass(frozen=True)
class ReplicaSets:
    """The replica sets of one size: their ranks, shape (sets, replicas), and a shard's elements."""

    ranks: NDArray
    numels: NDArray


@dataclass(frozen=True)
class Vectors:
    """In the order of ``ranks``, the group's: elements, the replica's number, how many there are."""

    ranks: NDArray
    numels: NDArray
    number: NDArray
    replicas: NDArray
    sets: tuple[ReplicaSets, ...]

    @classmethod
    def of(cls, shards: Shards) -> Vectors:
        """Raises NotImplementedError for contributions to a sum, which travel otherwise."""
        if shards.partial:
            raise NotImplementedError("the simulation has no Partial parameters")
        ranks = np.array(shards.group)
        numels = np.array(shards.numels)[np.argsort(shards.ranks)]
        number, replicas = np.zeros_like(ranks), np.ones_like(ranks)
        by_size: dict[int, list[tuple[int, ...]]] = {}
        for one in shards.replica_sets:
            by_size.setdefault(len(one), []).append(one)
        found = []
        for size, sets in sorted(by_size.items()):
            if size == 1:
                continue
            members = np.array(sets)
            places = np.searchsorted(ranks, members)
            number[places] = np.arange(size)
            replicas[places] = size
            held = numels[places[:, 0]]
            if held.any():
                # Ranks with empty shards relay nothing to each other.
                found.append(ReplicaSets(members[held > 0], held[held > 0]))
        return cls(ranks, numels, number, replicas, tuple(found))

    def sources(self, owners: NDArray) -> NDArray:
        """Whether a rank exchanges its shard with an owner, shape (owners, ranks).

        Args:
            owners: their places in the group.
        """
        wanted = np.minimum(self.number[owners][:, None], self.replicas - 1)
        return wanted == self.number
