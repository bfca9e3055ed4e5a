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
    from collections.abc import Sequence

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


def make_schedule(
    layouts: list[Layout],
    owners: list[int],
    wire_dtype: torch.dtype,
    *,
    one_owner_at_a_time: bool = False,
    max_buckets: int = MAX_BUCKETS,
    bucket_bytes: int = BUCKET_BYTES,
    max_replicas: int | None = None,
) -> Schedule:
    """Cuts the work of each group into buckets.

    Every owner works in every bucket; a group has no more than ``max_buckets`` buckets unless
    ``bucket_bytes``, what one owner gathers in a bucket, asks for more. Beyond ``max_replicas``
    (default: ``MAX_REPLICAS``) results are relayed.
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
                for part in _cut(queues[rank], layouts, owners, 1, limit, max_replicas)
            ]
        else:
            parts = _cut(members, layouts, owners, max_buckets, limit, max_replicas)
            turns = list(enumerate(parts))
        drafts.extend(
            ((turn, *_group_key(group), i), group, part, gather_dtype)
            for i, (turn, part) in enumerate(turns)
        )
    buckets: list[Bucket] = []
    counts: dict[tuple[int, ...], int] = {}
    for _, group, part, gather_dtype in sorted(
        drafts, key=lambda draft: (draft[0], str(draft[3]))
    ):
        index = counts.get(group, 0)
        counts[group] = index + 1
        buckets.append(
            Bucket(group, index, part.matrices, gather_dtype, wire_dtype, part.relayed)
        )
    return Schedule(tuple(layouts), tuple(owners), tuple(buckets), one_owner_at_a_time)


class _Part(NamedTuple):
    """The matrices of a bucket to be."""

    matrices: tuple[int, ...]
    relayed: bool


def _group_key(group: tuple[int, ...]) -> tuple:
    return (-len(group), group)


def _cut(
    members: list[int],
    layouts: list[Layout],
    owners: list[int],
    max_buckets: int,
    bucket_elements: int,
    max_replicas: int,
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
    # A matrix may be above the bound. Then other owners' buffers may be as large, and small matrices
    # find a place beside it.
    largest = max(layouts[m].numel for m in members)
    limit = max(bucket_elements, min(bucket_elements + largest, largest * 3 // 2))
    longest = max(map(len, queues.values()))
    least = max(
        -(-sum(layouts[m].numel for m in queue) // limit) for queue in queues.values()
    )
    wanted = max(least, min(max_buckets, longest))
    work = [newton_schulz_flops(layout.shape) for layout in layouts]
    busiest = max(sum(work[m] for m in queue) for queue in queues.values())
    found: list[tuple[int, list[list[int]]]] = []
    fewer, more = range(wanted, least - 1, -1), range(1, 5)
    for n_buckets in (*fewer, *(wanted + i * -(-wanted // 16) for i in more)):
        spread = _spread(queues, layouts, work, n_buckets, limit)
        if spread is not None:
            found.append(spread)
        if spread is not None and spread[0] <= MAX_STRETCH * busiest:
            break
    if not found:
        # Every owner's every matrix in a bucket of its own always fits.
        alone = [
            [queue[i] for queue in queues.values() if i < len(queue)]
            for i in range(longest)
        ]
        found.append((0, alone))
    _, buckets = min(found, key=lambda spread: (spread[0], len(spread[1])))
    parts = []
    for whole in buckets:
        held = _Held(layouts).most(whole)
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
    n_buckets: int,
    limit: int,
) -> tuple[int, list[list[int]]] | None:
    """``n_buckets`` buckets and the work of their busiest owners, added up; None if they are too few.

    The busiest owner's matrices, cut into parts of equal work, say how long each bucket should take.
    The other owners fill these buckets, and once more the buckets that came of it.
    """
    leader = max(
        queues, key=lambda owner: (sum(work[m] for m in queues[owner]), -owner)
    )
    heights = [0] * n_buckets
    total, before = max(1, sum(work[m] for m in queues[leader])), 0
    for m in queues[leader]:
        # The bucket in whose share of the work the matrix's middle falls.
        at = min(n_buckets - 1, n_buckets * (2 * before + work[m]) // (2 * total))
        heights[at] += work[m]
        before += work[m]
    best: tuple[int, list[list[int]]] | None = None
    for _ in range(3):
        buckets: list[list[int]] = [[] for _ in range(n_buckets)]
        busiest = [0] * n_buckets
        for queue in queues.values():
            # Rounds by the room that is left, the most first.
            room = [(-height, at) for at, height in enumerate(heights)]
            heapify(room)
            free = [limit] * n_buckets
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
        if best is None or sum(busiest) < best[0]:
            best = sum(busiest), [part for part in buckets if part]
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
