"""Plays one step in the order of ``schedule/order.py`` for all ranks at once: vectors of times, in seconds.

An accelerator has a stream for Newton-Schulz, and one for what follows the scatters of buckets with relays. A step plays
both, each with a clock of its own and at its full speed. The link of a rank serves the transfers of a stream
in order, and a relay comes before the exchanges that begin later.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
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


# The kinds of events in which a rank works: on the stream of Newton-Schulz, and on that of relays.
WORK = ("orthogonalize", "passes")
PASSES_BESIDE = "passes beside"


class Event(NamedTuple):
    """Something that takes each of ``ranks`` from ``begin`` to ``end``."""

    kind: str
    ranks: NDArray
    begin: NDArray
    end: NDArray


class Step(NamedTuple):
    """When each rank is done, how long it has orthogonalized, and how long its passes over memory took on both streams,
    shape (ranks,); and all events.
    """

    done: NDArray
    busy: NDArray
    passes: NDArray
    events: list[Event]

    @property
    def seconds(self) -> float:
        return float(self.done.max())

    def exposed_passes(self) -> NDArray:
        """How long passes over memory took while no other work ran on a rank, shape (ranks,)."""
        exposed = self.passes.copy()
        works = [event for event in self.events if event.kind in WORK]
        for beside in self.events:
            if beside.kind != PASSES_BESIDE:
                continue
            for work in works:
                exposed -= self._together(beside, work)
        return exposed

    def _together(self, one: Event, other: Event) -> NDArray:
        """How long both events last at the same time, shape (ranks,)."""
        begins, ends = np.zeros((2, 2, len(self.done)))
        for place, event in enumerate((one, other)):
            begins[place, event.ranks] = event.begin
            ends[place, event.ranks] = event.end
        # A rank without one of the events has its end at 0.
        return np.maximum(ends.min(0) - begins.max(0), 0.0)


class Timeline:
    """One step. ``now`` is the time at which each rank's stream of Newton-Schulz has arrived; in a block of
    :meth:`on_relay_stream`, its stream of relays.
    """

    def __init__(
        self,
        plan: Plan,
        hardware: Hardware,
        options: Options,
        has_relay_stream: bool,
    ) -> None:
        self.plan = plan
        self.hardware = hardware
        self.options = options
        self.one_at_a_time = plan.one_owner_at_a_time and options.prefetch == 0
        # One owner at a time finishes its bucket before the next one begins.
        self.has_relay_stream = has_relay_stream and not self.one_at_a_time
        self.now = np.zeros(plan.world)
        # The clock of the stream that does not play.
        self.other_now = np.zeros(plan.world)
        self.passes_kind = "passes"
        # By group: relays on their stream that are not yet played.
        self.pending: dict[tuple[int, ...], PendingRelays] = {}
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
        early: list[int] = []
        for index, bucket in enumerate(self.plan.buckets):
            if self.is_beside(bucket):
                early.append(index)
        prefetch = self.options.prefetch
        of_element = passes_of(self.options)
        # By group: the buckets whose results were applied, and whose relays have not begun.
        waiting: dict[tuple[int, ...], list[BucketPlan]] = {}
        # By group: the end of what was applied last on the stream of relays, which frees a slot.
        freed: dict[tuple[int, ...], NDArray] = {}
        for phase, index in step_order(groups, prefetch, self.one_at_a_time, early):
            bucket = self.plan.buckets[index]
            to_relay = waiting.setdefault(groups[index], [])
            held, sent, applied, packed = bucket.elements
            if phase is Phase.GATHER:
                if groups[index] in freed:
                    self.wait_until(bucket.ranks, freed[groups[index]])
                nbytes = of_element.accumulate * held + of_element.blend * sent
                self.go_through(bucket.ranks, nbytes)
                self.exchange(bucket, "gather")
            elif phase is Phase.COMPUTE:
                self.wait(bucket)
                self.go_through(bucket.ranks, PACK * packed)
                beside = [earlier for earlier in to_relay if self.is_beside(earlier)]
                for earlier in beside:
                    self.relay(earlier)
                    to_relay.remove(earlier)
                self.orthogonalize(bucket, to_relay)
                to_relay.clear()
            elif phase is Phase.SCATTER:
                self.exchange(bucket, "scatter")
            elif phase is Phase.APPLY:
                nbytes = of_element.apply * applied
                if self.is_beside(bucket):
                    freed[groups[index]] = self.apply_beside(bucket, nbytes)
                else:
                    self.wait(bucket)
                    self.go_through(bucket.ranks, nbytes)
                to_relay.append(bucket)
            else:
                to_relay.remove(bucket)
                self.relay(bucket)
        for group in groups:
            self.play_relays(group)
        done = np.maximum(self.now, self.other_now)
        return Step(done, self.busy, self.passes, self.events)

    def is_beside(self, bucket: BucketPlan) -> bool:
        """Whether what follows the scatter of ``bucket`` runs on the stream of relays."""
        return self.has_relay_stream and bucket.bucket.relayed

    @contextmanager
    def on_relay_stream(self) -> Iterator[None]:
        """In this block, the stream of relays plays."""
        self.now, self.other_now = self.other_now, self.now
        self.passes_kind = PASSES_BESIDE
        yield
        self.now, self.other_now = self.other_now, self.now
        self.passes_kind = "passes"

    def apply_beside(self, bucket: BucketPlan, nbytes: NDArray) -> NDArray:
        """The updates of ``bucket``, on the stream of relays. Returns when each of its ranks has applied them."""
        self.play_relays(bucket.bucket.ranks)
        with self.on_relay_stream():
            # The scatter was launched behind the results of a rank's own matrices.
            self.wait(bucket)
            self.go_through(bucket.ranks, nbytes)
            return self.now[bucket.ranks]

    def relay(self, bucket: BucketPlan) -> None:
        """All relays of ``bucket``, without batches between them. Those on their stream are only launched."""
        turns = Turns(self)
        if not self.is_beside(bucket):
            turns.relay(bucket)
            return
        group = bucket.bucket.ranks
        self.play_relays(group)
        self.pending[group] = PendingRelays(self, turns.before_relays(bucket))

    def play_relays(self, group: tuple[int, ...], until: float = math.inf) -> None:
        """Plays the launched relays of these ranks that begin ``until`` this time."""
        ranks = set(group)
        for other, pending in self.pending.items():
            if not ranks.isdisjoint(other):
                pending.play(until)

    def go_through(self, ranks: NDArray, nbytes: NDArray) -> None:
        """A pass of each of ``ranks`` over ``nbytes`` of its memory."""
        seconds = nbytes / self.hardware.memory_bandwidth
        self.passes[ranks] += seconds
        self.compute(self.passes_kind, ranks, seconds)

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
        self.play_relays(bucket.bucket.ranks, float(over.max()))
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
        self.wait_until(bucket.ranks, self.arrived.pop(id(bucket)))

    def wait_until(self, ranks: NDArray, times: NDArray) -> None:
        self.now[ranks] = np.maximum(self.now[ranks], times)

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
        for _ in self.before_relays(bucket):
            pass

    def before_relays(self, bucket: BucketPlan) -> Iterator[NDArray]:
        """Makes the relays as :meth:`relay` does. Before each of them, it yields the ranks."""
        for wave in bucket.relays:
            ranks = wave.ranks.ravel()
            in_flight = self.started[ranks] - self.awaited[ranks]
            self.compute_and_wait(ranks[in_flight == RELAYS_IN_FLIGHT])
            yield ranks
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
        timeline.wait_until(ranks, self.arrivals[place, ranks])
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


class PendingRelays:
    """The relays of a bucket on their stream, in the order of time with what the other stream sends."""

    def __init__(self, timeline: Timeline, relays: Iterator[NDArray]) -> None:
        self.timeline = timeline
        self.relays = relays
        # The ranks of the next relay; None after the last one.
        self.ranks: NDArray | None = None
        self.go_on()

    def go_on(self) -> None:
        """Makes the next relay, and what follows it until the one after it can begin."""
        with self.timeline.on_relay_stream():
            self.ranks = next(self.relays, None)

    def play(self, until: float) -> None:
        """Makes the relays that begin ``until`` this time."""
        while self.ranks is not None:
            # Outside of the block, this is the clock of relays.
            ready = self.timeline.other_now[self.ranks].max()
            if max(ready, self.timeline.free[self.ranks].max()) > until:
                return
            self.go_on()


def simulate(
    plan: Plan,
    hardware: Hardware,
    options: Options = DEFAULT,
    has_relay_stream: bool = True,
) -> Step:
    """A step of the ranks of ``plan``. They are CPUs if ``has_relay_stream`` is false: their relays take turns with
    batches.
    """
    return Timeline(plan, hardware, options, has_relay_stream).run()
