"""Plays one step in the order of ``schedule/order.py`` for all ranks at once: vectors of times, in seconds."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.order import (
    Phase,
    RELAYS_IN_FLIGHT,
    step_order,
)
from torch.optim._newton_schulz import NS_DTYPE

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
                self.go_through(bucket.ranks, nbytes)
                self.exchange(bucket, "gather")
            elif phase is Phase.COMPUTE:
                self.wait(bucket)
                self.go_through(bucket.ranks, PACK * packed)
                self.orthogonalize(bucket, to_relay)
                to_relay.clear()
            elif phase is Phase.SCATTER:
                self.exchange(bucket, "scatter")
            elif phase is Phase.APPLY:
                self.wait(bucket)
                self.go_through(bucket.ranks, of_element.apply * applied)
                to_relay.append(bucket)
            else:
                to_relay.remove(bucket)
                Turns(self).relay(bucket)
        return Step(self.now, self.busy, self.passes, self.events)

    def go_through(self, ranks: NDArray, nbytes: NDArray) -> None:
        """A pass of each of ``ranks`` over ``nbytes`` of its memory."""
        seconds = nbytes / self.hardware.memory_bandwidth
        self.passes[ranks] += seconds
        self.compute("passes", ranks, seconds)

    def compute(self, kind: str, ranks: NDArray, seconds: NDArray) -> None:
        """Each of ``ranks`` works for its ``seconds``."""
        begin = self.now[ranks]
        end = begin + seconds
        self.now[ranks] = end
        works = seconds > 0
        if works.any():
            event = Event(kind, ranks[works], begin[works], end[works])
            self.events.append(event)

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
        """Each rank's matrices of ``bucket``, in turns with the relays of the buckets ``to_relay``."""
        owners = bucket.ranks[bucket.owners]
        divided, batches = bucket.batches(self.hardware, self.options.algorithm)
        seconds = batches.sum(0)
        self.busy[owners] += divided + seconds
        is_relayed = any(earlier.relays for earlier in to_relay)
        if not is_relayed:
            self.compute("orthogonalize", owners, divided + seconds)
            return
        # No relay comes between the collectives of the owners of divided matrices.
        self.compute("orthogonalize", owners, divided)
        turns = Turns(self, owners, batches)
        for earlier in to_relay:
            turns.relay(earlier)
        turns.finish()


class Turns:
    """The turns of batches and relays on each rank, as :func:`local_order` makes them. A relay begins when the batches and
    the relays before it are over, except for the relays in flight.

    Args:
        owners: the ranks that orthogonalize.
        batches: how long they do, in the shape (most batches, owners).
    """

    def __init__(
        self,
        timeline: Timeline,
        owners: NDArray | None = None,
        batches: NDArray | None = None,
    ) -> None:
        self.timeline = timeline
        world = timeline.plan.world
        count = 0 if batches is None else len(batches)
        self.batches = np.zeros((count, world))
        if count:
            self.batches[:, owners] = batches
        # By rank: how many batches and relays have begun, and how many relays were waited for.
        self.computed = np.zeros(world, int)
        self.started = np.zeros(world, int)
        self.awaited = np.zeros(world, int)
        # When the relays in flight arrive, and how many bytes each rank applies then.
        self.arrivals = np.zeros((RELAYS_IN_FLIGHT, world))
        self.nbytes = np.zeros((RELAYS_IN_FLIGHT, world))

    def relay(self, bucket: BucketPlan) -> None:
        """Makes all relays of ``bucket``, and the batches between them."""
        for wave in bucket.relays:
            ranks = wave.ranks.ravel()
            in_flight = self.started[ranks] - self.awaited[ranks]
            self.compute_and_wait(ranks[in_flight == RELAYS_IN_FLIGHT])
            arrived = self.timeline.broadcast(wave)
            place = self.started[ranks] % RELAYS_IN_FLIGHT
            received = np.where(wave.is_source, 0.0, wave.nbytes[:, None])
            self.arrivals[place, ranks] = arrived.ravel()
            self.nbytes[place, ranks] = received.ravel()
            self.started[ranks] += 1
        while (self.started > self.awaited).any():
            self.compute_and_wait(np.flatnonzero(self.started > self.awaited))

    def compute_and_wait(self, ranks: NDArray) -> None:
        """The next batch of ``ranks``, and then the wait for their first relay in flight, whose results they apply."""
        self.compute_batch(ranks)
        timeline = self.timeline
        place = self.awaited[ranks] % RELAYS_IN_FLIGHT
        arrived = self.arrivals[place, ranks]
        timeline.now[ranks] = np.maximum(timeline.now[ranks], arrived)
        elements = self.nbytes[place, ranks] / NS_DTYPE.itemsize
        timeline.go_through(ranks, passes_of(timeline.options).apply * elements)
        self.awaited[ranks] += 1

    def compute_batch(self, ranks: NDArray) -> None:
        ranks = ranks[self.computed[ranks] < len(self.batches)]
        seconds = self.batches[self.computed[ranks], ranks]
        self.timeline.compute("orthogonalize", ranks, seconds)
        self.computed[ranks] += 1

    def finish(self) -> None:
        """Computes the batches that are left."""
        everyone = np.arange(self.timeline.plan.world)
        for _ in self.batches:
            self.compute_batch(everyone)


def simulate(plan: Plan, hardware: Hardware, options: Options = DEFAULT) -> Step:
    return Timeline(plan, hardware, options).run()
