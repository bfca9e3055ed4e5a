"""Which matrices are processed together: a pure function of layouts and owners. A matrix is its index in ``layouts``."""

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple


from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Layout, Ranks, Shards
from ..process_groups import larger_first
from .owners import flops_of
from .schedule import Bucket, Schedule


# Enough buckets to hide transfers behind orthogonalization.
MAX_BUCKETS = 4
# Size of what an owner gathers in a bucket. A group with large matrices exceeds it, see ``_distribute``.
BUCKET_BYTES = 256 * 1024**2
# The buckets, run sequentially, should take at most this many times the busiest owner's own work.
MAX_STRETCH = 1.1
# With more replicas of a shard, an owner sends its result to one of them, which relays it.
MAX_REPLICAS = 4

# Owner -> its matrices, in the order in which it works on them.
Queues = dict[int, list[int]]


class _Family(NamedTuple):
    """The common properties of matrices that may share a bucket."""

    # The only owner that works; 0 where all owners work at the same time.
    only_owner: int
    ranks: Ranks


class _Position(NamedTuple):
    """Where a bucket comes in the order of all buckets."""

    only_owner: int
    number_in_family: int
    # Larger groups come first.
    group_number: int


class _Candidate(NamedTuple):
    """Matrices that become a bucket, when all families have been distributed."""

    position: _Position
    family: _Family
    matrices: list[int]


class _Limits(NamedTuple):
    """The most elements that an owner gathers in the buckets of the first slot, and in those of the other slots."""

    first_slot: int
    other_slots: int

    def of_buckets(self, count: int, slots: int) -> list[int]:
        """The limit of each of ``count`` buckets, which take the slots in turn."""
        limits: list[int] = []
        for bucket in range(count):
            is_first = bucket % slots == 0
            limits.append(self.first_slot if is_first else self.other_slots)
        return limits


class _Distribution(NamedTuple):
    """Matrices in buckets, and the work of the busiest owner of each bucket, added up; no buckets if they do not fit."""

    buckets: list[list[int]]
    flops: int


def make_schedule(
    layouts: Sequence[Layout],
    owners: Sequence[int],
    *,
    one_owner_at_a_time: bool = False,
    slots: int = 3,
) -> Schedule:
    """Cuts the work of each group into buckets, whose owners work at the same time. As many buckets of a group
    as ``slots`` have memory at the same time.
    """
    families = _families(layouts, owners, one_owner_at_a_time)
    max_buckets = 1 if one_owner_at_a_time else MAX_BUCKETS
    groups = larger_first({family.ranks for family in families})
    group_numbers = {ranks: number for number, ranks in enumerate(groups)}

    candidates: list[_Candidate] = []
    for family, matrices in families.items():
        queues = _queues(matrices, layouts, owners)
        limit = BUCKET_BYTES // NS_DTYPE.itemsize
        distributed = [matrices]
        # A single rank has no transfers to hide and gathers nothing. So its equal shapes form large batches.
        if len(family.ranks) > 1:
            distributed = _distribute(queues, layouts, max_buckets, limit, slots)
        for number, members in enumerate(distributed):
            position = _Position(
                family.only_owner,
                number,
                group_numbers[family.ranks],
            )
            candidates.append(_Candidate(position, family, members))
    candidates.sort(key=attrgetter("position"))

    buckets_of_group: Counter[Ranks] = Counter()
    buckets: list[Bucket] = []
    for candidate in candidates:
        ranks = candidate.family.ranks
        buckets.append(_make_bucket(candidate, buckets_of_group[ranks], layouts))
        buckets_of_group[ranks] += 1
    return Schedule(tuple(layouts), tuple(owners), tuple(buckets), one_owner_at_a_time)


def _families(
    layouts: Sequence[Layout], owners: Sequence[int], one_owner_at_a_time: bool
) -> dict[_Family, list[int]]:
    """Family -> its matrices."""
    families: dict[_Family, list[int]] = {}
    for matrix, layout in enumerate(layouts):
        if layout.frozen:
            continue
        only_owner = owners[matrix] if one_owner_at_a_time else 0
        family = _Family(only_owner, layout.holders)
        families.setdefault(family, []).append(matrix)
    return families


def _queues(
    matrices: Sequence[int], layouts: Sequence[Layout], owners: Sequence[int]
) -> Queues:
    """The matrices of each owner, heaviest first."""

    def place(matrix: int) -> tuple:
        layout = layouts[matrix]
        return -flops_of(layout), layout.shape, matrix

    queues: Queues = {}
    for matrix in sorted(matrices, key=place):
        queues.setdefault(owners[matrix], []).append(matrix)
    return queues


def _make_bucket(
    candidate: _Candidate, index: int, layouts: Sequence[Layout]
) -> Bucket:
    """The bucket with this ``index`` in its group."""
    _, family, matrices = candidate
    shards = Counter(layouts[matrix].shards for matrix in matrices)
    relayed = _is_relayed(shards, BUCKET_BYTES // NS_DTYPE.itemsize)
    return Bucket(family.ranks, index, tuple(matrices), relayed)


def _distribute(
    queues: Queues, layouts: Sequence[Layout], max_buckets: int, limit: int, slots: int
) -> list[list[int]]:
    """Distributes the owners' matrices over buckets, whose owners work at the same time. A rank waits for a
    bucket's results, so a bucket takes as long as its busiest owner. The first distribution wins whose sum is
    close to the busiest owner's own work, or else the shortest: with ``max_buckets``, or as many as keep each
    owner's elements at ``limit``, then with fewer, then with a few more.
    """
    flops: dict[int, int] = {}
    numels: dict[int, int] = {}
    for queue in queues.values():
        for matrix in queue:
            flops[matrix] = flops_of(layouts[matrix])
            numels[matrix] = layouts[matrix].numel
    largest = max(numels.values())
    busiest = max(_total(flops, queue) for queue in queues.values())
    most_gathered = max(_total(numels, queue) for queue in queues.values())
    longest_queue = max(map(len, queues.values()))

    # Up to one and a half of the largest matrix.
    usual = max(limit, min(limit + largest, largest * 3 // 2))
    # One slot may be larger if the others stay at the limit: small matrices fill the time of a large one.
    wide = limit + slots * largest
    fewest = math.ceil(most_gathered / usual)
    wanted = max(fewest, min(max_buckets, longest_queue))
    shortest = _Distribution([], 0)
    for limits in (_Limits(usual, usual), _Limits(wide, limit)):
        for count in _counts_to_try(wanted, fewest):
            found = _spread(queues, layouts, flops, limits.of_buckets(count, slots))
            if not found.buckets:
                continue
            if shortest.buckets and found.flops >= shortest.flops:
                continue
            if not _holders_have_memory(found.buckets, layouts, limits):
                continue
            shortest = found
            if shortest.flops <= MAX_STRETCH * busiest:
                return shortest.buckets
    return shortest.buckets or _one_each(queues)


def _total(values: dict[int, int], matrices: Sequence[int]) -> int:
    return sum(values[matrix] for matrix in matrices)


def _counts_to_try(wanted: int, fewest: int) -> list[int]:
    """Numbers of buckets: ``wanted``, then fewer, then one and two sixteenths more."""
    sixteenth = math.ceil(wanted / 16)
    return [
        *range(wanted, fewest - 1, -1),
        wanted + sixteenth,
        wanted + 2 * sixteenth,
    ]


def _holders_have_memory(
    buckets: Sequence[Sequence[int]], layouts: Sequence[Layout], limits: _Limits
) -> bool:
    """Whether no holder sends more than twice the limit in a bucket without relays."""
    for bucket in buckets:
        shards = Counter(layouts[matrix].shards for matrix in bucket)
        may_be_relayed = _most_replicas(shards) > 1
        if not may_be_relayed and _most_held(shards) > 2 * limits.first_slot:
            return False
    return True


def _one_each(queues: Queues) -> list[list[int]]:
    """A bucket for the next matrix of every owner. This always fits."""
    rounds: list[list[int]] = []
    for queue in queues.values():
        for number, matrix in enumerate(queue):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(matrix)
    return rounds


def _spread(
    queues: Queues, layouts: Sequence[Layout], flops: dict[int, int], limits: list[int]
) -> _Distribution:
    """The busiest owner's matrices, cut into shares of equal work, give each bucket a height. Every owner puts its
    matrices, heaviest first, where it has most room. The resulting heights are filled again.
    """
    leader = max(queues.values(), key=lambda queue: _total(flops, queue))
    heights = _heights(leader, flops, limits)
    shortest = _Distribution([], 0)
    for _ in range(2):
        filling = _Filling(layouts, flops, heights, limits)
        if not filling.add_all(queues):
            return shortest
        total = sum(filling.busiest)
        if not shortest.buckets or total < shortest.flops:
            filled = [bucket for bucket in filling.buckets if bucket]
            shortest = _Distribution(filled, total)
        heights = filling.busiest
    return shortest


def _heights(
    leader: Sequence[int], flops: dict[int, int], limits: Sequence[int]
) -> list[int]:
    """The work of the owner ``leader`` in each bucket, if it shares its work out equally."""
    count = len(limits)
    shares = [0] * count
    total = max(1, _total(flops, leader))
    before = 0
    for matrix in leader:
        # The share of the work in which the matrix's middle falls.
        twice_middle = 2 * before + flops[matrix]
        number = min(count - 1, count * twice_middle // (2 * total))
        shares[number] += flops[matrix]
        before += flops[matrix]
    # The longest shares go to the buckets with the largest limits.
    heights = [0] * count
    widest_first = sorted(range(count), key=lambda bucket: -limits[bucket])
    for bucket, share in zip(widest_first, sorted(shares, reverse=True)):
        heights[bucket] = share
    return heights


class _Filling:
    """Buckets that one owner after the other fills with its matrices, up to ``heights`` of work if it can, and never above
    ``limits`` of elements.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        flops: dict[int, int],
        heights: list[int],
        limits: list[int],
    ) -> None:
        self.buckets: list[list[int]] = [[] for _ in limits]
        # The work of the busiest owner in each bucket.
        self.busiest = [0] * len(limits)
        self._layouts = layouts
        self._flops = flops
        self._heights = heights
        self._limits = limits

    def add_all(self, queues: Queues) -> bool:
        """Puts the matrices of all owners into buckets. Returns whether they fit."""
        for queue in queues.values():
            if not self._add(queue):
                return False
        return True

    def _add(self, queue: Sequence[int]) -> bool:
        """Puts an owner's matrices into buckets. Returns whether they fit."""
        room = list(self._heights)
        free = list(self._limits)
        previous: Layout | None = None
        previous_flops = previous_bucket = 0
        for matrix in queue:
            layout = self._layouts[matrix]
            flops = self._flops[matrix]
            fitting = [
                number
                for number, room_left in enumerate(free)
                if room_left >= layout.numel
            ]
            if not fitting:
                return False
            bucket = max(fitting, key=room.__getitem__)
            if previous is not None and flops == previous_flops:
                # Heads that follow each other stay together, because they are copied together.
                are_heads = layout.key.index == previous.key.index
                fits = previous_bucket in fitting and room[previous_bucket] >= flops
                if are_heads and fits:
                    bucket = previous_bucket
            self.buckets[bucket].append(matrix)
            room[bucket] -= flops
            free[bucket] -= layout.numel
            previous = layout
            previous_flops = flops
            previous_bucket = bucket
        for bucket, height in enumerate(self._heights):
            work = height - room[bucket]
            self.busiest[bucket] = max(self.busiest[bucket], work)
        return True


def _most_held(counts: Counter[Shards]) -> int:
    """Elements that the busiest holder of a bucket sends or receives. ``counts`` are of its matrices."""
    numels: Counter[int] = Counter()
    for shards, count in counts.items():
        for rank, numel in zip(shards.ranks, shards.numels, strict=True):
            numels[rank] += count * numel
    return max(numels.values(), default=0)


def _most_replicas(counts: Counter[Shards]) -> int:
    return max(shards.most_replicas for shards in counts)


def _is_relayed(counts: Counter[Shards], limit: int) -> bool:
    """Whether one replica of each shard relays the results to the others."""
    replicas = _most_replicas(counts)
    if replicas <= 1:
        return False
    if replicas > MAX_REPLICAS:
        return True
    # Without relays, an owner has memory for each replica's copy: at most two thirds of the limit.
    return 3 * _most_held(counts) > 2 * limit
