"""One step: the buckets, overlapped.

While bucket k is orthogonalized, the gathers of ``prefetch_count`` later buckets are in flight, and the
results of bucket k-1 are on their way back.
"""

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
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
    drain,
    LocalBucket,
    named,
)
from torch.optim._muon_engine.schedule.packs import RELAYS_IN_FLIGHT


log = logging.getLogger("torch.optim.muon")

# Accelerators blend momentum and gradients of this many bytes at once, unless a region is larger.
PREPARED_BYTES = 64 * 1024**2


class Pipeline:
    """Runs the buckets of one rank, step after step, over persistent memory.

    Args:
        buckets: this rank's buckets in their global order.
        statuses: the side channels of this rank's groups, in the order of all ranks.
        prefetch_count: gathers in flight ahead of the bucket that is orthogonalized.
        one_at_a_time: for debugging: wait for each scatter before the next bucket.
    """

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        statuses: Sequence[Statuses],
        rank: int,
        device: torch.device,
        prefetch_count: int,
        one_at_a_time: bool,
    ) -> None:
        self.buckets = buckets
        self.statuses = statuses
        self.rank = rank
        self.device = device
        self.prefetch_count = prefetch_count
        self.one_at_a_time = one_at_a_time
        self._relays: deque[LocalRelay] = deque()
        # Memory that one matrix after another uses, by purpose and dtype.
        self._memory: dict[Hashable, Tensor] = {}
        # The phase and matrices at hand, for error messages.
        self._at: tuple[str, Sequence[Matrix]] = ("", ())

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""
        phase, matrices = self._at
        described = [matrix.layout.describe() for matrix in matrices]
        return f"{phase} of {listed(described)}" if phase else ""

    def run(self, step: int) -> None:
        """Makes this rank's ``step``-th step with the gradients that its parameters have now."""
        try:
            self._run(step)
        except BaseException:
            for statuses in self.statuses:
                statuses.forget()
            self._relays.clear()
            drain(self.buckets)
            raise

    def _run(self, step: int) -> None:
        self._at = "statuses", [m for s in self.statuses for m in s.matrices]
        for statuses in self.statuses:
            statuses.start(step)
        for statuses in self.statuses:
            statuses.check_step()
        for bucket in self.buckets:
            if bucket.bucket.index <= self.prefetch_count:
                self.gather(bucket)
        # By group, because a rank may have other groups' buckets between two buckets of one group, and
        # all ranks of a group must start its collectives in one order.
        returning: dict[tuple[int, ...], LocalBucket] = {}
        for bucket in self.buckets:
            self.relay(leave=len(self._relays))
            self.wait(bucket, "wait for gather")
            self.orthogonalize(bucket)
            self.relay()
            with self._phase("scatter", bucket):
                bucket.start_scatter()
            finished = returning.pop(bucket.bucket.group, None)
            if self.one_at_a_time:
                finished = bucket
            else:
                returning[bucket.bucket.group] = bucket
            if finished is not None:
                self.finish(finished)
            # The follower takes the slot that ``finished`` had.
            if bucket.follower is not None:
                self.gather(bucket.follower)
        for bucket in returning.values():
            self.finish(bucket)
        self.relay()
        self._at = "statuses", [m for s in self.statuses for m in s.matrices]
        for statuses in self.statuses:
            statuses.finish()
        self._at = "", ()

    def _phase(
        self, phase: str, of: LocalBucket | LocalRelay
    ) -> AbstractContextManager[Any]:
        """Names a phase for error messages, and for a profiler."""
        self._at = phase, of.matrices
        return _RecordFunctionFast(f"Muon {phase}, {of.name}")

    def wait(self, one: LocalBucket | LocalRelay, phase: str) -> None:
        with self._phase(phase, one):
            one.wait()

    def _log(self, phase: str, matrix: Matrix) -> None:
        if log.isEnabledFor(logging.DEBUG):
            what = phase, matrix.layout.describe(), matrix.owner
            log.debug("rank %d: %s %s, owner %d", self.rank, *what)

    def _scratch(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of ``shape``, valid until the next call with this purpose."""
        numel = math.prod(shape)
        key = purpose, like.dtype, like.device
        flat = self._memory.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._memory[key] = like.new_empty(numel)
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
                targets = []
                for matrix in part:
                    self._log("gather", matrix)
                    found = bucket.gather_send.of(matrix.number)
                    if matrix.param.has_grad:
                        targets += [(matrix, region, view) for _, region, view in found]
                self.prepare(targets)
            self._at = "gather", bucket.matrices
            bucket.start_gather()

    def prepare(self, targets: Sequence[tuple[Matrix, Region, Tensor]]) -> None:
        """Writes regions of the tensors to orthogonalize: momentum, blended with the gradient if nesterov."""
        if self.device.type != "cpu":
            for some in _bounded(targets):
                sources = some[0][0].param.formulas.prepare_all(
                    [region.of_local(m.param.momentum) for m, region, _ in some],
                    [region.of_local(m.param.lookahead) for m, region, _ in some],
                )
                copy_all([(t, source) for (_, _, t), source in zip(some, sources)])
            return
        for matrix, region, target in targets:
            target.copy_(self._prepared(matrix, region))

    def _prepared(self, matrix: Matrix, region: Region) -> Tensor:
        momentum = region.of_local(matrix.param.momentum)
        if matrix.param.grad is None:
            return momentum
        out = self._scratch("prepared", momentum.shape, momentum)
        grad = region.of_local(matrix.param.grad)
        return matrix.param.formulas.prepare(momentum, grad, out=out)

    def orthogonalize(self, bucket: LocalBucket) -> None:
        """Computes the updates of the matrices that this rank owns, and packs them for their holders."""
        owned = [m for m in bucket.matrices if m.owner == self.rank]
        if not owned:
            return
        with self._phase("orthogonalize", bucket):
            batches, relays = self.batches(owned), len(self._relays)
            # Owners of a divided matrix wait for each other, so none of them may wait for a relay before.
            shared = sum(batch[0].products is not None for batch in batches)
            for done, batch in enumerate(batches, 1):
                self.orthogonalize_batch(bucket, batch)
                # Spread the relays evenly, so that the next ones are in flight during the next batch.
                if done > shared:
                    rest = relays * (done - shared) // (len(batches) - shared)
                    self.relay(leave=relays - rest)

    def batches(self, matrices: Iterable[Matrix]) -> list[list[Matrix]]:
        """Matrices of one shape and equal options, as many as the formulas allow in a batch."""
        found: dict[Hashable, list[list[Matrix]]] = {}
        for matrix in matrices:
            formulas, shape = matrix.param.formulas, matrix.layout.shape
            if matrix.products is not None:
                # The other owners wait for this one, whatever its own gradient.
                found[matrix.number] = [[matrix]]
                continue
            if not matrix.applies:
                continue
            batches = found.setdefault((formulas.compute_key, shape), [[]])
            if len(batches[-1]) == formulas.batch_size(shape, self.device):
                batches.append([])
            batches[-1].append(matrix)
        return [batch for batches in found.values() for batch in batches]

    def orthogonalize_batch(self, bucket: LocalBucket, batch: Sequence[Matrix]) -> None:
        self._at = "assemble", batch
        shape = (len(batch), *batch[0].layout.shape)
        whole = self._scratch("whole", shape, bucket.scatter_send.flat)
        wholes = whole.unbind()
        self.assemble(bucket, batch, wholes)
        self._at = "orthogonalize", batch
        formulas = batch[0].param.formulas
        if batch[0].products is not None:
            with named("Newton-Schulz", batch, batch[0].products.ranks):
                updates = [formulas.orthogonalize(wholes[0], batch[0].products)]
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
        for matrix in batch:
            self._log("apply", matrix)
        self.apply(
            (matrix, region, region.of_matrix(update))
            for matrix, update in made
            for region in (matrix.shard if matrix.applies else ())
        )

    def assemble(
        self, bucket: LocalBucket, batch: Sequence[Matrix], wholes: Sequence[Tensor]
    ) -> None:
        """Fills ``wholes`` from the received regions and from this rank's own."""
        own: list[tuple[Matrix, Region, Tensor]] = []
        received: list[tuple[Tensor, Tensor]] = []
        for matrix, out in zip(batch, wholes, strict=True):
            self._log("orthogonalize", matrix)
            if matrix.layout.shards.partial:
                self._add_contributions(bucket, matrix, out)
                continue
            own += [(matrix, r, r.of_matrix(out)) for r in matrix.sent]
            found = bucket.gather_recv.of(matrix.number)
            received += [(region.of_matrix(out), view) for _, region, view in found]
        self.prepare(own)
        copy_all(received)

    def _add_contributions(
        self, bucket: LocalBucket, matrix: Matrix, out: Tensor
    ) -> None:
        """Adds the contributions to a sum in the order of their ranks, whoever owns the matrix."""
        layout = matrix.layout
        total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
        found = [
            (layout.shards.contribution_of(rank), region, view)
            for rank, region, view in bucket.gather_recv.of(matrix.number)
        ]
        mine = layout.shards.contribution_of(self.rank)
        for region in matrix.sent:
            found.append((mine, region, self._prepared(matrix, region).clone()))
        for _, region, tensor in sorted(found, key=lambda part: part[0]):
            region.of_matrix(total).add_(tensor)
        out.copy_(total)

    def finish(self, bucket: LocalBucket) -> None:
        """Waits for the bucket's results, applies them, and packs those that this rank relays."""
        self.relay()
        self.wait(bucket, "wait for scatter")
        with self._phase("apply", bucket):
            others = [m for m in bucket.matrices if m.owner != self.rank]
            self.apply_received(others, bucket.scatter_recv)
            # A contribution that receives no update decays, too.
            self.apply(
                (matrix, region, None)
                for matrix in others
                if matrix.applies and not matrix.receives
                for region in matrix.shard
            )
            for relay in bucket.relays:
                if relay.is_source:
                    relay.pack()
        self._relays.extend(bucket.relays)

    def relay(self, leave: int = 0) -> None:
        """Finishes relays until ``leave`` of them are left. All replicas start them in one order."""
        while self._relays:
            for relay in islice(self._relays, RELAYS_IN_FLIGHT):
                relay.start()
            if len(self._relays) <= leave:
                return
            relay = self._relays.popleft()
            self.wait(relay, "wait for relay")
            if not relay.is_source:
                with self._phase("apply", relay):
                    self.apply_received(relay.matrices, relay.packed)

    def apply_received(self, matrices: Sequence[Matrix], received: BoundPack) -> None:
        moves = []
        for matrix in matrices:
            found = received.of(matrix.number)
            if matrix.applies and (found or matrix.is_empty):
                self._log("apply", matrix)
                moves += [(matrix, region, view) for _, region, view in found]
        self.apply(moves)

    def apply(self, moves: Iterable[tuple[Matrix, Region, Tensor | None]]) -> None:
        """Decays and updates regions of parameters: one by one on a CPU, else in few launches."""
        alike: dict[Hashable, list[tuple[Matrix, Tensor, Tensor | None]]] = {}
        for number, (matrix, region, update) in enumerate(moves):
            local = matrix.local(region)
            # The parameters may be offloaded to a CPU.
            update = None if update is None else update.to(local.device)
            key = number
            if local.device.type != "cpu":
                key = id(matrix.param.formulas), matrix.layout.whole, update is None
            alike.setdefault(key, []).append((matrix, local, update))
        for found in alike.values():
            (matrix, *_), (_, local, updates) = found[0], map(list, zip(*found))
            updates = None if updates[0] is None else updates
            matrix.param.formulas.apply(local, updates, matrix.layout.whole)


def accumulate(params: Iterable[Param]) -> None:
    """Takes each parameter's gradient into its momentum, once per step."""
    together: dict[int, list[Param]] = {}
    for param in params:
        if param.take_gradient():
            together.setdefault(id(param.formulas), []).append(param)
    for found in together.values():
        found[0].formulas.accumulate(
            [param.momentum for param in found],
            [param.grad for param in found if param.grad is not None],
        )


def _bounded(
    targets: Iterable[tuple[Matrix, Region, Tensor]],
) -> list[list[tuple[Matrix, Region, Tensor]]]:
    """Groups targets with equal formulas, up to ``PREPARED_BYTES`` each."""
    found: list[list[tuple[Matrix, Region, Tensor]]] = []
    last: dict[int, tuple[int, int]] = {}
    for target in targets:
        matrix, region, _ = target
        nbytes = region.numel * matrix.layout.dtype.itemsize
        at, room = last.get(id(matrix.param.formulas), (0, -1))
        if nbytes > room:
            at, room = len(found), max(nbytes, PREPARED_BYTES)
            found.append([])
        found[at].append(target)
        last[id(matrix.param.formulas)] = at, room - nbytes
    return found
