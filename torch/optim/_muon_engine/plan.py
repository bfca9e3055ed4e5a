"""The plan of a step on one rank: owners, buckets, exchanges and the order of operations. All of it is a pure function of
the matrices.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from .._newton_schulz import NS_DTYPE
from .params import Matrix
from .process_groups import Ranks, row_and_column
from .regions import Grid, place_in_order, ranks_of, Region


# Enough buckets to hide transfers behind orthogonalization.
MAX_BUCKETS = 4
# The bytes that an owner may gather for each bucket in flight, on top of a largest matrix.
BUCKET_BYTES = 256 * 1024**2
# The buckets, run sequentially, should take at most this many times the busiest owner's own work.
MAX_STRETCH = 1.1
# The bytes that a rank receives in one round along a column, unless the rows of a region are longer.
ROUND_BYTES = 128 * 1024**2
ROUNDS_IN_FLIGHT = 2
# With more of them, pieces would be so small that a round takes as long as its messages need to start.
MOST_SENDERS = 32


class Move(NamedTuple):
    """A region of ``matrix`` on its way between a rank's storage and packed memory."""

    matrix: Matrix
    region: Region


def numel_of(moves: Iterable[Move]) -> int:
    return sum(move.region.numel for move in moves)


class Round(NamedTuple):
    """One exchange along a column: each of its ranks has a piece of its row's updates, and gets one of each row's."""

    # Where this rank's piece is in the updates that it has.
    start: int
    # The elements of each rank's piece, and the pieces, in the order of the column.
    sizes: list[int]
    moves: list[Move]


class Bucket(NamedTuple):
    """Matrices of one ``grid`` that are processed together, as one rank sees them. ``number`` counts those of the grid.

    The scatter is the reverse of the gather: an update has the place of the momentum that it came from.
    """

    grid: Grid
    number: int
    matrices: list[Matrix]
    # Those that this rank orthogonalizes.
    owned: list[Matrix]
    # The regions that this rank stores of its row's matrices, in the order of owners, but those of its own matrices last.
    held: list[Move]
    # The regions of its own matrices: those that it stores itself, and then those of its peers, in their order.
    gathered: list[Move]
    # The regions that this rank stores of matrices that other rows own.
    elsewhere: list[Move]
    # The ranks of the row and of the column, in ascending order.
    row: Ranks
    column: Ranks
    # The elements that this rank sends to each rank of its row, and receives from it; none to itself.
    send_sizes: list[int]
    receive_sizes: list[int]
    rounds: list[Round]

    @property
    def name(self) -> str:
        return f"bucket {self.number} of {len(self.row) * len(self.column)} ranks"


class Phase(Enum):
    """The work of an operation on a bucket."""

    # Blend momentum and gradient, and start to send this rank's shards to the owners.
    GATHER = "gather"
    # Wait for the shards, orthogonalize, and start to send the updates to the ranks of the row.
    COMPUTE = "orthogonalize"
    # Wait for the updates of the row, and start the rounds along the column. Only grids with rows and columns have it.
    FORWARD = "forward"
    # Wait for updates, and apply them.
    APPLY = "apply"


def has_forward(grid: Grid) -> bool:
    """Whether ``grid`` has rows and columns of several ranks, so that updates travel along both."""
    return len(grid) > 1 and len(grid[0]) > 1


def is_alone(grid: Grid) -> bool:
    """Whether ``grid`` has one rank, which has no transfers to hide."""
    return len(grid) == 1 and len(grid[0]) == 1


def buckets_in_flight(grid: Grid, prefetch_count: int) -> int:
    """How many buckets of ``grid`` have memory at the same time. With rows and columns, updates travel for two turns."""
    return 1 if is_alone(grid) else prefetch_count + 2 + has_forward(grid)


# A phase, and the index of its bucket among those of the rank.
Operation = tuple[Phase, int]
# Matrix -> the global rank that orthogonalizes it.
Owners = Mapping[Matrix, int]


class Plan(NamedTuple):
    """Everything that a rank does in a step."""

    owners: Owners = {}
    # Those of each grid that this rank is in, in the order of all ranks.
    members: Mapping[Grid, Sequence[Matrix]] = {}
    buckets: Sequence[Bucket] = ()
    operations: Sequence[Operation] = ()


def make_plan(
    owners: Owners, rank: int, prefetch_count: int = 1, one_at_a_time: bool = False
) -> Plan:
    """The plan of ``rank``. With ``one_at_a_time``, each matrix is a bucket, in the order of owners."""
    buckets: list[Bucket] = []
    members_of: dict[Grid, list[Matrix]] = {}
    own = [matrix for matrix in owners if rank in matrix.layout.places]
    for grid, members in by_grid(own).items():
        members_of[grid] = members
        if one_at_a_time:
            ordered = sorted(members, key=lambda matrix: owners[matrix])
            together = [[matrix] for matrix in ordered]
        else:
            together = cut_into_buckets(owners, members, prefetch_count)
        for number, of_bucket in enumerate(together):
            buckets.append(_bucket(owners, rank, number, of_bucket))
    order = [(bucket.grid, bucket.number) for bucket in buckets]
    is_serial = one_at_a_time and prefetch_count == 0
    operations = order_of_operations(order, prefetch_count, is_serial)
    return Plan(owners, members_of, buckets, operations)


def by_grid(matrices: Iterable[Matrix]) -> dict[Grid, list[Matrix]]:
    """Grid -> its matrices that are not frozen. Grids are in the order of all ranks."""
    members: dict[Grid, list[Matrix]] = {}
    for matrix in matrices:
        if not matrix.param.frozen:
            members.setdefault(matrix.layout.grid, []).append(matrix)
    return {grid: members[grid] for grid in sorted(members, key=place_in_order)}


def order_of_operations(
    buckets: Sequence[tuple[Grid, int]], prefetch_count: int, is_serial: bool = False
) -> list[Operation]:
    """The operations of ``buckets``, each a grid and a number, in the order of all ranks. Each grid has ``prefetch_count``
    gathers in flight while it orthogonalizes. If ``is_serial``, or where one rank is alone, a bucket is finished before the
    next one begins.

    Each operation has a key, and a rank sorts its own. No key depends on what a rank knows of other grids, and all ranks of
    a grid have the same buckets. So the keys are one order of all operations, of which each rank runs a part, and ranks
    cannot wait for each other in a circle.
    """
    counts = Counter(grid for grid, _ in buckets)
    keyed: list[tuple[tuple, Operation]] = []
    for index, (grid, k) in enumerate(buckets):
        place, last = place_in_order(grid), counts[grid] - 1
        ahead, later = prefetch_count, 1
        if is_serial or is_alone(grid):
            ahead = later = 0

        def add(phase: Phase, turn: int, step: int) -> None:
            """``step`` orders the operations of a turn, which begins with the compute of its number."""
            key: tuple = (int(turn >= 0), place, turn, step)
            if turn > last:
                # After the last compute, there are only updates to forward and to apply.
                key = 2, step, place, turn
            keyed.append((key, (phase, index)))

        add(Phase.GATHER, k - ahead - 1, 3)
        add(Phase.COMPUTE, k, 0)
        turn = k + later
        if has_forward(grid):
            add(Phase.FORWARD, turn, 1)
            turn += later
        add(Phase.APPLY, turn, 2)
    return [operation for _, operation in sorted(keyed, key=lambda pair: pair[0])]


# Owners


def assign_owners(
    matrices: Sequence[Matrix], starts: Mapping[Grid, int] = {}
) -> Owners:
    """One owner for each matrix, out of the ranks of its grid; the first one for a frozen matrix.

    Heaviest first, each to the row with the least work, and in it to the rank with the least work. Ties begin at the place
    of the grid in ``starts``. A grid counts the work of its ranks in grids that contain it. It counts no other work, in which
    its ranks differ.
    """
    owners = {matrix: matrix.layout.ranks[0] for matrix in matrices}
    # Grid -> the work that it gave to each of its ranks.
    given: dict[Grid, Counter[int]] = {}
    for grid, members in by_grid(matrices).items():
        ranks = ranks_of(grid)
        loads = dict.fromkeys(ranks, 0)
        for other, work in given.items():
            if {*ranks} <= {*ranks_of(other)}:
                for rank in ranks:
                    loads[rank] += work[rank]
        first_row, first_shard = divmod(starts.get(grid, 0) % len(ranks), len(grid[0]))
        # Each row with its work and its ranks, and each rank with its work. The distances from the start decide ties.
        rows: list[tuple[int, int, list[tuple[int, int, int]]]] = []
        for place, row in enumerate(grid):
            in_row: list[tuple[int, int, int]] = []
            for shard, rank in enumerate(row):
                in_row.append((loads[rank], (shard - first_shard) % len(row), rank))
            heapq.heapify(in_row)
            load = sum(loads[rank] for rank in row)
            rows.append((load, (place - first_row) % len(grid), in_row))
        heapq.heapify(rows)
        own_work = given[grid] = Counter()
        for matrix in sorted(members, key=lambda m: (-m.flops, -m.numel)):
            row_load, row_distance, in_row = rows[0]
            heapq.heapreplace(rows, (row_load + matrix.flops, row_distance, in_row))
            load, distance, rank = in_row[0]
            heapq.heapreplace(in_row, (load + matrix.flops, distance, rank))
            owners[matrix] = rank
            own_work[rank] += matrix.flops
    return owners


# Buckets


def cut_into_buckets(
    owners: Owners, members: Sequence[Matrix], prefetch_count: int = 1
) -> list[list[Matrix]]:
    """The ``members``, which have one grid, in buckets whose owners work at the same time.

    A rank waits for a bucket's updates, so a bucket takes as long as its busiest owner. The first number of buckets wins
    whose sum is close to the busiest owner's own work, or else the one with the shortest sum: four, or as many as keep
    what an owner gathers within bounds, then fewer, then a few more.
    """
    of_owner: dict[int, list[Matrix]] = {}
    for matrix in sorted(members, key=lambda m: (-m.flops, m.shape)):
        of_owner.setdefault(owners[matrix], []).append(matrix)
    # The owner of the heaviest matrix first.
    queues = [*of_owner.values()]
    layout = members[0].layout
    bound = max(1, BUCKET_BYTES // NS_DTYPE.itemsize)
    largest = max(matrix.numel for matrix in members)
    in_flight = buckets_in_flight(layout.grid, prefetch_count)
    most_gathered = max(sum(matrix.numel for matrix in queue) for queue in queues)
    busiest = max(sum(matrix.flops for matrix in queue) for queue in queues)
    fewest = math.ceil(most_gathered / (bound + largest))
    # Equal shapes form large batches where nothing travels.
    usual = 1 if is_alone(layout.grid) else MAX_BUCKETS
    wanted = max(fewest, usual)
    shortest: list[list[Matrix]] = []
    least = math.inf
    more = wanted + math.ceil(wanted / 16)
    for count in (*range(wanted, fewest - 1, -1), more):
        total, buckets = _spread(
            queues, count, in_flight, in_flight * (bound + largest)
        )
        if total < least:
            shortest, least = buckets, total
        if least <= MAX_STRETCH * busiest:
            break
    # A bucket for each matrix of an owner always fits.
    return shortest or [[*filter(None, nth)] for nth in zip_longest(*queues)]


def _spread(
    queues: Sequence[Sequence[Matrix]], count: int, in_flight: int, most: int
) -> tuple[float, list[list[Matrix]]]:
    """The work of the buckets' busiest owners, added up, and ``count`` buckets, of which an owner gathers at most ``most``
    elements in any ``in_flight`` in a row. The work is infinite if the matrices do not fit.

    Each owner in turn puts its matrices, heaviest first, into the bucket whose height grows least, and among equals into the
    one where it has the least work.
    """
    buckets: list[list[Matrix]] = [[] for _ in range(count)]
    heights = [0] * count
    for queue in queues:
        work = [0] * count
        # The elements that the owner may still gather in the buckets in flight that begin with each one, and in each one.
        free, room = [most] * count, [most] * count
        for matrix in queue:
            fitting = [k for k in range(count) if room[k] >= matrix.numel]
            if not fitting:
                return math.inf, []
            bucket = min(
                fitting,
                key=lambda k: (max(0, work[k] + matrix.flops - heights[k]), work[k]),
            )
            buckets[bucket].append(matrix)
            work[bucket] += matrix.flops
            heights[bucket] = max(heights[bucket], work[bucket])
            first = max(0, bucket - in_flight + 1)
            for start in range(first, bucket + 1):
                free[start] -= matrix.numel
            for k in range(first, min(count, bucket + in_flight)):
                room[k] = min(free[max(0, k - in_flight + 1) : k + 1])
    while not buckets[-1]:
        buckets.pop()
    # An empty bucket between others would not keep them apart.
    return (sum(heights) if all(buckets) else math.inf), buckets


# Exchanges


def _bucket(owners: Owners, rank: int, number: int, members: list[Matrix]) -> Bucket:
    """A bucket of the matrices ``members`` as ``rank`` sees it."""
    owned_by: dict[int, list[Matrix]] = {}
    for matrix in members:
        owned_by.setdefault(owners[matrix], []).append(matrix)
    layout = members[0].layout
    grid = layout.grid
    # All-to-alls go by the order of a group's ranks, which is ascending.
    row, column = row_and_column(grid, rank)

    def moves(owner: int, holder: int) -> list[Move]:
        """The regions of an owner's matrices that ``holder`` stores."""
        found: list[Move] = []
        for matrix in owned_by.get(owner, ()):
            regions = matrix.layout.regions_of(holder)
            found += [Move(matrix, region) for region in regions]
        return found

    def held_by(holder: int) -> list[Move]:
        """The regions that ``holder`` stores of its row's matrices, its own ones last."""
        of_replica, _ = layout.places[holder]
        own_last = sorted(grid[of_replica], key=lambda owner: (owner == holder, owner))
        return [move for owner in own_last for move in moves(owner, holder)]

    gathered = moves(rank, rank)
    send_sizes, receive_sizes = [0] * len(row), [0] * len(row)
    for place, peer in enumerate(row):
        if peer != rank:
            received = moves(rank, peer)
            gathered += received
            receive_sizes[place] = numel_of(received)
            send_sizes[place] = numel_of(moves(peer, rank))
    elsewhere: list[Move] = []
    for owner in owned_by.keys() - {*row}:
        elsewhere += moves(owner, rank)
    rounds: list[Round] = []
    if len(column) > 1:
        rounds = _rounds([held_by(peer) for peer in column], column.index(rank))
    return Bucket(
        grid,
        number,
        members,
        owned_by.get(rank, []),
        held_by(rank),
        gathered,
        elsewhere,
        row,
        column,
        send_sizes,
        receive_sizes,
        rounds,
    )


def _rounds(updates: Sequence[Sequence[Move]], place: int) -> list[Round]:
    """The rounds along a column whose ranks have ``updates`` after the scatter, as the rank at ``place`` in it sees them."""
    senders = [at for at, moves in enumerate(updates) if moves]
    rounds: list[Round] = []
    for first in range(0, len(senders), MOST_SENDERS):
        some = senders[first : first + MOST_SENDERS]
        share = max(1, ROUND_BYTES // NS_DTYPE.itemsize // len(some))
        pieces_of = {at: _pieces(updates[at], share) for at in some}
        start = 0
        for number in range(max(map(len, pieces_of.values()))):
            sizes = [0] * len(updates)
            moves: list[Move] = []
            for at, pieces in pieces_of.items():
                if number < len(pieces):
                    sizes[at] = numel_of(pieces[number])
                    moves += pieces[number]
            rounds.append(Round(start, sizes, moves))
            start += sizes[place]
    return rounds


def _pieces(moves: Sequence[Move], most: int) -> list[list[Move]]:
    """The ``moves`` in pieces of at most ``most`` elements. Regions that are larger are cut by rows."""
    pieces: list[list[Move]] = []
    room = 0
    for matrix, region in moves:
        rows = max(1, most // max(1, region.width))
        for first in range(0, region.height, rows):
            part = region.rows(first, min(rows, region.height - first))
            if not pieces or room < part.numel:
                pieces.append([])
                room = most
            pieces[-1].append(Move(matrix, part))
            room -= part.numel
    return pieces
