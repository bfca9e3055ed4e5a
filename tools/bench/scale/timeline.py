"""Plays one step of ``runtime/pipeline.py`` for all ranks at once: vectors of times, in seconds."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hardware import Hardware
from .plan import BucketPlan, IN, Plan, Wave


class Event(NamedTuple):
    """Something that takes each of ``ranks`` from ``begin`` to ``end``."""

    kind: str
    ranks: NDArray
    begin: NDArray
    end: NDArray


class Step(NamedTuple):
    """When each rank is done, and how long it has orthogonalized, shape (ranks,); and all events."""

    done: NDArray
    busy: NDArray
    events: list[Event]

    @property
    def seconds(self) -> float:
        return float(self.done.max())


class Timeline:
    """One step. ``now`` is the time at which each rank's compute has arrived."""

    def __init__(self, plan: Plan, hardware: Hardware, prefetch: int) -> None:
        self.plan = plan
        self.hardware = hardware
        self.prefetch = prefetch
        self.now = np.zeros(plan.world)
        self.busy = np.zeros(plan.world)
        self.events: list[Event] = []
        self.by_ranks: dict[tuple[int, ...], list[BucketPlan]] = {}
        for turn in plan.turns:
            for bucket in turn:
                self.by_ranks.setdefault(bucket.bucket.ranks, []).append(bucket)
        # When the link of each rank is free: its transfers take turns.
        self.free = np.zeros(plan.world)
        # When the last collective of each communicator is over.
        self.over: dict[object, NDArray | float] = {}
        # By bucket: when its gather, or its scatter, is over on each rank.
        self.arrived: dict[int, NDArray] = {}
        self.waves: list[Wave] = []

    def run(self) -> Step:
        for turn in self.plan.turns:
            for bucket in turn:
                if bucket.bucket.index <= self.prefetch:
                    self.exchange(bucket, "gather")
        returning: dict[tuple[int, ...], BucketPlan] = {}
        for turn in self.plan.turns:
            self.orthogonalize(turn)
            for bucket in turn:
                self.exchange(bucket, "scatter")
                finished = returning.pop(bucket.bucket.ranks, None)
                if self.plan.one_owner_at_a_time and self.prefetch == 0:
                    finished = bucket
                else:
                    returning[bucket.bucket.ranks] = bucket
                if finished is not None:
                    self.finish(finished)
                ring = self.by_ranks[bucket.bucket.ranks]
                if bucket.bucket.index + self.prefetch + 1 < len(ring):
                    follower = ring[bucket.bucket.index + self.prefetch + 1]
                    self.exchange(follower, "gather")
        for bucket in returning.values():
            self.now = self.relay()
            self.finish(bucket)
        self.now = self.relay()
        return Step(self.now, self.busy, self.events)

    def exchange(self, bucket: BucketPlan, kind: str) -> None:
        """A gather or scatter; a second hop begins when the first is over."""
        ranks = bucket.ranks
        over = self.now[ranks]
        for hop in getattr(bucket, kind):
            key = hop.along, bucket.bucket.ranks
            begin = np.maximum(over, self.free[ranks])
            begin = np.maximum(begin, self.over.get(key, 0.0))
            sent = begin + hop.seconds(self.hardware)
            self.free[ranks] = sent
            # A rank and the ranks that it receives from have sent, and its link has received.
            arriving = hop.latest(begin) + hop.seconds(self.hardware, slice(IN, None))
            over = np.maximum(np.maximum(sent, hop.latest(sent)), arriving)
            self.over[key] = over
            self.events.append(Event(kind, ranks, begin, over))
        self.arrived[id(bucket)] = over

    def broadcast(self, wave: Wave) -> NDArray:
        """When each of the ring's ranks has everything; shape (sets, replicas)."""
        key = wave.ranks.shape, int(wave.ranks[0, 0])
        begin = np.maximum(self.now[wave.ranks], self.free[wave.ranks])
        begin = np.maximum(begin, self.over.get(key, 0.0)).max(1, keepdims=True)
        seconds, hops = wave.seconds(self.hardware)
        over = begin + seconds[:, None]
        self.free[wave.ranks] = over
        self.over[key] = over
        begin, end = np.broadcast_arrays(begin, over + hops, wave.ranks)[:2]
        self.events.append(Event("relay", *map(np.ravel, (wave.ranks, begin, end))))
        return end

    def wait(self, bucket: BucketPlan) -> None:
        arrived = self.arrived.pop(id(bucket))
        self.now[bucket.ranks] = np.maximum(self.now[bucket.ranks], arrived)

    def finish(self, bucket: BucketPlan) -> None:
        self.wait(bucket)
        self.waves += bucket.relays

    def orthogonalize(self, turn: list[BucketPlan]) -> None:
        """Each rank's matrices of ``turn``, while the relays of earlier results travel."""
        relayed = self.relay()
        for bucket in turn:
            self.wait(bucket)
            ranks = bucket.ranks[bucket.owners]
            begin = self.now[ranks]
            seconds = bucket.seconds(self.hardware)
            self.busy[ranks] += seconds
            self.now[ranks] = begin + seconds
            event = Event("orthogonalize", ranks, begin, self.now[ranks])
            self.events.append(event)
        self.now = np.maximum(self.now, relayed)

    def relay(self) -> NDArray:
        """Starts all waiting broadcasts; when each rank has everything from them."""
        over = self.now.copy()
        for wave in self.waves:
            end = self.broadcast(wave)
            over[wave.ranks] = np.maximum(over[wave.ranks], end)
        self.waves = []
        return over


def simulate(plan: Plan, hardware: Hardware, prefetch: int = 1) -> Step:
    return Timeline(plan, hardware, prefetch).run()
