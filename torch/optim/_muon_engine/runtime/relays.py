"""Relays: one replica of each shard gets the owner's result and broadcasts it to the other replicas. Without
relays, an owner would hold and send one copy per replica.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..process_groups import Ranks
from ..schedule.packs import Relay, relay_sizes, RELAYS_IN_FLIGHT
from .transport import BoundPack, copy_all, InFlight, LocalBucket, Memory


class LocalRelay(InFlight):
    """One broadcast of results of ``bucket`` along the replicas of ``group``, on this rank."""

    def __init__(
        self,
        bucket: LocalBucket,
        relay: Relay,
        packed: BoundPack,
        group: ProcessGroup | None,
        rank: int,
    ) -> None:
        indices = {entry.matrix for entry in relay.pack.regions}
        matrices = [m for m in bucket.matrices if m.index in indices]
        super().__init__(matrices, relay.replicas)
        self.name = f"{bucket.name} from rank {relay.source}"
        # No reference to the bucket, which refers to its relays.
        self._origins = bucket.scatter_recv, bucket.own_results
        self.packed = packed
        self.is_source = relay.source == rank
        self._source, self._group = relay.source, group

    def pack(self) -> None:
        """On the source: copies the results that it received and those that it computed itself."""
        results = [
            (target.view, result.view)
            for m in self.matrices
            for origin in self._origins
            for target, result in zip(self.packed.of(m.index), origin.of(m.index))
        ]
        copy_all(results)

    def start(self) -> None:
        """Starts the broadcast, unless it is in flight."""
        if not self.works:
            source, group = self._source, self._group
            start = partial(dist.broadcast, src=source, group=group, async_op=True)
            self.launch(f"relay of {self.name}", start, self.packed.flat)


def attach_relays(
    buckets: Sequence[tuple[LocalBucket, Sequence[Relay]]],
    groups: Mapping[Ranks, ProcessGroup | None],
    rank: int,
    memory: Memory,
) -> None:
    """Gives the buckets of each group their relays, over memory that these buckets share. A source packs all
    results of a bucket, which frees the bucket's slot at once. Results from other sources arrive in a ring,
    whose memory the next but one relay uses again.
    """
    for ranks in dict.fromkeys(bucket.ranks for bucket, _ in buckets):
        pairs = [(b, relays) for b, relays in buckets if b.ranks == ranks]
        sent, received = relay_sizes((relays for _, relays in pairs), rank)
        outgoing = memory.zeros(sent)
        incoming = [memory.zeros(received) for _ in range(RELAYS_IN_FLIGHT)]
        for bucket, relays in pairs:
            start, ring = 0, itertools.cycle(incoming)
            for relay in relays:
                if relay.source == rank:
                    packed = BoundPack(relay.pack, outgoing, start)
                    start += relay.pack.nbytes
                else:
                    packed = BoundPack(relay.pack, next(ring))
                along = groups[relay.replicas]
                bucket.relays.append(LocalRelay(bucket, relay, packed, along, rank))
