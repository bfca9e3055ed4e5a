"""What the steps of one optimizer cost, in words: a line for the log, a page for a person who asks.

A rank knows the schedules of the groups that it is in, whole. So nothing is asked of other ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple, TYPE_CHECKING

from torch.optim._muon_engine.layouts import listed
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops
from torch.optim._muon_engine.schedule.specs import (
    relay_sizes,
    RELAYS_IN_FLIGHT,
    slot_sizes,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim._muon_engine.layouts import Layout
    from torch.optim._muon_engine.schedule.specs import Bucket, BucketSpec, Schedule


# Ranks of a group that get a line each; of more, the busiest, the idlest and this one.
MOST_RANKS = 16
# Holders times matrices above which a rank's bytes take seconds to count: then only of few ranks.
MOST_SHARDS = 1_000_000
# A busiest owner below so many times the mean is not worth a word.
EVEN = 1.1


class Cost(NamedTuple):
    """What one rank has to do for one group in a step: bytes, and floating-point operations.

    These are of five quintic steps, by which owners are chosen, whatever ``ns_steps`` and ``ns_algorithm`` are.
    """

    rank: int
    matrices: tuple[int, ...]
    flops: int
    sends: int
    receives: int
    buffers: int


class GroupReport:
    """The part of ``schedule`` that is of ``group``.

    Args:
        slots: buckets of a group that have memory at one time.
    """

    def __init__(self, schedule: Schedule, group: tuple[int, ...], slots: int) -> None:
        self.schedule = schedule
        self.group = group
        self.slots = slots
        self.buckets = [b for b in schedule.buckets if b.group == group]
        self.owned: dict[int, list[int]] = {rank: [] for rank in group}
        for bucket in self.buckets:
            for matrix in bucket.matrices:
                self.owned[schedule.owners[matrix]].append(matrix)
        self.loads = {
            rank: sum(map(self.flops_of, owned)) for rank, owned in self.owned.items()
        }

    def flops_of(self, matrix: int) -> int:
        return newton_schulz_flops(self.schedule.layouts[matrix].shape)

    @property
    def matrices(self) -> list[int]:
        return sorted(itertools.chain.from_iterable(self.owned.values()))

    @property
    def mean(self) -> float:
        return sum(self.loads.values()) / len(self.group)

    @property
    def stretch(self) -> float:
        """The busiest owner's work, in means."""
        return max(self.loads.values()) / self.mean if self.mean else 1.0

    @property
    def idle(self) -> list[int]:
        return [rank for rank, owned in self.owned.items() if not owned]

    def cost(self, rank: int) -> Cost:
        specs = [self.schedule.spec(b, rank, b.group) for b in self.buckets]
        sends = receives = 0
        for bucket, spec in zip(self.buckets, specs, strict=True):
            out, back = _bytes_of(bucket, spec, rank)
            sends, receives = sends + out, receives + back
        return Cost(
            rank,
            tuple(self.owned[rank]),
            self.loads[rank],
            sends,
            receives,
            sum(sum(sizes) for sizes in slot_sizes(specs, self.slots)),
        )

    def shown(self, rank: int) -> list[int]:
        """The ranks that get a line, ``rank`` among them."""
        if len(self.group) <= MOST_RANKS:
            return list(self.group)
        each = MOST_RANKS // 4
        if len(self.group) * len(self.matrices) > MOST_SHARDS:
            each = 1
        by_load = sorted(self.group, key=lambda r: (-self.loads[r], r))
        return sorted({rank, *by_load[:each], *by_load[-each:]})

    def lines(self, rank: int, names: Sequence[str]) -> list[str]:
        kinds = Counter(map(_way_of, self.buckets))
        how = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        found = [
            f"Ranks {spans(self.group)}: {_count(len(self.matrices), 'matrix', 'matrices')} in {_count(len(self.buckets), 'bucket', 'buckets')} "
            f"({how}); {_flops(sum(self.loads.values()))} in five Newton-Schulz steps, the busiest owner "
            f"{self.stretch:.2f} of the mean",
        ]
        rows = [
            (
                "rank",
                "owns",
                "Newton-Schulz",
                "x mean",
                "sends",
                "receives",
                "buffers",
                "",
            )
        ]
        shown = self.shown(rank)
        for cost in map(self.cost, shown):
            of_mean = cost.flops / self.mean if self.mean else 1.0
            rows.append(
                (
                    str(cost.rank),
                    str(len(cost.matrices)),
                    _flops(cost.flops),
                    f"{of_mean:.2f}",
                    _bytes(cost.sends),
                    _bytes(cost.receives),
                    _bytes(cost.buffers),
                    listed([names[m] for m in cost.matrices], 3),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths)]
            found.append(("  " + "  ".join([*cells, row[-1]])).rstrip())
        if len(shown) < len(self.group):
            found.append(f"  {len(self.group) - len(shown):,} more ranks are not shown")
        return found

    def advice(self, names: Sequence[str]) -> list[str]:
        """What keeps this group's steps from being shorter."""
        found = []
        heaviest = max(self.matrices, key=self.flops_of)
        share = self.flops_of(heaviest) / self.mean if self.mean else 1.0
        if share > EVEN and len(self.group) > 1:
            found.append(
                f"{names[heaviest]} {tuple(self.schedule.layouts[heaviest].shape)} alone takes {share:.1f} times the mean "
                f"work of ranks {spans(self.group)}. A step lasts at least as long as this matrix takes, however many ranks there are"
            )
        elif self.stretch > EVEN:
            found.append(
                f"the busiest owner of ranks {spans(self.group)} has {self.stretch:.2f} times the mean work of this group. "
                "Matrices are not divided, and ranks that are busy for a wider group get less here"
            )
        few = len(self.matrices) < len(self.group)
        if self.idle and few and len(self.group) > 1:
            found.append(
                f"{len(self.idle)} of {len(self.group)} ranks own nothing ({spans(self.idle)}): this group has "
                f"{_count(len(self.matrices), 'matrix', 'matrices')}"
            )
        return found


def relay_memory(schedule: Schedule, rank: int) -> int:
    """Bytes that ``rank`` has for relays, of all groups together."""
    relays = [
        schedule.relays(bucket, rank)
        for bucket in schedule.buckets
        if bucket.relayed and rank in bucket.group
    ]
    sent, received = relay_sizes(relays, rank)
    return sent + RELAYS_IN_FLIGHT * received


def reports(schedule: Schedule, slots: int) -> list[GroupReport]:
    """One for each group of ranks, in the global order."""
    groups = dict.fromkeys(bucket.group for bucket in schedule.buckets)
    return [GroupReport(schedule, group, slots) for group in groups]


def in_one_line(schedule: Schedule, rank: int, slots: int) -> str:
    found = reports(schedule, slots)
    costs = [report.cost(rank) for report in found]
    buffers = sum(c.buffers for c in costs) + relay_memory(schedule, rank)
    matrices = sum(len(report.matrices) for report in found)
    owners = {r for report in found for r, owned in report.owned.items() if owned}
    ranks = {r for report in found for r in report.group}
    return (
        f"{_count(matrices, 'matrix', 'matrices')}, owned by {len(owners)} of {len(ranks)} ranks; "
        f"{_count(len(schedule.buckets), 'bucket', 'buckets')} in {_count(len(found), 'group', 'groups')} of ranks; a step sends {_bytes(sum(c.sends for c in costs))} and receives "
        f"{_bytes(sum(c.receives for c in costs))} here, through {_bytes(buffers)} of buffers; busiest "
        f"owner {max((report.stretch for report in found), default=1.0):.2f} of the mean"
    )


def in_full(
    schedule: Schedule, rank: int, world_size: int, slots: int, advice: Sequence[str]
) -> str:
    """The page of :meth:`Muon.describe`; ``advice`` is what the engine knows beside the schedule."""
    names = [_name(layout) for layout in schedule.layouts]
    found = reports(schedule, slots)
    numel = sum(layout.numel for layout in schedule.layouts)
    turns = (
        "one owner at a time" if schedule.one_owner_at_a_time else "all owners at once"
    )
    lines = [
        f"Muon on rank {rank} of {world_size}: {_count(len(schedule.layouts), 'matrix', 'matrices')} with {numel:,} elements, "
        f"{_count(len(found), 'group', 'groups')} of ranks; {turns}, up to {slots} buckets of a group in memory",
    ]
    better = list(advice)
    for report in found:
        lines += ["", *report.lines(rank, names)]
        better += report.advice(names)
    passing = relay_memory(schedule, rank)
    if passing:
        lines += [
            "",
            f"For relays of all groups rank {rank} has {_bytes(passing)} more.",
        ]
    if better:
        lines += [
            "",
            "What to know, and what would make it better:",
            *(f"- {line}" for line in better),
        ]
    return "\n".join(lines)


def _bytes_of(bucket: Bucket, spec: BucketSpec, rank: int) -> tuple[int, int]:
    """Bytes that leave and reach ``rank``; what a broadcast passes on counts once."""
    sends = receives = 0
    for send, recv, hops in (
        (spec.gather_send, spec.gather_recv, spec.gather_hops),
        (spec.scatter_send, spec.scatter_recv, spec.scatter_hops),
    ):
        if hops is None:
            sends, receives = sends + send.nbytes, receives + recv.nbytes
            continue
        for hop in (hops.first, hops.second):
            others = [at for at, peer in enumerate(hop.ranks) if peer != rank]
            sends += sum(hop.sends[at] for at in others) * send.dtype.itemsize
            receives += sum(hop.receives[at] for at in others) * recv.dtype.itemsize
    for relay in spec.relays:
        if relay.source == rank:
            sends += relay.packed.nbytes
        else:
            receives += relay.packed.nbytes
    return sends, receives


def _way_of(bucket: Bucket) -> str:
    nodes = bucket.node_size
    ways = ["relayed along replicas"] if bucket.relayed else []
    ways += [f"in two levels by nodes of {nodes}"] if nodes > 1 else []
    return " and ".join(ways) or "exchanged directly"


def spans(ranks: Iterable[int]) -> str:
    """Sorted ``ranks`` in few words, as in "0-7, 16-23"."""
    runs = [
        [rank for _, rank in run]
        for _, run in itertools.groupby(
            enumerate(ranks), lambda pair: pair[1] - pair[0]
        )
    ]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return listed(words, 6)


def _name(layout: Layout) -> str:
    key = layout.key
    name = key.name if key.name is not None else f"parameter {key.index}"
    return f"{name}[{key.sub}]" if key.sub else name


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _flops(flops: float) -> str:
    for unit in ("FLOP", "KFLOP", "MFLOP", "GFLOP"):
        if flops < 999.95:
            return f"{flops:.1f} {unit}"
        flops /= 1000
    return f"{flops:,.1f} TFLOP"


def _bytes(nbytes: int) -> str:
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    size = nbytes / 1024
    for unit in ("KiB", "MiB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
