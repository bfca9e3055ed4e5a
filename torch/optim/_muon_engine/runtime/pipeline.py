"""One step: the buckets, overlapped.

While bucket k is orthogonalized, the gathers of ``prefetch_count`` later buckets are in flight, and the
results of bucket k-1 are on their way back.
"""

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

# The public profiler range costs tens of microseconds even when no profiler runs.
from torch._C._profiler import _RecordFunctionFast
from torch.optim._muon_engine.layouts import listed, Region
from torch.optim._muon_engine.runtime import Matrix, Param
from torch.optim._muon_engine.runtime.relays import LocalRelay
from torch.optim._muon_engine.runtime.statuses import Statuses
from torch.optim._muon_engine.runtime.transport import (
    BoundPack,
    copy_all,
    InFlight,
    LocalBucket,
    Memory,
    named,
)
from torch.optim._muon_engine.schedule.packs import RELAYS_IN_FLIGHT


log = logging.getLogger("torch.optim.muon")

# Accelerators blend and apply regions of this many bytes at once, unless one region is larger.
PREPARED_BYTES = 64 * 1024**2

# A region of a matrix, and the tensor that is its source or target; None for no update.
Move = tuple[Matrix, Region, Any]


class Pipeline:
    """Runs the buckets of one rank, step after step, over memory that keeps its addresses.

    Args:
        buckets: this rank's buckets in their global order.
        params: this rank's parameters, in the order of all ranks.
        statuses: the side channels of this rank's groups, in the order of all ranks.
        memory: of the slots and relays.
        prefetch_count: gathers in flight ahead of the bucket that is orthogonalized.
        one_at_a_time: for debugging: wait for each scatter before the next bucket.
    """

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        params: Sequence[Param],
        statuses: Sequence[Statuses],
        rank: int,
        device: torch.device,
        memory: Memory,
        prefetch_count: int,
        one_at_a_time: bool,
    ) -> None:
        self.buckets = buckets
        self.params = params
        self.statuses = statuses
        self.rank = rank
        self.device = device
        self.memory = memory
        self.prefetch_count = prefetch_count
        self.one_at_a_time = one_at_a_time
        # Memory that one matrix after another uses, by purpose and dtype.
        self._scratch_memory: dict[Hashable, Tensor] = {}
        # The phase and matrices at hand, for error messages.
        self._at: tuple[str, Sequence[Matrix]] = ("", ())

    @property
    def knows_before(self) -> bool:
        """Whether the ranks know that they differ before anything moves."""
        return self.device.type == "cpu"

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""
        phase, matrices = self._at
        described = [matrix.layout.describe() for matrix in matrices]
        return f"{phase} of {listed(described)}" if phase else ""

    def connect(self) -> None:
        """Uses every communicator once while no other one is in use.

        Accelerator backends connect two ranks when they first exchange something. If other collectives
        are in flight then, ranks may wait for each other.
        """
        self.memory.allocate()
        for statuses in self.statuses:
            statuses.reduce()
            self._wait_alone(statuses)
        for bucket in self.buckets:
            for start in (bucket.start_gather, bucket.start_scatter):
                start()
                self._wait_alone(bucket)
            for relay in bucket.relays:
                relay.start()
                self._wait_alone(relay)
            for products in (m.products for m in bucket.matrices if m.products):
                products.connect(self.device)
                self._wait_alone(bucket)
        self.memory.free()

    def _wait_alone(self, flight: InFlight) -> None:
        flight.wait()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def begin(self, step: int) -> str:
        """Starts the side channel of this rank's ``step``-th step.

        On a CPU, nothing has moved yet when the result is known. A group tells a larger one of a mismatch,
        because ranks of both groups end the step here.

        Returns:
            How ranks differ; "" if they do not, and on accelerators, which do not wait for the result.
        """
        self._at = "statuses", [m for s in self.statuses for m in s.matrices]
        text = ""
        try:
            for statuses in self.statuses:
                statuses.start(step, differs=bool(text))
                if self.knows_before:
                    differs = statuses.mismatch()
                    text = text or differs
        except BaseException:
            self._drain()
            raise
        return text

    def run(self) -> None:
        """Makes a step with the gradients that the parameters have now."""
        try:
            self.memory.allocate()
            self._run()
        except BaseException:
            self._drain()
            raise
        finally:
            self.memory.free()
            if self.device.type != "cpu":
                self._scratch_memory.clear()

    def _drain(self) -> None:
        """Waits for everything in flight, after an error."""
        for statuses in self.statuses:
            statuses.forget()
        buckets = [flight for b in self.buckets for flight in (b, *b.relays)]
        for flight in (*self.statuses, *buckets):
            # The error that led here is the one to report.
            with suppress(Exception):
                flight.wait()

    def _run(self) -> None:
        # A collective of DTensor's may move a gradient. It precedes all gathers.
        for param in self.params:
            param.place_gradient()
        tasks: dict[Hashable, list[Iterator[None]]] = {}
        for bucket in self.buckets:
            of_group = tasks.setdefault(bucket.bucket.group, [])
            relaying = of_group[-2] if len(of_group) > 1 else iter(())
            of_group.append(self._process(bucket, relaying))
        order = [bucket.bucket.group for bucket in self.buckets]
        run_in_turn(order, tasks, self.prefetch_count, self.one_at_a_time)
        self._at = "statuses", [m for s in self.statuses for m in s.matrices]
        for statuses in self.statuses:
            statuses.finish()
        self._at = "", ()

    def _process(self, bucket: LocalBucket, relaying: Iterator[None]) -> Iterator[None]:
        """Brings one bucket from gradients to parameters. Other buckets go on where it pauses.

        ``relaying`` is the task of the group's bucket k-2. It awaits one relay each time it goes on.
        """
        self.gather(bucket)
        yield
        self.wait(bucket, "gather")
        for batch in self.batches(bucket):
            # The owners of divided matrices have collectives of their own first, and no relay in between.
            if batch[0].products is None:
                next(relaying, None)
            self.orthogonalize(bucket, batch)
        _exhaust(relaying)
        self.scatter(bucket)
        yield
        self.wait(bucket, "scatter")
        self.apply_results(bucket)
        # Relays start at the place of bucket k+2. Ranks have other relays, so if the first ones started
        # earlier, ranks would launch one relay at different places.
        yield
        for at, relay in enumerate(bucket.relays):
            for following in bucket.relays[at : at + RELAYS_IN_FLIGHT]:
                following.start()
            yield
            self.wait(relay, "relay")
            if not relay.is_source:
                with self._phase("apply", relay):
                    self.apply_received(relay, relay.packed)

    def _phase(
        self, phase: str, of: LocalBucket | LocalRelay
    ) -> AbstractContextManager[Any]:
        """Names a phase for error messages, and for a profiler."""
        self._at = phase, of.matrices
        return _RecordFunctionFast(f"Muon {phase}, {of.name}")

    def wait(self, flight: LocalBucket | LocalRelay, phase: str) -> None:
        with self._phase(f"wait for {phase}", flight):
            flight.wait()

    def _log(self, phase: str, matrices: Iterable[Matrix]) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for matrix in matrices:
                values = self.rank, phase, matrix.layout.describe(), matrix.owner
                log.debug("rank %d: %s %s, owner %d", *values)

    def _scratch(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of ``shape``, valid until the next call with this purpose."""
        numel = math.prod(shape)
        key = purpose, like.dtype, like.device
        flat = self._scratch_memory.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._scratch_memory[key] = like.new_empty(numel)
        return flat.narrow(0, 0, numel).view(shape)

    def gather(self, bucket: LocalBucket) -> None:
        """Accumulates the gradients of the bucket's matrices and sends this rank's shards."""
        one_by_one = [[matrix] for matrix in bucket.matrices]
        with self._phase("gather", bucket):
            # A CPU packs each matrix while it is in the cache. Accelerators make few launches.
            for part in one_by_one if self.device.type == "cpu" else [bucket.matrices]:
                self._at = "accumulate", part
                accumulate(matrix.param for matrix in part)
                self._at = "gather", part
                self._log("gather", part)
                self.prepare(
                    (matrix, region, view)
                    for matrix in part
                    for _, region, view in bucket.gather_send.of(matrix.number)
                )
            self._at = "gather", bucket.matrices
            bucket.start_gather()

    def prepare(self, targets: Iterable[Move]) -> None:
        """Writes regions of the tensors to orthogonalize: momentum, blended with the gradient if nesterov.

        Without a gradient, that is momentum, so that the owner receives defined values.
        """
        for some in self._alike(targets, _prepare_key):
            prepared = self._prepared([(m, region) for m, region, _ in some])
            copy_all([(t, made) for (_, _, t), made in zip(some, prepared)])

    def _prepared(self, regions: Sequence[tuple[Matrix, Region]]) -> Sequence[Tensor]:
        momenta = [region.of_local(m.param.momentum) for m, region in regions]
        grads = [region.of_local(m.param.lookahead) for m, region in regions]
        out = None
        if self.device.type == "cpu":
            out = self._scratch("prepared", momenta[0].shape, momenta[0])
        return regions[0][0].param.formulas.prepare(momenta, grads, out)

    def batches(self, bucket: LocalBucket) -> list[list[Matrix]]:
        """This rank's matrices of one shape and equal options, as many as the formulas allow in a batch."""
        found: dict[Hashable, list[list[Matrix]]] = {}
        for matrix in bucket.matrices:
            if matrix.owner != self.rank or not matrix.is_orthogonalized:
                continue
            formulas, shape = matrix.param.formulas, matrix.layout.shape
            # The blocks of a divided matrix come first in a bucket, and each is alone.
            alone = matrix.number if matrix.products is not None else None
            batches = found.setdefault((alone, formulas.compute_key, shape), [[]])
            if len(batches[-1]) == formulas.batch_size(shape, self.device):
                batches.append([])
            batches[-1].append(matrix)
        return [batch for batches in found.values() for batch in batches]

    def orthogonalize(self, bucket: LocalBucket, batch: Sequence[Matrix]) -> None:
        """Computes the updates of ``batch``, packs them for their holders, and applies this rank's part."""
        with self._phase("orthogonalize", bucket):
            self._at = "assemble", batch
            self._log("orthogonalize", batch)
            shape = (len(batch), *batch[0].layout.shape)
            whole = self._scratch("whole", shape, bucket.scatter_send.flat)
            wholes = whole.unbind()
            self.assemble(bucket, batch, wholes)
            self._at = "orthogonalize", batch
            formulas, products = batch[0].param.formulas, batch[0].products
            if products is not None:
                with named("Newton-Schulz", batch, products.ranks):
                    updates = [formulas.orthogonalize(wholes[0], products)]
            elif len(batch) == 1:
                updates = [formulas.orthogonalize(wholes[0])]
            else:
                updates = list(formulas.orthogonalize(whole).unbind())
            for i, update in enumerate(updates):
                if not update.is_contiguous():
                    # Transposing a tall update once is faster than transposing each region of it.
                    updates[i] = wholes[i].copy_(update)
            made = list(zip(batch, updates, strict=True))
            copy_all(
                [
                    (view, region.of_matrix(update))
                    for matrix, update in made
                    for _, region, view in bucket.results_of(matrix.number)
                ]
            )
            # The owner's own part of an update is not sent.
            self._at = "apply", batch
            self._log("apply", batch)
            self.apply(
                (matrix, region, region.of_matrix(update))
                for matrix, update in made
                for region in (matrix.shard if matrix.applies else ())
            )

    def assemble(
        self, bucket: LocalBucket, batch: Sequence[Matrix], wholes: Sequence[Tensor]
    ) -> None:
        """Fills ``wholes`` from the received regions and from this rank's own."""
        own: list[Move] = []
        received: list[tuple[Tensor, Tensor]] = []
        for matrix, out in zip(batch, wholes, strict=True):
            if matrix.layout.shards.partial:
                self._add_contributions(bucket, matrix, out)
                continue
            own += [(matrix, r, r.of_matrix(out)) for r in matrix.sent]
            packed = bucket.gather_recv.of(matrix.number)
            received += [(region.of_matrix(out), view) for _, region, view in packed]
        self.prepare(own)
        copy_all(received)

    def _add_contributions(
        self, bucket: LocalBucket, matrix: Matrix, out: Tensor
    ) -> None:
        """Adds the contributions to a sum in the order of their ranks, whoever owns the matrix."""
        layout = matrix.layout
        total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
        contributions = [
            (layout.shards.contribution_of(rank), region, view)
            for rank, region, view in bucket.gather_recv.of(matrix.number)
        ]
        own = layout.shards.contribution_of(self.rank)
        for region in matrix.sent:
            (prepared,) = self._prepared([(matrix, region)])
            contributions.append((own, region, prepared.clone()))
        for _, region, tensor in sorted(contributions, key=lambda part: part[0]):
            region.of_matrix(total).add_(tensor)
        out.copy_(total)

    def scatter(self, bucket: LocalBucket) -> None:
        """Sends the updates of the matrices that this rank owns: zeros for those without a gradient."""
        with self._phase("scatter", bucket):
            zeros = [
                packed.view
                for matrix in bucket.matrices
                if matrix.owner == self.rank and not matrix.is_orthogonalized
                for packed in bucket.results_of(matrix.number)
            ]
            if zeros:
                torch._foreach_zero_(zeros)
            bucket.start_scatter()

    def apply_results(self, bucket: LocalBucket) -> None:
        """Applies the results that this rank received, and packs those that it relays."""
        with self._phase("apply", bucket):
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

    def apply_received(
        self, flight: LocalBucket | LocalRelay, received: BoundPack
    ) -> None:
        moves: list[Move] = []
        for matrix in flight.matrices:
            packed = received.of(matrix.number)
            if matrix.owner != self.rank and matrix.applies:
                self._log("apply", [matrix] if packed or matrix.is_empty else [])
                moves += [(matrix, region, view) for _, region, view in packed]
        self.apply(moves)

    def apply(self, moves: Iterable[Move]) -> None:
        """Decays regions of parameters, and updates those that have an update."""
        for some in self._alike(moves, _apply_key):
            (matrix, _, first), formulas = some[0], some[0][0].param.formulas
            local = [m.local(region) for m, region, _ in some]
            updates = None
            if first is not None:
                # Parameters may be offloaded to a CPU.
                updates = [u.to(l.device) for (_, _, u), l in zip(some, local)]
            formulas.apply(local, updates, matrix.layout.whole)

    def _alike(
        self, moves: Iterable[Move], key: Callable[[Move], Hashable]
    ) -> Iterator[Sequence[Move]]:
        """Moves with equal keys: one by one on a CPU, up to ``PREPARED_BYTES`` at once elsewhere."""
        if self.device.type == "cpu":
            yield from ([move] for move in moves)
            return
        alike: dict[Hashable, list[list[Move]]] = {}
        room: dict[Hashable, int] = {}
        for move in moves:
            matrix, region, _ = move
            nbytes, of = region.numel * matrix.layout.dtype.itemsize, key(move)
            if room.get(of, -1) < nbytes:
                alike.setdefault(of, []).append([])
                room[of] = max(nbytes, PREPARED_BYTES)
            room[of] -= nbytes
            alike[of][-1].append(move)
        for lists in alike.values():
            yield from lists


def _prepare_key(move: Move) -> Hashable:
    return id(move[0].param.formulas)


def _apply_key(move: Move) -> Hashable:
    matrix, _, update = move
    return id(matrix.param.formulas), matrix.layout.whole, update is None


def run_in_turn(
    order: Sequence[Hashable],
    tasks: Mapping[Hashable, Sequence[Iterator[None]]],
    prefetch_count: int,
    one_at_a_time: bool = False,
) -> None:
    """Runs the tasks of several groups of ranks.

    Args:
        order: the group of each task, in the order of all ranks.
        tasks: by group. A task pauses after the gather and after the scatter of a bucket.
    """
    turns = {
        group: _overlap(of_group, prefetch_count + 1, one_at_a_time)
        for group, of_group in tasks.items()
    }
    for turn in turns.values():
        next(turn)
    for group in order:
        next(turns[group])
    # By the last bucket of each group, which keeps the one order of all ranks.
    for group in reversed(dict.fromkeys(reversed(order))):
        _exhaust(turns[group])


def _overlap(
    tasks: Sequence[Iterator[None]], ahead: int, one_at_a_time: bool
) -> Iterator[None]:
    """Runs the tasks of one group. Pauses after the first ``ahead`` gathers and after each scatter.

    From one pause to the next, this rank launches and awaits collectives of this group only, in an order
    that is the same on all of its ranks. So ranks cannot wait for each other in a circle.
    """
    for task in tasks[:ahead]:
        next(task)
    yield
    for k, task in enumerate(tasks):
        next(task)
        if one_at_a_time:
            _exhaust(task)
        elif k > 0:
            next(tasks[k - 1], None)
        # Its slot was that of bucket k-1, whose results are applied now.
        if k + ahead < len(tasks):
            next(tasks[k + ahead])
        yield
    for task in tasks[-2:]:
        _exhaust(task)


def _exhaust(task: Iterator[None]) -> None:
    for _ in task:
        pass


def accumulate(params: Iterable[Param]) -> None:
    """Takes each parameter's gradient into its momentum, once per step."""
    together: dict[int, list[Param]] = {}
    for param in params:
        if param.take_gradient():
            together.setdefault(id(param.formulas), []).append(param)
    for of_formulas in together.values():
        of_formulas[0].formulas.accumulate(
            [param.momentum for param in of_formulas],
            [param.grad for param in of_formulas if param.grad is not None],
        )
