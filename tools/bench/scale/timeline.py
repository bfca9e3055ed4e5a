"""Plays one step in the order of ``schedule/order.py`` for all ranks at once: vectors of times, in seconds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.order import Phase, step_order

from .costs import DEFAULT, Options, PACK, passes_of
from .hardware import Hardware
from .plan import BucketPlan, IN, Plan, Wave


class Event(NamedTuple):
    """Something that takes each of ``ranks`` from ``begin`` to ``end``."""

    kind: str
    ranks: NDArray
    begin: NDArray
    end: NDArray


class Step(NamedTuple):
    """When each rank is done, how long it has orthogonalized, and how long its passes over memory took, shape (ranks,);
    and all events.
    """

    done: NDArray
    busy: NDArray
    passes: NDArray
    events: list[Event]

    @property
    def seconds(self) -> float:
        return float(self.done.max())


class Timeline:
    """One step. ``now`` is the time at which each rank's compute has arrived."""

    def __init__(self, plan: Plan, hardware: Hardware, options: Options) -> None:
        self.plan = plan
        self.hardware = hardware
        self.options = options
        self.now = np.zeros(plan.world)
        self.busy = np.zeros(plan.world)
        self.passes = np.zeros(plan.world)
        self.events: list[Event] = []
        # When the link of each rank is free: its transfers take turns.
        self.free = np.zeros(plan.world)
        # When the last collective of each communicator is over.
        self.over: dict[object, NDArray | float] = {}
        # By bucket: when its gather, or its scatter, is over on each rank.
        self.arrived: dict[int, NDArray] = {}

    def run(self) -> Step:
        """Plays the engine's own order. Groups that share no rank run at the same time, because each operation
        only reads and moves the times of its bucket's ranks.
        """
        groups = [bucket.bucket.ranks for bucket in self.plan.buckets]
        prefetch = self.options.prefetch
        one_at_a_time = self.plan.one_owner_at_a_time and prefetch == 0
        of_element = passes_of(self.options)
        # By group: the buckets whose results were applied, and whose relays have not begun.
        waiting: dict[tuple[int, ...], list[BucketPlan]] = {}
        for phase, index in step_order(groups, prefetch, one_at_a_time):
            bucket = self.plan.buckets[index]
            to_relay = waiting.setdefault(groups[index], [])
            held, sent, applied, packed = bucket.elements
            if phase is Phase.GATHER:
                nbytes = of_element.accumulate * held + of_element.blend * sent
                self.go_through(bucket, nbytes)
                self.exchange(bucket, "gather")
            elif phase is Phase.COMPUTE:
                self.wait(bucket)
                self.go_through(bucket, PACK * packed)
                self.orthogonalize(bucket, to_relay)
                to_relay.clear()
            elif phase is Phase.SCATTER:
                self.exchange(bucket, "scatter")
            elif phase is Phase.APPLY:
                self.wait(bucket)
                self.go_through(bucket, of_element.apply * applied)
                to_relay.append(bucket)
            else:
                to_relay.remove(bucket)
                self.now = self.relay([bucket])
                self.apply_relayed([bucket])
        return Step(self.now, self.busy, self.passes, self.events)

    def go_through(self, bucket: BucketPlan, nbytes: NDArray) -> None:
        """A pass of each rank over ``nbytes`` of its memory."""
        seconds = nbytes / self.hardware.memory_bandwidth
        begin = self.now[bucket.ranks]
        end = begin + seconds
        self.now[bucket.ranks] = end
        self.passes[bucket.ranks] += seconds
        if seconds.any():
            self.events.append(Event("passes", bucket.ranks, begin, end))

    def apply_relayed(self, buckets: Sequence[BucketPlan]) -> None:
        """The passes over what relays brought."""
        apply = passes_of(self.options).apply
        for bucket in buckets:
            relayed = bucket.elements.held - bucket.elements.applied
            self.go_through(bucket, apply * relayed)

    def exchange(self, bucket: BucketPlan, kind: str) -> None:
        """A gather or scatter; a second hop begins when the first is over."""
        ranks = bucket.ranks
        over = self.now[ranks]
        for hop in getattr(bucket, kind):
            communicator = hop.along, bucket.bucket.ranks
            begin = np.maximum(over, self.free[ranks])
            begin = np.maximum(begin, self.over.get(communicator, 0.0))
            sent = begin + hop.seconds(self.hardware)
            self.free[ranks] = sent
            # A rank and the ranks that it receives from have sent, and its link has received.
            receiving = hop.seconds(self.hardware, slice(IN, None))
            received = hop.latest(begin) + receiving
            over = np.maximum(sent, hop.latest(sent))
            over = np.maximum(over, received)
            self.over[communicator] = over
            self.events.append(Event(kind, ranks, begin, over))
        self.arrived[id(bucket)] = over

    def broadcast(self, wave: Wave) -> NDArray:
        """When each of the ring's ranks has everything; shape (sets, replicas)."""
        ranks = wave.ranks
        communicators = ranks.shape, int(ranks[0, 0])
        begin = np.maximum(self.now[ranks], self.free[ranks])
        begin = np.maximum(begin, self.over.get(communicators, 0.0))
        begin = begin.max(1, keepdims=True)
        seconds, hops = wave.seconds(self.hardware)
        over = begin + seconds[:, None]
        self.free[ranks] = over
        self.over[communicators] = over
        begin = np.broadcast_to(begin, ranks.shape)
        end = np.broadcast_to(over + hops, ranks.shape)
        self.events.append(Event("relay", ranks.ravel(), begin.ravel(), end.ravel()))
        return end

    def wait(self, bucket: BucketPlan) -> None:
        arrived = self.arrived.pop(id(bucket))
        now = self.now[bucket.ranks]
        self.now[bucket.ranks] = np.maximum(now, arrived)

    def orthogonalize(self, bucket: BucketPlan, to_relay: list[BucketPlan]) -> None:
        """Each rank's matrices of ``bucket``, while the results of the buckets ``to_relay`` travel. The engine has
        two relays in flight, which take turns with the batches. Here a link takes them in turn, and batches do
        not end.
        """
        relayed = self.relay(to_relay)
        ranks = bucket.ranks[bucket.owners]
        begin = self.now[ranks]
        seconds = bucket.seconds(self.hardware, self.options.algorithm)
        end = begin + seconds
        self.busy[ranks] += seconds
        self.now[ranks] = end
        self.events.append(Event("orthogonalize", ranks, begin, end))
        self.now = np.maximum(self.now, relayed)
        self.apply_relayed(to_relay)

    def relay(self, buckets: list[BucketPlan]) -> NDArray:
        """Starts all broadcasts of ``buckets``; when each rank has everything from them."""
        arrived = self.now.copy()
        for bucket in buckets:
            for wave in bucket.relays:
                received = self.broadcast(wave)
                arrived[wave.ranks] = np.maximum(arrived[wave.ranks], received)
        return arrived


def simulate(plan: Plan, hardware: Hardware, options: Options = DEFAULT) -> Step:
    return Timeline(plan, hardware, options).run()
