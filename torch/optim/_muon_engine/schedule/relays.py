"""Which results are relayed along replicas, and how many at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Ranks, Shards
from .packs import grouped, Pack, Relay


# Maximum size of one relay, unless a single shard is larger.
RELAY_BYTES = 64 * 1024**2


class _Path(NamedTuple):
    """The sorted replicas of a shard, and the one of them that received the results. Paths are sorted by these."""

    replicas: Ranks
    source: int


def relays_of(
    shards_of: Mapping[int, Shards],
    owners: Mapping[int, int],
    rank: int,
    packed: Callable[[Sequence[int]], Pack],
) -> tuple[Relay, ...]:
    """The relays along the replicas of ``rank``'s shards of some matrices, in an order that all replicas share.
    ``packed`` makes the pack of the results of matrices.
    """
    # Each matrix with its path and its bytes.
    sized: list[tuple[int, _Path, int]] = []
    for matrix, shards in shards_of.items():
        replicas = shards.replicas_of(rank)
        if len(replicas) == 1 or shards.is_empty(rank):
            continue
        path = _Path(tuple(sorted(replicas)), shards.source(rank, owners[matrix]))
        nbytes = shards.numel_of(rank) * NS_DTYPE.itemsize
        sized.append((matrix, path, nbytes))
    matrices_of = grouped(sized, RELAY_BYTES)
    relays: list[Relay] = []
    for path in sorted(matrices_of):
        for matrices in matrices_of[path]:
            relays.append(Relay(path.replicas, path.source, packed(matrices)))
    return tuple(relays)


class RelayBytes(NamedTuple):
    """Bytes of the results that a rank relays in one bucket, and of the largest that it is sent."""

    sent: int
    received: int


def relay_sizes(relays: Iterable[Sequence[Relay]], rank: int) -> RelayBytes:
    """The most bytes of ``relays``, which are those of each bucket."""
    most_sent = 0
    largest_received = 0
    for of_bucket in relays:
        sent = 0
        for relay in of_bucket:
            nbytes = relay.pack.nbytes
            if relay.source == rank:
                sent += nbytes
            else:
                largest_received = max(largest_received, nbytes)
        most_sent = max(most_sent, sent)
    return RelayBytes(most_sent, largest_received)
