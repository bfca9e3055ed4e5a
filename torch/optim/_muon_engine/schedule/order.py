"""The order of a step, as data: which operations a step has, one after another.

``print(*step_order("aaaa", prefetch_count=1))`` prints ``G0 G1 C0 S0 G2 C1 S1 A0 G3 C2 S2 A1 C3 S3 A2 R2 A3 R3``
for four buckets of one group of ranks. While bucket 1 is orthogonalized (C1), the gather of bucket 2 (G2) is in
flight, and the results of bucket 0 are on their way back, from S0 to A0.

All ranks have one order, and each rank runs the operations of its own groups. Between two operations of a group,
a rank launches and awaits no collective of this group. So two ranks come to the collectives that they share in
the same order, and ranks cannot wait for each other in a circle.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple


# Number of relays of a rank whose results have memory at the same time.
RELAYS_IN_FLIGHT = 2


class Phase(Enum):
    """The work of an operation on a bucket, on all of its ranks."""

    # Holders prepare their shards and start to send them to the owners.
    GATHER = "G"
    # Owners wait for the shards and orthogonalize. Between the batches run the relays of the same group's bucket n-2,
    # whose results were applied before.
    COMPUTE = "C"
    # Owners start to send the updates to the holders.
    SCATTER = "S"
    # Holders wait for the updates and apply them.
    APPLY = "A"
    # Replicas pass on the updates of a bucket whose relays no later COMPUTE of its group has run.
    RELAY = "R"


class Operation(NamedTuple):
    """A phase of the ``bucket``-th bucket of a schedule."""

    phase: Phase
    bucket: int

    def __str__(self) -> str:
        return f"{self.phase.value}{self.bucket}"


def step_order(
    groups: Sequence[Hashable],
    prefetch_count: int,
    one_at_a_time: bool = False,
) -> list[Operation]:
    """The operations of a step, in the one order of all ranks.

    ``groups`` has the group of ranks of each bucket, in the order of buckets. Each group has ``prefetch_count``
    gathers in flight while it orthogonalizes. With ``one_at_a_time``, a bucket is finished before its group
    orthogonalizes the next one.
    """
    buckets_of: dict[Hashable, list[int]] = {}
    for bucket, group in enumerate(groups):
        buckets_of.setdefault(group, []).append(bucket)
    ahead = prefetch_count + 1

    order: list[Operation] = []
    for buckets in buckets_of.values():
        order += [Operation(Phase.GATHER, bucket) for bucket in buckets[:ahead]]
    for bucket, group in enumerate(groups):
        buckets = buckets_of[group]
        place = buckets.index(bucket)
        order.append(Operation(Phase.COMPUTE, bucket))
        order.append(Operation(Phase.SCATTER, bucket))
        if one_at_a_time:
            order.append(Operation(Phase.APPLY, bucket))
            order.append(Operation(Phase.RELAY, bucket))
        elif place > 0:
            # Its results are on their way back.
            order.append(Operation(Phase.APPLY, buckets[place - 1]))
        # It takes the memory of the bucket whose results were applied above.
        if place + ahead < len(buckets):
            order.append(Operation(Phase.GATHER, buckets[place + ahead]))
    if one_at_a_time:
        return order

    # Groups end in the order of their last buckets.
    for group in sorted(buckets_of, key=lambda group: buckets_of[group][-1]):
        buckets = buckets_of[group]
        last = buckets[-1]
        if len(buckets) > 1:
            # The relays of earlier buckets ran in a COMPUTE.
            order.append(Operation(Phase.RELAY, buckets[-2]))
        order.append(Operation(Phase.APPLY, last))
        order.append(Operation(Phase.RELAY, last))
    return order


class Action(Enum):
    """The kinds of operations of one rank. Actions that wait have a counterpart that launches a collective."""

    GATHER = "gather"
    AWAIT_GATHER = "wait for gather"
    # As profilers, errors and the simulator call it.
    COMPUTE = "orthogonalize"
    SCATTER = "scatter"
    AWAIT_SCATTER = "wait for scatter"
    APPLY = "apply"
    RELAY = "relay"
    AWAIT_RELAY = "wait for relay"
    APPLY_RELAYED = "apply relayed"


class LocalOperation(NamedTuple):
    """One rank's action on a bucket, and on which of its batches or relays."""

    action: Action
    bucket: Any
    item: Any = None


class LocalWork(NamedTuple):
    """One rank's share of a bucket: the batches that it orthogonalizes, and its relays."""

    bucket: Any
    batches: Sequence[Any] = ()
    relays: Sequence[Any] = ()


def local_order(
    order: Sequence[Operation],
    groups: Sequence[Hashable],
    work_of: Mapping[int, LocalWork],
) -> list[LocalOperation]:
    """The operations of one rank in a step with this ``order``. ``work_of`` has the buckets of its groups."""
    operations: list[LocalOperation] = []
    # By group: the buckets whose results were applied, and whose relays have not begun.
    waiting: dict[Hashable, list[int]] = {}
    for phase, index in order:
        if index not in work_of:
            continue
        work = work_of[index]
        bucket = work.bucket
        to_relay = waiting.setdefault(groups[index], [])
        if phase is Phase.GATHER:
            operations.append(LocalOperation(Action.GATHER, bucket))
        elif phase is Phase.COMPUTE:
            operations.append(LocalOperation(Action.AWAIT_GATHER, bucket))
            turns: list[list[LocalOperation]] = []
            for earlier in to_relay:
                turns += _relay_turns(work_of[earlier])
            to_relay.clear()
            for batch in work.batches:
                if turns:
                    operations += turns.pop(0)
                operations.append(LocalOperation(Action.COMPUTE, bucket, batch))
            for turn in turns:
                operations += turn
        elif phase is Phase.SCATTER:
            operations.append(LocalOperation(Action.SCATTER, bucket))
        elif phase is Phase.APPLY:
            operations.append(LocalOperation(Action.AWAIT_SCATTER, bucket))
            operations.append(LocalOperation(Action.APPLY, bucket))
            to_relay.append(index)
        else:
            to_relay.remove(index)
            for turn in _relay_turns(work):
                operations += turn
    return operations


def _relay_turns(work: LocalWork) -> list[list[LocalOperation]]:
    """The relays of a bucket, in turns. Each turn but the first one waits for a relay, and starts another one."""
    bucket, relays = work.bucket, list(work.relays)
    started = min(RELAYS_IN_FLIGHT, len(relays))
    turns = [
        [LocalOperation(Action.RELAY, bucket, relay) for relay in relays[:started]]
    ]
    for place, relay in enumerate(relays):
        turn = [
            LocalOperation(Action.AWAIT_RELAY, bucket, relay),
            LocalOperation(Action.APPLY_RELAYED, bucket, relay),
        ]
        for following in relays[place + started : place + started + 1]:
            turn.append(LocalOperation(Action.RELAY, bucket, following))
        turns.append(turn)
    return turns if relays else []
