"""Which results are relayed along replicas, and how many at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Ranks, Shards
from .packs import grouped, Pack, Relay


# Maximum size of one relay, unless a single shard is larger.
RELAY_BYTES = 64 * 1024**2


def relays_of(
    shards_of: Mapping[int, Shards],
    owners: Mapping[int, int],
    rank: int,
    packed: Callable[[Sequence[int]], Pack],
) -> tuple[Relay, ...]:
    """The relays along the replicas of ``rank``'s shards of some matrices, in an order that all replicas share.
    ``packed`` makes the pack of the results of matrices.
    """
    # Each matrix with its (replicas, source) and its bytes.
    sized: list[tuple[int, tuple[Ranks, int], int]] = []
    for matrix, shards in shards_of.items():
        replicas = shards.replicas_of(rank)
        if len(replicas) > 1 and not shards.is_empty(rank):
            source = shards.source(rank, owners[matrix])
            nbytes = shards.numel_of(rank) * NS_DTYPE.itemsize
            sized.append((matrix, (tuple(sorted(replicas)), source), nbytes))
    relays: list[Relay] = []
    for (replicas, source), parts in sorted(grouped(sized, RELAY_BYTES).items()):
        for matrices in parts:
            relays.append(Relay(replicas, source, packed(matrices)))
    return tuple(relays)


def relay_sizes(relays: Iterable[Sequence[Relay]], rank: int) -> tuple[int, int]:
    """Bytes of the results that ``rank`` relays in one bucket, and of the largest that it is sent."""
    sent = received = 0
    for of_bucket in relays:
        own = sum(relay.pack.nbytes for relay in of_bucket if relay.source == rank)
        others = [relay.pack.nbytes for relay in of_bucket if relay.source != rank]
        sent, received = max(sent, own), max([received, *others])
    return sent, received
