"""Plays one step in the order of ``schedule/order.py`` for all ranks at once: vectors of times, in seconds.

The link of a rank serves its transfers in order. A transfer begins when its last rank is there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.order import Phase, step_order

from .costs import DEFAULT, newton_schulz_seconds, Options, PACK, passes_of
from .hardware import Hardware
from .plan import BucketPlan, Loads


class Step(NamedTuple):
    """When each rank is done, how long it has orthogonalized, and how long its passes over memory took."""

    done: NDArray
    busy: NDArray
    passes: NDArray

    @property
    def seconds(self) -> float:
        return float(self.done.max())


class Timeline:
    """``now`` is the time at which each rank has arrived, and ``free`` when its link is free."""

    def __init__(self, world: int, hardware: Hardware, options: Options) -> None:
        self.hardware = hardware
        self.options = options
        self.now = np.zeros(world)
        self.free = np.zeros(world)
        self.busy = np.zeros(world)
        self.passes = np.zeros(world)

    def run(self, plan: Sequence[BucketPlan]) -> Step:
        """Groups that share no rank run at the same time, because an operation only moves the times of its ranks."""
        groups = [bucket.bucket.ranks for bucket in plan]
        of_element = passes_of(self.options)
        # By bucket: when its gather, or its scatter, is over on each rank.
        arrived: dict[int, NDArray] = {}
        # By group: the buckets whose results were applied, and whose relays have not begun.
        to_relay: dict[tuple[int, ...], list[BucketPlan]] = {}
        for phase, index in step_order(groups, self.options.prefetch):
            bucket = plan[index]
            ranks = bucket.ranks
            waiting = to_relay.setdefault(groups[index], [])
            held, sent, applied, packed = bucket.elements
            if phase is Phase.GATHER:
                nbytes = of_element.accumulate * held + of_element.blend * sent
                self.go_through(ranks, nbytes)
                arrived[index] = self.transfer(ranks, bucket.gather)
            elif phase is Phase.COMPUTE:
                self.wait(ranks, arrived[index])
                self.go_through(ranks, PACK * packed)
                relayed = [self.transfer(ranks, each.relays) for each in waiting]
                self.orthogonalize(bucket)
                for earlier, over in zip(waiting, relayed, strict=True):
                    self.apply_relayed(earlier, over)
                waiting.clear()
            elif phase is Phase.SCATTER:
                arrived[index] = self.transfer(ranks, bucket.scatter)
            elif phase is Phase.APPLY:
                self.wait(ranks, arrived[index])
                self.go_through(ranks, of_element.apply * applied)
                waiting.append(bucket)
            else:
                waiting.remove(bucket)
                self.apply_relayed(bucket, self.transfer(ranks, bucket.relays))
        return Step(self.now, self.busy, self.passes)

    def go_through(self, ranks: NDArray, nbytes: NDArray) -> None:
        """A pass of each of ``ranks`` over ``nbytes`` of its memory."""
        seconds = nbytes / self.hardware.memory_bandwidth
        self.passes[ranks] += seconds
        self.now[ranks] += seconds

    def transfer(self, ranks: NDArray, loads: Loads) -> NDArray:
        """Begins a transfer, and returns when it is over on each of ``ranks``."""
        seconds = loads.seconds(self.hardware)
        if not seconds.any():
            return self.now[ranks]
        begin = np.maximum(self.now[ranks], self.free[ranks])
        over = begin.max() + seconds
        self.free[ranks] = over
        return over

    def wait(self, ranks: NDArray, times: NDArray) -> None:
        self.now[ranks] = np.maximum(self.now[ranks], times)

    def orthogonalize(self, bucket: BucketPlan) -> None:
        """Each owner's matrices of ``bucket``."""
        for owner, shapes in zip(bucket.ranks[bucket.owners], bucket.work, strict=True):
            for shape, count in shapes.items():
                seconds = newton_schulz_seconds(
                    shape, count, self.options.algorithm, self.hardware
                )
                self.busy[owner] += seconds
                self.now[owner] += seconds

    def apply_relayed(self, bucket: BucketPlan, over: NDArray) -> None:
        self.wait(bucket.ranks, over)
        relayed = bucket.elements.held - bucket.elements.applied
        self.go_through(bucket.ranks, passes_of(self.options).apply * relayed)


def simulate(
    plan: Sequence[BucketPlan],
    world: int,
    hardware: Hardware,
    options: Options = DEFAULT,
) -> Step:
    """A step of all ranks."""
    return Timeline(world, hardware, options).run(plan)
