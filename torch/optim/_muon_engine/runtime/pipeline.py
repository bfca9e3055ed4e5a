"""One step: the buckets, overlapped. While bucket k is orthogonalized, the gathers of ``prefetch_count`` later
buckets are in flight, and the results of bucket k-1 are on their way back.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..process_groups import larger_first
from ..schedule.packs import RELAYS_IN_FLIGHT, slots_for
from . import Matrix
from .compute import Compute, RegionTensor
from .divided import DividedProducts
from .relays import attach_relays
from .statuses import OTHER_GROUP, Statuses
from .transport import BoundPack, InFlight, local_buckets, LocalBucket, Memory


class Pipeline(Compute):
    """Runs an engine's buckets of one rank, step after step, over memory that keeps its addresses."""

    def __init__(self, engine: Any) -> None:
        schedule, groups, rank = engine.schedule, engine.groups, engine.rank
        memory = Memory(engine.device, engine.config.state.get("keep_buffers", False))
        super().__init__(rank, engine.device, memory)
        self.params = engine.ordered
        self.prefetch_count = engine.config.prefetch_count
        self.has_run = False
        self.one_at_a_time = schedule.one_owner_at_a_time and self.prefetch_count == 0
        by_ranks: dict[Any, list[Matrix]] = {}
        matrices: dict[int, Matrix] = {}
        for bucket in schedule.buckets:
            for index in bucket.matrices if rank in bucket.ranks else ():
                param = engine.params[schedule.layouts[index].key.index]
                matrix = matrices[index] = Matrix(schedule, index, param, rank)
                team = groups.get(schedule.team(index))
                if team is not None and matrix.owner == rank:
                    matrix.products = DividedProducts(matrix, team, self.device)
                by_ranks.setdefault(bucket.ranks, []).append(matrix)
        known = {m.source_of_gradient for m in matrices.values() if not m.is_empty}
        for matrix in matrices.values():
            matrix.knows_gradient = matrix.source_of_gradient in known
        slots = slots_for(self.prefetch_count)
        buckets = local_buckets(schedule, matrices, rank, groups, memory, slots)
        attach_relays(buckets, groups, rank, memory)
        self.buckets = [bucket for bucket, _ in buckets]
        # Smaller groups first, so that a mismatch reaches the larger ones that contain them.
        self.statuses = [
            Statuses(
                by_ranks[ranks],
                ranks,
                group,
                engine.serials[ranks],
                self.device,
                overlaps=ranks in engine.overlapping,
            )
            for ranks in reversed(larger_first(by_ranks))
            if (group := groups[ranks]) is not None
        ]

    @property
    def awaits_statuses(self) -> bool:
        """Whether ranks know how they differ before anything moves: on a CPU, and elsewhere in the first step."""
        return self.device.type == "cpu" or not self.has_run

    def connect(self) -> None:
        """Uses every communicator once while no other one is in use. Accelerator backends connect two ranks when
        they first exchange something. With other collectives in flight, ranks may wait for each other.
        """
        with self._drained(), self.memory:
            starts: list[tuple[InFlight, Any]] = [(s, s.reduce) for s in self.statuses]
            starts += [(s, s.reduce_flag) for s in self.statuses if s.overlaps]
            for b in self.buckets:
                starts += [(b, b.start_gather), (b, b.start_scatter)]
                starts += [(relay, relay.start) for relay in b.relays]
                starts += [(b, m.products.connect) for m in b.matrices if m.products]
            for flight, start in starts:
                start()
                flight.wait()
                if self.device.type != "cpu" and torch.accelerator.is_available():
                    torch.accelerator.synchronize(self.device)

    def share_statuses(self, step: int) -> str:
        """Starts the side channel of this rank's ``step``-th step, before anything moves. A group passes a mismatch on
        to larger groups. A group that overlaps others may hear of it in none of them, so ranks that wait for the
        result pass it on to such groups once more. A rank that cannot use a gradient tells all of its groups,
        because each of them must end the step here. Returns how ranks differ; "" if they do not, or if it does not
        wait.
        """
        self._current = "statuses", [m for s in self.statuses for m in s.matrices]
        text = ""
        # The unusable gradient may be of a matrix that no other rank has.
        has_problem = any(param.problem for param in self.params)
        with self._drained():
            for statuses in self.statuses:
                statuses.start(step, has_problem or bool(text), self.awaits_statuses)
                if self.awaits_statuses:
                    # It may launch a collective, so every rank calls it.
                    reason = statuses.mismatch()
                    # A larger group's own reason says more.
                    text = reason if reason and text in ("", OTHER_GROUP) else text
            for statuses in reversed(self.statuses):
                if statuses.overlaps and self.awaits_statuses:
                    is_known = has_problem or bool(text)
                    if statuses.differs_elsewhere(is_known) and not text:
                        text = OTHER_GROUP
        return text

    def run(self) -> None:
        """Makes a step in the one order of all ranks. DTensor's collectives for gradients come first."""
        with self._drained(), self.memory:
            for param in self.params:
                param.place_gradient()
            tasks: dict[Hashable, list[Iterator[None]]] = {}
            for bucket in self.buckets:
                of_ranks = tasks.setdefault(bucket.ranks, [])
                two_before = of_ranks[-2] if len(of_ranks) > 1 else iter(())
                of_ranks.append(self._process(bucket, two_before))
            order = [bucket.ranks for bucket in self.buckets]
            run_in_turn(order, tasks, self.prefetch_count, self.one_at_a_time)
            for statuses in self.statuses:
                statuses.finish()
            self._current, self.has_run = ("", ()), True

    def _process(self, bucket: LocalBucket, relaying: Iterator[None]) -> Iterator[None]:
        """Brings one bucket from gradients to parameters. Other buckets go on where it pauses. ``relaying`` is
        the task of the group's bucket k-2, which has only relays left. It awaits one of them at each turn.
        """
        self.gather(bucket)
        yield  # Pause 1: its gather is in flight.
        self.wait(bucket, "gather")
        for batch in self.batches(bucket):
            # The owners of divided matrices have collectives of their own first, and no relay in between.
            if batch[0].products is None:
                next(relaying, None)
            self.orthogonalize(bucket, batch)
        _exhaust(relaying)
        self.scatter(bucket)
        yield  # Pause 2: its scatter is in flight.
        self.wait(bucket, "scatter")
        self.apply_results(bucket)
        # Relays wait for bucket k+2. Ranks have different relays, and only there do all ranks of a group
        # reach the same place.
        yield  # Pause 3: its results are applied.
        for at, relay in enumerate(bucket.relays):
            for following in bucket.relays[at : at + RELAYS_IN_FLIGHT]:
                following.start()
            yield
            self.wait(relay, "relay")
            if not relay.is_source:
                with self._enter("apply", relay):
                    self.apply_received(relay, relay.packed)

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """After an error, waits for everything in flight."""
        try:
            yield
        except BaseException:
            buckets = [flight for b in self.buckets for flight in (b, *b.relays)]
            for flight in (*self.statuses, *buckets):
                while flight.works:
                    # The error that led here is the one to report.
                    with suppress(Exception):
                        flight.wait()
            raise

    def wait(self, flight: InFlight, phase: str) -> None:
        with self._enter(f"wait for {phase}", flight):
            flight.wait()

    def gather(self, bucket: LocalBucket) -> None:
        """Accumulates the gradients of the bucket's matrices and sends this rank's shards."""
        with self._enter("gather", bucket):
            self.pack(bucket)
            bucket.start_gather()

    def scatter(self, bucket: LocalBucket) -> None:
        """Sends the updates of the matrices that this rank owns: zeros for those without a gradient."""
        with self._enter("scatter", bucket):
            zeros = [
                packed.view
                for matrix in bucket.matrices
                if matrix.owner == self.rank and not matrix.is_orthogonalized
                for packed in bucket.results_of(matrix.index)
            ]
            if zeros:
                torch._foreach_zero_(zeros)
            bucket.start_scatter()

    def apply_results(self, bucket: LocalBucket) -> None:
        """Applies the results that this rank received, and packs those that it relays."""
        with self._enter("apply", bucket):
            self.apply_received(bucket, bucket.scatter_recv)
            # A contribution that receives no update decays, too.
            self.apply(
                (matrix, region, None)
                for matrix in bucket.matrices
                if matrix.owner != self.rank and matrix.applies and not matrix.receives
                for region in matrix.shard
            )
            for relay in bucket.relays:
                if relay.is_source:
                    relay.pack()

    def apply_received(self, flight: InFlight, received: BoundPack) -> None:
        """Applies the updates of other owners' matrices that are packed in ``received``."""
        entries: list[RegionTensor] = []
        for matrix in flight.matrices:
            packed = received.of(matrix.index)
            if matrix.owner != self.rank and matrix.applies:
                self._log("apply", [matrix] if packed or matrix.is_empty else [])
                entries += [(matrix, region, view) for _, region, view in packed]
        self.apply(entries)


def run_in_turn(
    order: Sequence[Hashable],
    tasks: Mapping[Hashable, Sequence[Iterator[None]]],
    prefetch_count: int,
    one_at_a_time: bool = False,
) -> None:
    """Runs the tasks of several groups of ranks. ``order`` has the group of each, in the order of all ranks. A
    task pauses after its gather, its scatter, the results and each relay.
    """
    ahead = prefetch_count + 1
    turns = {g: _interleave(ts, ahead, one_at_a_time) for g, ts in tasks.items()}
    for turn in turns.values():
        next(turn)
    for group in order:
        next(turns[group])
    # In the order of the groups' last buckets, which is the same on all ranks.
    for group in reversed(dict.fromkeys(reversed(order))):
        _exhaust(turns[group])


def _interleave(
    tasks: Sequence[Iterator[None]], ahead: int, one_at_a_time: bool
) -> Iterator[None]:
    """Runs the tasks of one group. Pauses after the first ``ahead`` gathers and after each scatter. From one
    pause to the next, this rank launches and awaits collectives of this group only, in an order that is the
    same on all of its ranks. So ranks cannot wait for each other in a circle.
    """
    for task in tasks[:ahead]:
        next(task)  # To pause 1.
    yield
    for k, task in enumerate(tasks):
        next(task)  # To pause 2: it waits for the gather, orthogonalizes, scatters.
        if one_at_a_time:
            _exhaust(task)
        elif k > 0:
            next(tasks[k - 1], None)  # To pause 3.
        # It takes the slot of bucket k-1, whose results were applied above.
        if k + ahead < len(tasks):
            next(tasks[k + ahead])  # To pause 1.
        yield
    for task in tasks[-2:]:
        _exhaust(task)


def _exhaust(task: Iterator[None]) -> None:
    for _ in task:
        pass
