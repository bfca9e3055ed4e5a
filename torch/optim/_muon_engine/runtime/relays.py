"""Relays: one replica of each shard gets the owner's result and broadcasts it to the other replicas.

Without relays, an owner would hold and send one copy per replica.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.optim._muon_engine.runtime.transport import (
    BoundPack,
    copy_all,
    LocalBucket,
    named,
)
from torch.optim._muon_engine.schedule.packs import Relay, relay_sizes, RELAYS_IN_FLIGHT


class LocalRelay:
    """One broadcast along replicas, on this rank."""

    def __init__(
        self,
        bucket: LocalBucket,
        relay: Relay,
        packed: BoundPack,
        group: ProcessGroup | None,
        rank: int,
    ) -> None:
        self.bucket = bucket
        self.name = bucket.name
        self.packed = packed
        self.is_source = relay.source == rank
        numbers = {entry.matrix for entry in relay.pack.regions}
        self.matrices = [m for m in bucket.matrices if m.number in numbers]
        self._relay = relay
        self._group = group
        self._work: dist.Work | None = None

    def pack(self) -> None:
        """On the source: copies the results that it received and those that it computed itself."""
        origins = (self.bucket.scatter_recv, self.bucket.kept)
        copy_all(
            [
                (target.view, found.view)
                for matrix in self.matrices
                for origin in origins
                for target, found in zip(
                    self.packed.of(matrix.number), origin.of(matrix.number)
                )
            ]
        )

    def start(self) -> None:
        if self._work is None:
            with self._named():
                self._work = dist.broadcast(
                    self.packed.flat,
                    self._relay.source,
                    group=self._group,
                    async_op=True,
                )

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with self._named():
                work.wait()

    def _named(self) -> AbstractContextManager[None]:
        index, source = self.bucket.bucket.index, self._relay.source
        what = f"relay of bucket {index} from rank {source}"
        return named(what, self.matrices, self._relay.replicas)


def attach_relays(
    buckets: Sequence[tuple[LocalBucket, Sequence[Relay]]],
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    rank: int,
    device: torch.device,
) -> None:
    """Gives each bucket its relays, over memory that all buckets share.

    A source packs all results of a bucket, which frees the bucket's slot at once. Results from other
    sources arrive in a ring, whose memory the next but one relay uses again.
    """
    sent, received = relay_sizes((relays for _, relays in buckets), rank)
    outgoing = torch.empty(sent, dtype=torch.uint8, device=device)
    incoming = [
        torch.empty(received, dtype=torch.uint8, device=device)
        for _ in range(RELAYS_IN_FLIGHT)
    ]
    for bucket, relays in buckets:
        start, ring = 0, itertools.cycle(incoming)
        for relay in relays:
            if relay.source == rank:
                packed = BoundPack(relay.pack, outgoing, start)
                start += relay.pack.nbytes
            else:
                packed = BoundPack(relay.pack, next(ring))
            group = groups[relay.replicas]
            bucket.relays.append(LocalRelay(bucket, relay, packed, group, rank))
