"""Plays one step of ``runtime/pipeline.py`` for all ranks at once: vectors of times, in seconds."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from .plan import IN


if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .hardware import Hardware
    from .plan import BucketPlan, Loads, Plan, Wave


class Step(NamedTuple):
    """When each rank is done, and how long it has orthogonalized; shape (ranks,)."""

    done: NDArray
    busy: NDArray

    @property
    def seconds(self) -> float:
        return float(self.done.max())


class Links:
    """The links of all ranks. Transfers of a rank take turns; what is in flight takes none of them."""

    def __init__(self, world: int, hardware: Hardware) -> None:
        self.hardware = hardware
        self.free = np.zeros(world)
        # A communicator runs its collectives one after the other.
        self._over: dict[object, NDArray | float] = {}

    def exchange(
        self, plan: BucketPlan, hops: tuple[Loads, ...], launch: NDArray
    ) -> NDArray:
        """When it is over on each rank; a second hop begins where the first is over."""
        for hop in hops:
            launch = self._all_to_all(plan, hop, launch)
        return launch

    def _all_to_all(self, plan: BucketPlan, hop: Loads, launch: NDArray) -> NDArray:
        """When it is over on each rank: it and those it receives from have sent."""
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
        return over

    def broadcast(self, wave: Wave, launch: NDArray) -> NDArray:
        """When each of the ring's ranks has everything; shape (sets, replicas)."""
        key = wave.ranks.shape, int(wave.ranks[0, 0])
        begin = np.maximum(launch, self.free[wave.ranks])
        begin = np.maximum(begin, self._over.get(key, 0.0)).max(1, keepdims=True)
        seconds, hops = wave.seconds(self.hardware)
        over = begin + seconds[:, None]
        self.free[wave.ranks] = over
        self._over[key] = over
        return np.broadcast_to(over + hops, wave.ranks.shape)


class Timeline:
    """One step. ``now`` is where each rank's compute stands."""

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
                    self.gather(bucket)
        returning: dict[tuple[int, ...], BucketPlan] = {}
        for turn in self.plan.turns:
            self.orthogonalize(turn)
            for bucket in turn:
                self.scatter(bucket)
                finished = returning.pop(bucket.bucket.group, None)
                returning[bucket.bucket.group] = bucket
                if finished is not None:
                    self.finish(finished)
                ring = self.by_group[bucket.bucket.group]
                if bucket.bucket.index + self.prefetch + 1 < len(ring):
                    self.gather(ring[bucket.bucket.index + self.prefetch + 1])
        for bucket in returning.values():
            self.relay()
            self.finish(bucket)
        self.relay()
        return Step(self.now, self.busy)

    def gather(self, bucket: BucketPlan) -> None:
        self._exchange(bucket, bucket.gather)

    def scatter(self, bucket: BucketPlan) -> None:
        self._exchange(bucket, bucket.scatter)

    def _exchange(self, bucket: BucketPlan, hops: tuple[Loads, ...]) -> None:
        launch = self.now[bucket.ranks]
        self.arrived[id(bucket)] = self.links.exchange(bucket, hops, launch)

    def wait(self, bucket: BucketPlan) -> None:
        arrived = self.arrived.pop(id(bucket))
        self.now[bucket.ranks] = np.maximum(self.now[bucket.ranks], arrived)

    def finish(self, bucket: BucketPlan) -> None:
        self.wait(bucket)
        self.waves += bucket.relays

    def orthogonalize(self, turn: list[BucketPlan]) -> None:
        """What each rank owns in ``turn``, between which it relays what came back before."""
        before = self.now.copy()
        for bucket in turn:
            self.wait(bucket)
        done = self.work_done(turn)
        self.busy += done[:, -1]
        if self.waves:
            self.relay(before, done)
        else:
            self.now += done[:, -1]

    def work_done(self, turn: list[BucketPlan]) -> NDArray:
        """Seconds of work until each rank has n of its matrices, shape (ranks, most matrices + 1).

        A rank with fewer repeats its last.
        """
        most = max((len(work) for b in turn for work in b.work), default=0)
        if not self.waves:
            most = min(most, 1)
        done = np.zeros((self.plan.world, most + 1))
        for bucket in turn:
            for place, work in zip(bucket.owners, bucket.work, strict=True):
                steps = np.cumsum(work) if self.waves else [sum(work)]
                row = done[bucket.ranks[place]]
                row[1 : len(steps) + 1] = steps
                row[len(steps) + 1 :] = steps[-1]
        return done / self.hardware.flops

    def relay(self, before: NDArray | None = None, done: NDArray | None = None) -> None:
        """Makes all broadcasts that wait, two in flight, evenly between a rank's matrices.

        Args:
            before: when each rank may start the first two.
            done: as of :meth:`work_done`; nothing to do by default.
        """
        world = self.plan.world
        if done is None:
            done = np.zeros((world, 1))
        # A rank starts a broadcast when it has waited for the last but one.
        last_but_one = (self.now if before is None else before).copy()
        last = last_but_one.copy()
        total, passed, matrices = (np.zeros(world, int) for _ in range(3))
        for wave in self.waves:
            total[wave.ranks] += 1
        matrices[:] = (np.diff(done) > 0).sum(1)
        worked = np.zeros(world)
        for wave in self.waves:
            ranks = wave.ranks
            over = self.links.broadcast(wave, last_but_one[ranks])
            passed[ranks] += 1
            at = -(-passed[ranks] * matrices[ranks] // total[ranks])
            now = self.now[ranks] + done[ranks, at] - worked[ranks]
            worked[ranks] = done[ranks, at]
            self.now[ranks] = np.maximum(now, over)
            last_but_one[ranks] = last[ranks]
            last[ranks] = self.now[ranks]
        self.now += done[:, -1] - worked
        self.waves = []


def simulate(plan: Plan, hardware: Hardware, prefetch: int = 1) -> Step:
    return Timeline(plan, hardware, prefetch).run()
