"""The buckets of one step, overlapped.

While bucket k is orthogonalized, ``prefetch_count`` later gathers are in flight and the updates of
bucket k-1 are on their way back.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import _muon
from torch.optim._muon import _batches, _blend, _Hyper, _update_momentum, _Work
from torch.optim._muon_engine.runtime import assembly
from torch.optim._muon_engine.apply import apply_moves, Move
from torch.optim._muon_engine.local import (
    join_gradient_placing,
    local_gradient,
    local_part,
    new_momentum_buffer,
    placing_of,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.optim._muon_engine.runtime.buffers import Exchange, BucketBuffers
    from torch.optim._muon_engine.layouts import Region
    from torch.optim._muon_engine.local import GradientPlacing
    from torch.optim._muon_engine.schedule.buckets import Schedule


log = logging.getLogger("torch.optim.muon")

# A holder's vote on a matrix. A rank whose piece is empty cannot tell whether there is a gradient.
HAS_NONE, HAS_GRAD, ABSTAINS, IS_WRONG = 0, 1, 2, 3
# With each flag goes a tag of the step and the bucket, so that exchanges which were paired wrongly show
# themselves: beside two bits of vote or four of verdict, bfloat16 counts by ones up to 256.
VOTES, VERDICTS = 4, 16
# The owner's verdict, a sum over all votes: some had a gradient, some had none, some had a wrong one,
# some were in another step.
SOME_HAVE, SOME_LACK, SOME_WRONG, OUT_OF_STEP = 1, 2, 4, 8


class Pipeline:
    """Runs ``schedule`` for one rank, step after step, over persistent buffers.

    With ``deferred`` (any device but a CPU) the verdicts are not waited for: a rank acts on its own
    gradients, and a disagreement surfaces through :meth:`disagreements` of the next step.
    """

    def __init__(
        self,
        schedule: Schedule,
        exchange: Exchange,
        rank: int,
        placings: dict[int, GradientPlacing | None],
        *,
        deferred: bool,
    ) -> None:
        self.schedule = schedule
        self.exchange = exchange
        self.rank = rank
        self.deferred = deferred
        # How each parameter's gradient came when it last did.
        self.placings = placings
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._pending: list[tuple[list[int], Tensor, torch.Event | None]] = []

    def run(
        self,
        work: Sequence[_Work],
        keep: Callable[[int, Tensor], None],
        call: int,
        wrong: Collection[int] = (),
    ) -> dict[int, int]:
        """Makes one step.

        Args:
            call: how many times this rank has called ``step()``, for the ranks to see that they agree.
            wrong: indices of parameters whose gradient this rank cannot use.

        Returns:
            matrix -> verdict, where the holders of a matrix were at odds.
        """
        step = _Step(self, work, keep, call, wrong)
        try:
            return step.run()
        except BaseException:
            self.exchange.drain()
            raise

    def disagreements(
        self, work: Sequence[_Work], keep: Callable[[int, Tensor], None]
    ) -> dict[int, int]:
        """As :meth:`run` returns, of the last step, where it did not wait to know."""
        pending, self._pending = self._pending, []
        at_odds = {}
        for matrices, verdicts, copied in pending:
            if copied is not None:
                copied.synchronize()
            for matrix, verdict in zip(matrices, verdicts.tolist(), strict=True):
                if is_at_odds(verdict):
                    at_odds[matrix] = verdict
                elif verdict == SOME_HAVE:
                    index = self.schedule.layouts[matrix].key.index
                    if work[index].momentum_buffer is None:
                        keep(index, new_momentum_buffer(work[index].param))
        return at_odds

    def defer(self, matrices: list[int], verdicts: Tensor) -> None:
        """Copies ``verdicts`` to the host without waiting for them."""
        if verdicts.device.type == "cpu":
            self._pending.append((matrices, verdicts.clone(), None))
            return
        host = torch.empty_like(verdicts, device="cpu", pin_memory=True)
        host.copy_(verdicts, non_blocking=True)
        copied = torch.Event(verdicts.device)
        copied.record()
        self._pending.append((matrices, host, copied))

    def assembly(self, matrices: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Reused memory of shape (matrices, rows, columns), good until the next call."""
        return self._reused("assembly", (matrices, *shape), like)

    def scratch(self, like: Tensor) -> Tensor:
        """Reused memory of ``like``'s shape and dtype, good until the next call."""
        return self._reused("scratch", like.shape, like)

    def _reused(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        numel = math.prod(shape)
        key = (purpose, like.dtype, like.device)
        flat = self._memory.get(key)
        if flat is None or flat.numel() < numel:
            flat = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._memory[key] = flat
        return flat[:numel].view(shape)


def is_at_odds(verdict: int) -> bool:
    return bool(verdict & (SOME_WRONG | OUT_OF_STEP)) or verdict == (
        SOME_HAVE | SOME_LACK
    )


class _Step:
    def __init__(
        self,
        pipeline: Pipeline,
        work: Sequence[_Work],
        keep: Callable[[int, Tensor], None],
        call: int,
        wrong: Collection[int],
    ) -> None:
        self.pipeline = pipeline
        self.schedule = pipeline.schedule
        self.rank = pipeline.rank
        self.work = work
        self.keep = keep
        self.call = call
        self.wrong = wrong
        # Local parts by parameter index, None where there is no gradient.
        self.grads: dict[int, Tensor | None] = {}
        self.momentum: dict[int, Tensor | None] = {}
        self.verdicts: dict[int, int] = {}
        self.at_odds: dict[int, int] = {}

    def run(self) -> dict[int, int]:
        exchange = self.pipeline.exchange
        for buffers in exchange.buckets:
            if buffers.bucket.index <= exchange.prefetch_count:
                self.gather(buffers)
        previous: BucketBuffers | None = None
        for buffers in exchange.buckets:
            buffers.wait()
            self.orthogonalize(buffers)
            buffers.start_scatter()
            if self.schedule.one_owner_at_a_time and exchange.prefetch_count == 0:
                # For debugging, nothing overlaps.
                self.finish(buffers)
                following = exchange.follower(buffers)
                if following is not None:
                    self.gather(following)
                continue
            # Its slot is the one that the next gather takes.
            if previous is not None:
                self.finish(previous)
            following = exchange.follower(buffers)
            if following is not None:
                self.gather(following)
            previous = buffers
        if previous is not None:
            self.finish(previous)
        return self.at_odds

    def index_of(self, matrix: int) -> int:
        return self.schedule.layouts[matrix].key.index

    def gather(self, buffers: BucketBuffers) -> None:
        """Updates the momentum of the bucket's matrices and sends this rank's pieces off."""
        if self.pipeline.deferred:
            self.update_momenta(buffers.bucket.matrices)
        for matrix in buffers.bucket.matrices:
            self.update_momenta([matrix])
            self.log_phase("gather", matrix)
            if self.grads[self.index_of(matrix)] is not None:
                assembly.pack(buffers, matrix, partial(self.blended, matrix))
        send = buffers.gather_send
        if send.matrices:
            tag = self.tag(buffers, VOTES)
            send.write_flags(self.votes(send.matrices, send.flat.device) + VOTES * tag)
        buffers.start_gather()

    def update_momenta(self, matrices: Sequence[int]) -> None:
        """Takes the gradients of ``matrices`` in, where that was not done yet.

        On a CPU it is done matrix by matrix, each then packed while it is in the cache; elsewhere for
        a bucket at once, in few launches.
        """
        together: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for index in dict.fromkeys(map(self.index_of, matrices)):
            if index in self.grads:
                continue
            self.look_up(index)
            if self.grads[index] is not None:
                hyper = self.work[index].hyper
                buffers, grads = together.setdefault(hyper.momentum, ([], []))
                buffers.append(self.momentum[index])
                grads.append(self.grads[index])
        for momentum, (buffers, grads) in together.items():
            if len(buffers) == 1:
                _update_momentum(buffers[0], grads[0], momentum)
            else:
                torch._foreach_lerp_(buffers, grads, 1 - momentum)

    def look_up(self, index: int) -> None:
        """Notes the local parts of a parameter's gradient and momentum."""
        param, grad, buffer, _ = self.work[index]
        placings = self.pipeline.placings
        if grad is None or index in self.wrong:
            # The others' gradients, if placed as they last were, take a collective to be put right.
            join_gradient_placing(param, placings.get(index))
            self.grads[index] = None
            self.momentum[index] = None if buffer is None else local_part(buffer)
            return
        if buffer is None:
            buffer = new_momentum_buffer(param)
            self.keep(index, buffer)
        placings[index] = placing_of(grad)
        self.grads[index] = local_gradient(param, grad)
        self.momentum[index] = local_part(buffer)

    def blended(self, matrix: int, region: Region) -> Tensor:
        """A rectangle of this rank's part of what is to be orthogonalized."""
        index = self.index_of(matrix)
        momentum = region.of_local(self.momentum[index])
        grad = region.of_local(self.grads[index])
        scratch = self.pipeline.scratch(momentum)
        return _blend(momentum, grad, self.work[index].hyper, out=scratch)

    def vote(self, matrix: int) -> int:
        index = self.index_of(matrix)
        if index in self.wrong:
            return IS_WRONG
        if not any(r.numel for r in self.schedule.layouts[matrix].shard_of(self.rank)):
            return ABSTAINS
        return HAS_NONE if self.grads[index] is None else HAS_GRAD

    def tag(self, buffers: BucketBuffers, kinds: int) -> int:
        """What a flag of ``kinds`` values is tagged with in this step and bucket.

        Tags repeat, verdicts' every 16 steps; neighbouring steps and buckets have different ones.
        """
        return (5 * self.call + buffers.bucket.index + kinds) % (256 // kinds)

    def votes(self, matrices: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(
            [self.vote(m) for m in matrices], dtype=torch.int32, device=device
        )

    def orthogonalize(self, buffers: BucketBuffers) -> None:
        """Makes the updates of this rank's matrices and lays them out for their holders."""
        owned = buffers.spec.owned
        if not owned:
            return
        self.reduce_votes(buffers)
        going = [matrix for matrix in owned if self.should_apply(matrix)]
        for hyper, same in self.by_hyper(going).items():
            shapes = [self.schedule.layouts[matrix].shape for matrix in same]
            device = buffers.gather_recv.flat.device
            for batch in _batches(shapes, hyper.foreach, device):
                self.orthogonalize_batch(buffers, [same[i] for i in batch], hyper)

    def by_hyper(self, matrices: Sequence[int]) -> dict[_Hyper, list[int]]:
        """``matrices`` by what their Newton-Schulz iterations depend on."""
        found: dict[_Hyper, list[int]] = {}
        for matrix in matrices:
            hyper = self.work[self.index_of(matrix)].hyper
            # The rest of the hyperparameters is none of the iteration's business.
            hyper = hyper._replace(lr=0.0, weight_decay=0.0, adjust_lr_fn=None)
            found.setdefault(hyper, []).append(matrix)
        return found

    def orthogonalize_batch(
        self, buffers: BucketBuffers, batch: Sequence[int], hyper: _Hyper
    ) -> None:
        shape = self.schedule.layouts[batch[0]].shape
        like = buffers.scatter_send.flat
        whole = self.pipeline.assembly(len(batch), shape, like)
        for matrix, out in zip(batch, whole, strict=True):
            own = partial(self.blended, matrix)
            assembly.assemble(self.schedule, self.rank, buffers, matrix, own, out)
            self.log_phase("orthogonalize", matrix)
        updates = _muon._orthogonalize(whole, hyper)
        for matrix, out, update in zip(batch, whole, updates, strict=True):
            if not update.is_contiguous():
                # Turning a tall one once, as a whole, is faster than turning each piece of it.
                update = out.copy_(update)
            assembly.pack_update(buffers, matrix, update)
            # Before the rest is sent: kept until after, updates would take a bucket's memory again.
            self.apply_own(matrix, update)

    def reduce_votes(self, buffers: BucketBuffers) -> None:
        """Turns all ranks' votes on the owned matrices into verdicts, and sends these along."""
        owned = list(buffers.spec.owned)
        device = buffers.gather_recv.flat.device
        votes = self.votes(owned, device)[:, None]
        strayed = torch.zeros_like(votes, dtype=torch.bool)
        if buffers.gather_recv.matrices:
            flags = buffers.gather_recv.read_flags().to(votes.dtype)
            votes = torch.cat([votes, flags % VOTES], dim=1)
            strayed = flags // VOTES != self.tag(buffers, VOTES)
        found = (
            (SOME_HAVE, votes == HAS_GRAD),
            (SOME_LACK, votes == HAS_NONE),
            (SOME_WRONG, votes == IS_WRONG),
            (OUT_OF_STEP, strayed),
        )
        verdicts = sum(bit * which.any(dim=1).to(votes.dtype) for bit, which in found)
        buffers.scatter_send.write_flags(
            verdicts + VERDICTS * self.tag(buffers, VERDICTS)
        )
        self.record(owned, verdicts)

    def record(self, matrices: list[int], verdicts: Tensor) -> None:
        if self.pipeline.deferred:
            self.pipeline.defer(matrices, verdicts)
            return
        for matrix, verdict in zip(matrices, verdicts.tolist(), strict=True):
            self.verdicts[matrix] = int(verdict)
            if is_at_odds(int(verdict)):
                self.at_odds[matrix] = int(verdict)

    def should_apply(self, matrix: int) -> bool:
        """Whether ``matrix`` is updated: by its verdict, or where that is not known, by our vote."""
        if self.pipeline.deferred:
            return self.vote(matrix) in (HAS_GRAD, ABSTAINS)
        return self.verdicts[matrix] == SOME_HAVE

    def apply_own(self, matrix: int, update: Tensor) -> None:
        """Applies what this rank made itself to its own piece."""
        held = self.schedule.layouts[matrix].shard_of(self.rank)
        moves = self.moves(
            matrix, [(region, region.of_matrix(update)) for region in held]
        )
        apply_moves(moves, foreach=self.pipeline.deferred)

    def finish(self, buffers: BucketBuffers) -> None:
        """Waits for the bucket's updates and applies them."""
        buffers.wait()
        received = buffers.scatter_recv
        if received.matrices:
            flags = received.read_flags()[:, 0].to(torch.int32)
            strayed = flags // VERDICTS != self.tag(buffers, VERDICTS)
            verdicts = torch.where(strayed, OUT_OF_STEP, flags % VERDICTS)
            self.record(received.matrices, verdicts)
        moves: list[Move] = []
        for matrix in received.matrices:
            if not self.should_apply(matrix):
                continue
            if self.schedule.receives(matrix, self.rank):
                moves += self.moves(matrix, received.regions(matrix))
            else:
                held = self.schedule.layouts[matrix].shard_of(self.rank)
                moves += self.moves(matrix, [(region, None) for region in held])
        apply_moves(moves, foreach=self.pipeline.deferred)

    def moves(
        self, matrix: int, regions: Sequence[tuple[Region, Tensor | None]]
    ) -> list[Move]:
        """What is to be applied of ``matrix`` here, whose momentum buffer is there from now on."""
        layout = self.schedule.layouts[matrix]
        param, _, buffer, hyper = self.work[layout.key.index]
        known = not self.pipeline.deferred
        if buffer is None and self.grads[layout.key.index] is None and known:
            # An empty piece: its holders keep a buffer all the same, as all the others do.
            self.keep(layout.key.index, new_momentum_buffer(param))
        local = local_part(param)
        self.log_phase("apply", matrix)
        return [
            Move(region.of_local(local), update, hyper, layout.shape, region)
            for region, update in regions
        ]

    def log_phase(self, phase: str, matrix: int) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "rank %d: %s %s, owner %d",
                self.rank,
                phase,
                self.schedule.layouts[matrix].describe(),
                self.schedule.owners[matrix],
            )
