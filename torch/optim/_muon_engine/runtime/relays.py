"""Relays: one replica of each shard gets the owner's result and broadcasts it to the other replicas. Without
relays, an owner would hold and send one copy per replica.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..process_groups import Ranks
from ..schedule.order import RELAYS_IN_FLIGHT
from ..schedule.packs import Relay
from ..schedule.relays import relay_sizes
from .memory import Memory
from .transport import BoundPack, InFlight, LocalBucket


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
        self.packed = packed
        self.is_source = relay.source == rank
        self._source, self._group = relay.source, group
        # On the source: the results, each from where this rank received or computed it.
        self.copied: list[tuple[Tensor, Tensor]] = []
        for matrix in matrices if self.is_source else ():
            targets = packed.of(matrix.index)
            for origin in (bucket.scatter_recv, bucket.own_results):
                for target, result in zip(targets, origin.of(matrix.index)):
                    self.copied.append((target.view, result.view))

    def start(self) -> None:
        """Starts the broadcast."""
        source, group = self._source, self._group
        start = partial(dist.broadcast, src=source, group=group, async_op=True)
        self.launch(f"relay of {self.name}", start, self.packed.flat)


def attach_relays(
    buckets: Sequence[LocalBucket],
    groups: Mapping[Ranks, ProcessGroup | None],
    rank: int,
    memory: Memory,
) -> None:
    """Gives the buckets of each group their relays, over memory that these buckets share. A source packs all
    results of a bucket, which frees the bucket's slot at once. Results from other sources arrive in a ring,
    whose memory the next but one relay uses again.
    """
    for ranks in dict.fromkeys(bucket.ranks for bucket in buckets):
        of_group = [bucket for bucket in buckets if bucket.ranks == ranks]
        sizes = relay_sizes((bucket.planned_relays for bucket in of_group), rank)
        sent, received = sizes
        outgoing = memory.zeros(sent)
        incoming = [memory.zeros(received) for _ in range(RELAYS_IN_FLIGHT)]
        for bucket in of_group:
            start, ring = 0, itertools.cycle(incoming)
            for relay in bucket.planned_relays:
                if relay.source == rank:
                    packed = BoundPack(relay.pack, outgoing, start)
                    start += relay.pack.nbytes
                else:
                    packed = BoundPack(relay.pack, next(ring))
                along = groups[relay.replicas]
                bucket.relays.append(LocalRelay(bucket, relay, packed, along, rank))
