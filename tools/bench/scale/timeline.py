"""Plays one step of ``runtime/pipeline.py`` for all ranks at once: vectors of times, in seconds."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hardware import Hardware
from .plan import BucketPlan, IN, Loads, Plan, Wave


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


class Links:
    """The links of all ranks. The transfers of a rank take turns."""

    def __init__(self, world: int, hardware: Hardware) -> None:
        self.hardware = hardware
        self.free = np.zeros(world)
        self.events: list[Event] = []
        # A communicator runs its collectives sequentially.
        self._over: dict[object, NDArray | float] = {}

    def exchange(self, plan: BucketPlan, kind: str, launch: NDArray) -> NDArray:
        """When a gather or scatter is over on each rank; a second hop begins when the first is over."""
        for hop in getattr(plan, kind):
            begin, launch = self._all_to_all(plan, hop, launch)
            self.events.append(Event(kind, plan.ranks, begin, launch))
        return launch

    def _all_to_all(
        self, plan: BucketPlan, hop: Loads, launch: NDArray
    ) -> tuple[NDArray, NDArray]:
        """When each rank begins, and when it and the ranks that it receives from have sent."""
        ranks, key = plan.ranks, (hop.along, plan.bucket.group)
        begin = np.maximum(launch, self.free[ranks])
        begin = np.maximum(begin, self._over.get(key, 0.0))
        sent = begin + hop.seconds(self.hardware)
        self.free[ranks] = sent
        over = np.maximum(sent, hop.latest(sent))
        over = np.maximum(
            over, hop.latest(begin) + hop.seconds(self.hardware, slice(IN, None))
        )
        self._over[key] = over
        return begin, over

    def broadcast(self, wave: Wave, launch: NDArray) -> NDArray:
        """When each of the ring's ranks has everything; shape (sets, replicas)."""
        key = wave.ranks.shape, int(wave.ranks[0, 0])
        begin = np.maximum(launch, self.free[wave.ranks])
        begin = np.maximum(begin, self._over.get(key, 0.0)).max(1, keepdims=True)
        seconds, hops = wave.seconds(self.hardware)
        over = begin + seconds[:, None]
        self.free[wave.ranks] = over
        self._over[key] = over
        begin, end = np.broadcast_arrays(begin, over + hops, wave.ranks)[:2]
        self.events.append(Event("relay", *map(np.ravel, (wave.ranks, begin, end))))
        return end


class Timeline:
    """One step. ``now`` is the time at which each rank's compute has arrived."""

    def __init__(self, plan: Plan, hardware: Hardware, prefetch: int) -> None:
        self.plan = plan
        self.hardware = hardware
        self.prefetch = prefetch
        self.links = Links(plan.world, hardware)
        self.now = np.zeros(plan.world)
        self.busy = np.zeros(plan.world)
        self.by_group: dict[tuple[int, ...], list[BucketPlan]] = {}
        for turn in plan.turns:
            for bucket in turn:
                self.by_group.setdefault(bucket.bucket.group, []).append(bucket)
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
                finished = returning.pop(bucket.bucket.group, None)
                if self.plan.one_owner_at_a_time and self.prefetch == 0:
                    finished = bucket
                else:
                    returning[bucket.bucket.group] = bucket
                if finished is not None:
                    self.finish(finished)
                ring = self.by_group[bucket.bucket.group]
                if bucket.bucket.index + self.prefetch + 1 < len(ring):
                    follower = ring[bucket.bucket.index + self.prefetch + 1]
                    self.exchange(follower, "gather")
        for bucket in returning.values():
            self.now = self.relay()
            self.finish(bucket)
        self.now = self.relay()
        return Step(self.now, self.busy, self.links.events)

    def exchange(self, bucket: BucketPlan, kind: str) -> None:
        launch = self.now[bucket.ranks]
        self.arrived[id(bucket)] = self.links.exchange(bucket, kind, launch)

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
            self.links.events.append(event)
        self.now = np.maximum(self.now, relayed)

    def relay(self) -> NDArray:
        """Starts all waiting broadcasts; when each rank has everything from them."""
        over = self.now.copy()
        for wave in self.waves:
            end = self.links.broadcast(wave, self.now[wave.ranks])
            over[wave.ranks] = np.maximum(over[wave.ranks], end)
        self.waves = []
        return over


def simulate(plan: Plan, hardware: Hardware, prefetch: int = 1) -> Step:
    return Timeline(plan, hardware, prefetch).run()
