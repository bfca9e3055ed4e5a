"""Which matrices take the step together: a pure function of layouts and owners.

Every rank computes it alike for the groups that it is in; no process group is needed. The buckets of all
groups stand in one global order, of which each rank runs its part.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, TYPE_CHECKING

from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from torch.optim._muon_engine.schedule.specs import Bucket, Schedule


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.optim._muon_engine.layouts import Layout


# Enough buckets to hide transfers behind orthogonalization; more would only add latency.
MAX_BUCKETS = 4
# What an owner gathers in a bucket stays below this, unless one matrix of the group is above.
BUCKET_BYTES = 256 * 1024**2
# Buckets one after the other may take this many times the busiest owner's own work.
MAX_STRETCH = 1.1
# Beyond so many replicas of a shard, an owner sends its result to one of them, which relays it.
MAX_REPLICAS = 4
# Beyond so many connections of a rank, which cost it memory and a network adapter its queues, an exchange
# takes two levels.
MAX_PEERS = 512


def make_schedule(
    layouts: list[Layout],
    owners: list[int],
    wire_dtype: torch.dtype,
    *,
    one_owner_at_a_time: bool = False,
    max_buckets: int = MAX_BUCKETS,
    bucket_bytes: int = BUCKET_BYTES,
    max_replicas: int | None = None,
    ranks_per_node: int = 1,
    slots: int = 3,
) -> Schedule:
    """Cuts the work of each group into buckets.

    Every owner works in every bucket; a group has no more than ``max_buckets`` buckets unless
    ``bucket_bytes``, what one owner gathers in a bucket, asks for more. Beyond ``max_replicas``
    (default: ``MAX_REPLICAS``) results are relayed. Ranks that follow each other, ``ranks_per_node`` of
    them, are near each other. ``slots`` buckets of a group have memory at one time.
    """
    if max_replicas is None:
        max_replicas = MAX_REPLICAS
    for layout, owner in zip(layouts, owners, strict=True):
        if owner not in layout.shards:
            raise ValueError(
                f"rank {owner} was assigned {layout.describe()} but holds no piece of it; its ranks are "
                f"{list(layout.group)}"
            )
    families: dict[tuple, list[int]] = {}
    for i, layout in enumerate(layouts):
        # Contributions are summed before they are rounded, so they travel in their own dtype.
        gather_dtype = layout.dtype if layout.shards.partial else wire_dtype
        families.setdefault((layout.group, gather_dtype), []).append(i)

    drafts: list[tuple[tuple, tuple[int, ...], _Part, torch.dtype]] = []
    for (group, gather_dtype), members in sorted(
        families.items(), key=lambda item: (*_group_key(item[0][0]), str(item[0][1]))
    ):
        limit = bucket_bytes // gather_dtype.itemsize
        if one_owner_at_a_time:
            queues: dict[int, list[int]] = {}
            for m in members:
                queues.setdefault(owners[m], []).append(m)
            turns = [
                (rank, part)
                for rank in sorted(queues)
                for part in _cut(
                    queues[rank], layouts, owners, 1, limit, max_replicas, slots
                )
            ]
        else:
            parts = _cut(
                members, layouts, owners, max_buckets, limit, max_replicas, slots
            )
            turns = list(enumerate(parts))
        drafts.extend(
            ((turn, *_group_key(group), i), group, part, gather_dtype)
            for i, (turn, part) in enumerate(turns)
        )
    drafts.sort(key=lambda draft: (draft[0], str(draft[3])))
    buckets = _numbered(
        [draft[1:] for draft in drafts], layouts, wire_dtype, ranks_per_node
    )
    return Schedule(tuple(layouts), tuple(owners), tuple(buckets), one_owner_at_a_time)


def _numbered(
    drafts: list[tuple[tuple[int, ...], _Part, torch.dtype]],
    layouts: list[Layout],
    wire_dtype: torch.dtype,
    ranks_per_node: int,
) -> list[Bucket]:
    """The buckets, in the order of their ``drafts``: group, matrices, and the dtype that is gathered."""
    buckets: list[Bucket] = []
    counts: Counter[tuple[int, ...]] = Counter()
    for group, part, gather_dtype in drafts:
        buckets.append(
            Bucket(
                group,
                counts[group],
                part.matrices,
                gather_dtype,
                wire_dtype,
                part.relayed,
                _node_size(group, _peers(part, layouts), ranks_per_node),
            )
        )
        counts[group] += 1
    return buckets


class _Spread(NamedTuple):
    """Buckets, and the work of their busiest owners, added up."""

    work: int
    buckets: list[list[int]]


class _Part(NamedTuple):
    """The matrices of a bucket to be."""

    matrices: tuple[int, ...]
    relayed: bool


def _peers(part: _Part, layouts: list[Layout]) -> int:
    """With how many ranks an owner exchanges something, at most."""
    distinct = {layouts[m].shards for m in part.matrices}
    if not part.relayed:
        return max(len(shards.ranks) for shards in distinct) - 1
    return max(
        sum(not shards.is_empty(ranks[0]) for ranks in shards.replica_sets)
        for shards in distinct
    )


def _node_size(group: tuple[int, ...], peers: int, ranks_per_node: int) -> int:
    """How many ranks of ``group`` count as one node; 1 where all exchange directly.

    A node, or as many nodes together as it takes for a rank to have ``MAX_PEERS`` peers in both levels.
    """
    count = len(group)
    found = Counter(rank // ranks_per_node for rank in group)
    here = min(found.values())
    together = here if here == max(found.values()) else 1
    sizes = [s for s in range(together, count, together) if count % s == 0]

    def more(size: int) -> tuple[int, int]:
        return max(0, size + count // size - 2 - MAX_PEERS), size

    return min(sizes, key=more, default=1) if peers > MAX_PEERS else 1


def _group_key(group: tuple[int, ...]) -> tuple:
    return (-len(group), group)


def _cut(
    members: list[int],
    layouts: list[Layout],
    owners: list[int],
    max_buckets: int,
    bucket_elements: int,
    max_replicas: int,
    slots: int,
) -> list[_Part]:
    """Distributes each owner's matrices over buckets in which every owner works.

    A rank waits for a bucket's results, so buckets one after the other take as long as the busiest
    owner of each. The number of buckets is ``max_buckets`` (or what the bound asks for), unless another
    one lets the buckets take no longer than the busiest owner's own work.
    """
    queues: dict[int, list[int]] = {}
    for m in sorted(
        members,
        key=lambda m: (-newton_schulz_flops(layouts[m].shape), layouts[m].shape, m),
    ):
        queues.setdefault(owners[m], []).append(m)
    largest = max(layouts[m].numel for m in members)
    common = max(bucket_elements, min(bucket_elements + largest, largest * 3 // 2))
    longest = max(map(len, queues.values()))
    least = max(
        -(-sum(layouts[m].numel for m in queue) // common) for queue in queues.values()
    )
    wanted = max(least, min(max_buckets, longest))
    work = [newton_schulz_flops(layout.shape) for layout in layouts]
    busiest = max(sum(work[m] for m in queue) for queue in queues.values())
    more = [wanted + i * -(-wanted // 16) for i in range(1, 5)]

    def spread(counts: Iterable[int], wide: int, others: int) -> _Spread | None:
        """The first that is short enough, else the shortest; every slot but one has ``others``' limit."""
        best = None
        for count in counts:
            # The last but one: nothing hides the gather of the first, or the scatter of the last.
            slot = max(0, count - 2) % slots
            limits = [wide if at % slots == slot else others for at in range(count)]
            found = _spread(queues, layouts, work, limits)
            if found is not None and (best is None or found.work < best.work):
                best = found
            if best is not None and best.work <= MAX_STRETCH * busiest:
                break
        return best

    # A matrix may be above the bound. Then other owners' buffers may be as large, and small matrices
    # find a place beside it.
    best = spread((*range(wanted, least - 1, -1), *more), common, common)
    if best is None:
        # Every owner's every matrix in a bucket of its own always fits.
        alone = [
            [queue[i] for queue in queues.values() if i < len(queue)]
            for i in range(longest)
        ]
        best = _Spread(sum(max(work[m] for m in part) for part in alone), alone)
    if best.work > MAX_STRETCH * busiest:
        # A large matrix takes longer than what fits beside it. So buckets of one slot are larger, and
        # those of the other slots not above the bound.
        wide = bucket_elements + slots * largest
        counts = (*range(wanted, max(1, wanted // 2) - 1, -1), *more)
        wider = spread(counts, wide, bucket_elements)
        best = wider if wider is not None and wider.work < best.work else best
    return _parts(best.buckets, layouts, owners, common, max_replicas)


def _parts(
    buckets: list[list[int]],
    layouts: list[Layout],
    owners: list[int],
    common: int,
    max_replicas: int,
) -> list[_Part]:
    """Says of each bucket whether it is relayed, and cuts those of which some rank sends too much.

    Args:
        common: elements that an owner gathers in a bucket at most; some may be larger.
    """
    parts = []
    for whole in buckets:
        held = _Held(layouts).most(whole)
        gathered: Counter[int] = Counter()
        for m in whole:
            gathered[owners[m]] += layouts[m].numel
        limit = max(common, *gathered.values())
        replicas = max(layouts[m].shards.replicas for m in whole)
        # Directly, what replicas get stands in three buffers: theirs, and twice in the owners'.
        if replicas > max_replicas or (replicas > 1 and 3 * held > 2 * limit):
            parts.append(_Part(tuple(whole), True))
        elif held <= 2 * limit:
            parts.append(_Part(tuple(whole), False))
        else:
            split = _within(whole, layouts, owners, 2 * limit)
            parts += [_Part(tuple(part), False) for part in split]
    return parts


def _spread(
    queues: dict[int, list[int]],
    layouts: list[Layout],
    work: list[int],
    limits: list[int],
) -> _Spread | None:
    """The buckets of all owners' matrices; None if they are too few.

    The busiest owner's matrices, cut into parts of equal work, say how long each bucket should take.
    The other owners fill these buckets, and once more the buckets that came of it.

    Args:
        limits: elements that an owner gathers in each bucket at most.
    """
    leader = max(
        queues, key=lambda owner: (sum(work[m] for m in queues[owner]), -owner)
    )
    n_buckets = len(limits)
    heights = [0] * n_buckets
    total, before = max(1, sum(work[m] for m in queues[leader])), 0
    for m in queues[leader]:
        # The bucket in whose share of the work the matrix's middle falls.
        at = min(n_buckets - 1, n_buckets * (2 * before + work[m]) // (2 * total))
        heights[at] += work[m]
        before += work[m]
    if len(set(limits)) > 1:
        longest = sorted(heights, reverse=True)
        widest = sorted(range(n_buckets), key=lambda at: (-limits[at], -at))
        for at, height in zip(widest, longest):
            heights[at] = height
    best: _Spread | None = None
    for _ in range(3):
        buckets: list[list[int]] = [[] for _ in range(n_buckets)]
        busiest = [0] * n_buckets
        for queue in queues.values():
            # Rounds by the room that is left, the most first.
            room = [(-height, at) for at, height in enumerate(heights)]
            heapify(room)
            free = list(limits)
            least, done = min(layouts[m].numel for m in queue), []
            for m in queue:
                size, full = layouts[m].numel, []
                while room and size > free[room[0][1]]:
                    one = heappop(room)
                    (done if free[one[1]] < least else full).append(one)
                if not room:
                    return best
                left, at = room[0]
                heapreplace(room, (left + work[m], at))
                free[at] -= size
                buckets[at].append(m)
                for one in full:
                    heappush(room, one)
            for left, at in (*room, *done):
                busiest[at] = max(busiest[at], heights[at] + left)
        if best is None or sum(busiest) < best.work:
            best = _Spread(sum(busiest), [part for part in buckets if part])
        heights = busiest
    return best


def _within(
    part: list[int], layouts: list[Layout], owners: list[int], limit: int
) -> list[list[int]]:
    """``part`` as several buckets, where some rank holds most of all matrices, and sends too much.

    Each bucket then has one matrix more of each owner, as far as the bound allows.
    """
    turn: Counter[int] = Counter()
    turns = []
    for m in part:
        turn[owners[m]] += 1
        turns.append((turn[owners[m]], m))
    parts: list[list[int]] = []
    held = _Held(layouts)
    for _, m in sorted(turns):
        if not parts or held.most([m]) > limit:
            parts.append([])
            held = _Held(layouts)
            held.most([m])
        parts[-1].append(m)
    return parts


class _Held:
    """Elements that each rank holds of the matrices of a bucket, and so sends or gets at most."""

    def __init__(self, layouts: list[Layout]) -> None:
        self.layouts = layouts
        self.held: Counter[int] = Counter()

    def most(self, more: Sequence[int]) -> int:
        """What the busiest rank holds once ``more`` are among them."""
        for shards, count in Counter(self.layouts[m].shards for m in more).items():
            for rank, numel in zip(shards.ranks, shards.numels, strict=True):
                self.held[rank] += count * numel
        return max(self.held.values(), default=0)
