"""The broadcasts along replicas that follow a relayed bucket."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

import numpy as np
from torch.optim._muon_engine.schedule.specs import RELAY_BYTES


if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.optim._muon_engine.schedule.specs import Bucket, Schedule

    from .hardware import Hardware
    from .shards import Vectors


class Wave(NamedTuple):
    """Broadcasts that disjoint replica sets make at the same place of their order.

    Args:
        ranks: global ranks, shape (sets, replicas).
        source: which replica has what the others get.
        nbytes: for each set.
    """

    ranks: NDArray
    source: int
    nbytes: NDArray

    def between_nodes(self, gpus_per_node: int) -> bool:
        return len(np.unique(self.ranks[0] // gpus_per_node)) > 1

    def seconds(self, hardware: Hardware) -> tuple[NDArray, float]:
        """Of a ring in the order of ranks: the time of its links, and of its hops, which are free meanwhile."""
        nodes = len(np.unique(self.ranks[0] // hardware.gpus_per_node))
        inside = self.ranks.shape[1] - nodes
        slowest = hardware.inter_bandwidth if nodes > 1 else hardware.intra_bandwidth
        hops = (nodes - 1) * hardware.inter_latency + inside * hardware.intra_latency
        return self.nbytes / slowest, hops


class _Sets(NamedTuple):
    """Replica sets of one size that the same ``Shards`` have; a shard's elements by these."""

    ranks: NDArray
    numels: dict[int, NDArray]


def waves(
    schedule: Schedule, bucket: Bucket, vectors: dict[int, Vectors]
) -> list[Wave]:
    """As ``Schedule.spec`` makes relays, for all ranks at once.

    Where a rank is in several replica sets, the smaller ones come first here; the engine sorts them by
    ranks. A relay is full when its largest shard says so.
    """
    if not bucket.relayed:
        return []
    size_of = bucket.scatter_dtype.itemsize
    found = _replica_sets(
        {id(schedule.layouts[m].shards) for m in bucket.matrices}, vectors
    )
    owners = [schedule.owners[m] for m in bucket.matrices]
    places = np.searchsorted(bucket.group, owners).tolist()
    result = []
    for sets in found:
        replicas = sets.ranks.shape[1]
        parts: dict[int, list[NDArray]] = {}
        room: dict[int, float] = {}
        for matrix, place in zip(bucket.matrices, places, strict=True):
            shards = id(schedule.layouts[matrix].shards)
            if shards not in sets.numels:
                continue
            source = min(int(vectors[shards].number[place]), replicas - 1)
            size = int(sets.numels[shards].max()) * size_of
            if room.get(source, -1) < size:
                parts.setdefault(source, []).append(np.zeros(len(sets.ranks)))
                room[source] = RELAY_BYTES
            room[source] -= size
            parts[source][-1] += (sets.numels[shards] + 1) * size_of
        result += [
            Wave(sets.ranks, source, nbytes)
            for source, of_source in sorted(parts.items())
            for nbytes in of_source
        ]
    return result


def _replica_sets(wanted: set[int], vectors: dict[int, Vectors]) -> list[_Sets]:
    of_set: dict[tuple[int, ...], dict[int, int]] = {}
    for shards in sorted(wanted):
        for one in vectors[shards].sets:
            for ranks, numel in zip(one.ranks.tolist(), one.numels.tolist()):
                of_set.setdefault(tuple(ranks), {})[shards] = numel
    alike: dict[tuple, list[tuple[int, ...]]] = {}
    for ranks, numels in of_set.items():
        alike.setdefault((len(ranks), *numels), []).append(ranks)
    return [
        _Sets(
            np.array(sets),
            {s: np.array([of_set[ranks][s] for ranks in sets]) for s in shards},
        )
        for (_, *shards), sets in sorted(alike.items(), key=lambda item: item[0][0])
    ]
