"""One step: the buckets, overlapped.

While bucket k is orthogonalized, the gathers of ``prefetch_count`` later buckets are in flight and the
results of bucket k-1 are on their way back.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import torch

# The public one costs tens of microseconds where nobody profiles.
from torch._C._profiler import _RecordFunctionFast
from torch.optim._muon_engine.layouts import listed
from torch.optim._muon_engine.layouts.dtensor import local_gradient, local_part
from torch.optim._muon_engine.process_groups import is_dry_run
from torch.optim._muon_engine.runtime.buffers import (
    add_contributions,
    copy_all,
    named,
)
from torch.optim._muon_engine.runtime.grad_status import (
    GradStatus,
    GradStatuses,
    meanings,
    Summary,
)
from torch.optim._muon_engine.schedule.specs import RELAYS_IN_FLIGHT


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from torch import Tensor
    from torch.optim._muon_engine.layouts import Region
    from torch.optim._muon_engine.runtime import Formulas, StepParam
    from torch.optim._muon_engine.runtime.buffers import (
        BucketBuffers,
        Buffers,
        PackedBuffer,
        RelayBuffer,
    )
    from torch.optim._muon_engine.runtime.grad_status import Joining
    from torch.optim._muon_engine.schedule.specs import Schedule


log = logging.getLogger("torch.optim.muon")

# What accelerators look ahead at one time, in momentum's dtype, unless a region is larger.
PREPARED_BYTES = 64 * 1024**2


class ParamState:
    """A parameter during one step: its local tensors. Several matrices may share it (FSDP1)."""

    def __init__(self, param: StepParam, momentum_buffer: Tensor, unusable: bool):
        self.param = param
        self.formulas: Formulas = param.formulas
        self.local = local_part(param.tensor)
        self.momentum = local_part(momentum_buffer)
        self.unusable = unusable
        # Placed as the parameter is, from the moment that the momentum takes it in.
        self.grad: Tensor | None = None
        self._accumulated = False

    @property
    def has_grad(self) -> bool:
        return self.param.grad is not None and not self.unusable

    @property
    def blended(self) -> Tensor:
        """What nesterov looks ahead through; nothing comes of the momentum itself."""
        return self.momentum if self.grad is None else self.grad

    def status_of(self, shard: Sequence[Region]) -> GradStatus:
        """The status of a matrix of which this rank holds ``shard``."""
        if self.unusable:
            return GradStatus.UNUSABLE
        if not any(region.numel for region in shard):
            return GradStatus.EMPTY
        return GradStatus.PRESENT if self.has_grad else GradStatus.ABSENT

    def place_gradient_of_stack(self) -> None:
        """Brings the gradient of a stack to its parameter's placement, if that is another.

        All ranks of the mesh take part, and have other matrices of the stack in other buckets each.
        """
        tensor, grad = self.param.tensor, self.param.grad
        if tensor.ndim > 2 and grad is not None and not self.unusable:
            if getattr(grad, "placements", None) != getattr(tensor, "placements", None):
                self.grad = local_gradient(tensor, grad)

    def take_gradient(self) -> bool:
        """Whether there is a gradient that the momentum has not taken in yet."""
        grad = self.param.grad
        if self._accumulated or grad is None or self.unusable:
            return False
        self._accumulated = True
        if self.grad is None:
            self.grad = local_gradient(self.param.tensor, grad)
        return True


class MatrixState:
    """One matrix on this rank, from step to step.

    Args:
        number: its place in the schedule.
    """

    def __init__(self, schedule: Schedule, number: int, rank: int) -> None:
        self.number = number
        self.layout = schedule.layouts[number]
        self.owner = schedule.owners[number]
        self.rank = rank
        self.shard = self.layout.shards.of(rank)
        self.replicas = self.layout.shards.replicas_of(rank)
        # Of replicas, one sends its shard; of contributions to a sum, one receives.
        self.own = self.shard if schedule.is_source(number, rank) else ()
        self.receives = schedule.receives(number, rank)
        # Set at the beginning of each step.
        self.param: ParamState

    @property
    def status(self) -> GradStatus:
        return self.param.status_of(self.shard)

    def prepared(self, memory: Scratch, region: Region) -> Tensor:
        """``region`` of what is to be orthogonalized, good until the next call."""
        momentum = region.of_local(self.param.momentum)
        if self.param.grad is None:
            return momentum
        grad = region.of_local(self.param.grad)
        out = memory.get("prepared", momentum.shape, momentum.dtype, momentum.device)
        return self.param.formulas.prepare(momentum, grad, out=out)

    def local(self, region: Region) -> Tensor:
        return region.of_local(self.param.local)

    def log(self, phase: str) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "rank %d: %s %s, owner %d",
                self.rank,
                phase,
                self.layout.describe(),
                self.owner,
            )


class Scratch:
    """Memory that is used again, from matrix to matrix and from step to step."""

    def __init__(self) -> None:
        self._flat: dict[Hashable, Tensor] = {}
        self._last: dict[Hashable, Tensor] = {}

    def get(
        self,
        purpose: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A tensor of ``shape``, good until the next call with this purpose."""
        key = (purpose, dtype, device)
        last = self._last.get(key)
        if last is not None and last.shape == shape:
            return last
        numel = math.prod(shape)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._flat[key] = torch.empty(numel, dtype=dtype, device=device)
        view = self._last[key] = flat.narrow(0, 0, numel).view(shape)
        return view


def _range(phase: str, of: BucketBuffers | RelayBuffer) -> AbstractContextManager[Any]:
    """What a profiler shows of a phase of one bucket."""
    bucket = of.bucket
    return _RecordFunctionFast(
        f"Muon {phase}, bucket {bucket.index} of {len(bucket.group)} ranks"
    )


def _profiled(phase: str) -> Callable[[Callable], Callable]:
    def wrap(method: Callable) -> Callable:
        @functools.wraps(method)
        def profiled(pipeline: Pipeline, bucket: BucketBuffers) -> None:
            with _range(phase, bucket):
                method(pipeline, bucket)

        return profiled

    return wrap


class Pipeline:
    """Runs ``schedule`` for one rank, step after step, over persistent buffers."""

    def __init__(
        self,
        schedule: Schedule,
        buffers: Buffers,
        rank: int,
        device: torch.device,
        statuses: GradStatuses,
    ) -> None:
        self.schedule = schedule
        self.buffers = buffers
        self.rank = rank
        self.device = device
        self.statuses = statuses
        self.matrices = {
            number: MatrixState(schedule, number, rank)
            for bucket in buffers.buckets
            for number in bucket.bucket.matrices
        }
        self._relays: deque[RelayBuffer] = deque()
        # What this rank says of its matrices, in their order, and where each of them stands in it.
        self._said: Tensor
        # Of which of them it compares values in this step, and what it means where digests differ.
        self._compares: list[bool] = []
        self._differs: Tensor
        self._place = {number: place for place, number in enumerate(self.matrices)}
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._joining: list[tuple[tuple[int, ...], Sequence[int], Joining]] = []
        self._scratch = Scratch()
        # For the errors of a step: a phase, and the matrices that are in it.
        self._at: tuple[str, Sequence[MatrixState]] = ("", ())
        # For debugging, with one owner at a time, nothing overlaps.
        self._one_by_one = schedule.one_owner_at_a_time and buffers.prefetch_count == 0

    def run(self, params: Mapping[int, ParamState]) -> None:
        """Makes one step with ``params``, by index and in its order."""
        for matrix in self.matrices.values():
            matrix.param = params[matrix.layout.key.index]
        for param in params.values():
            param.place_gradient_of_stack()
        try:
            self._run()
        except BaseException:
            self._drain()
            raise
        finally:
            # Gradients are the user's to free.
            for matrix in self.matrices.values():
                del matrix.param

    @property
    def where(self) -> str:
        """What this rank does, or did when an error came; "" between steps."""
        phase, matrices = self._at
        described = [matrix.layout.describe() for matrix in matrices]
        return f"{phase} of {listed(described)}" if phase else ""

    def _matrices_of(self, bucket: BucketBuffers) -> list[MatrixState]:
        return [self.matrices[number] for number in bucket.bucket.matrices]

    def _drain(self) -> None:
        """Waits for whatever is under way, after an error."""
        for *_, joining in self._joining:
            # The error that led here is the one to report.
            with suppress(Exception):
                joining.work.wait()
        self._joining = []
        self._relays.clear()
        self.buffers.drain()

    def _run(self) -> None:
        buckets = self.buffers.buckets
        self.say()
        for bucket in buckets:
            if bucket.bucket.index <= self.buffers.prefetch_count:
                self.gather(bucket)
        # By group: ranks may have other buckets between two of the same group, and everyone in the
        # group has to relay at the same place.
        returning: dict[tuple[int, ...], BucketBuffers] = {}
        for bucket in buckets:
            self.relay(leave=len(self._relays))
            self._at = "wait for gather", self._matrices_of(bucket)
            with _range("wait for gather", bucket):
                bucket.wait()
            self.orthogonalize(bucket)
            self.relay()
            self._at = "scatter", self._matrices_of(bucket)
            with _range("scatter", bucket):
                bucket.start_scatter()
            finished = returning.pop(bucket.bucket.group, None)
            if self._one_by_one:
                finished = bucket
            else:
                returning[bucket.bucket.group] = bucket
            # The next gather takes the slot of the bucket that is finished here.
            if finished is not None:
                self.finish(finished)
            if bucket.follower is not None:
                self.gather(bucket.follower)
        for bucket in returning.values():
            self.finish(bucket)
        self.relay()
        self._at = "", ()

    def say(self) -> None:
        """Takes down what this rank says of its matrices, and has its replicas join in."""
        matrices = tuple(self.matrices.values())
        self._at = "statuses", matrices
        statuses = [matrix.status for matrix in matrices]
        # One for each of few groups of parameters.
        kinds = {id(m.param.formulas): m.param.formulas for m in matrices}
        options = {key: (of.digest, of.moves) for key, of in kinds.items()}
        compares, digests = [], []
        for matrix in matrices:
            digest, moves = options[id(matrix.param.formulas)]
            # Once, and not where nothing moves: then a checkpoint's values may still be on their way.
            # All holders decide alike, whatever else each of them holds.
            compares.append(
                moves
                and matrix.layout.shards.replicas > 1
                and matrix.layout.key[:2] not in self.statuses.compared
            )
            digests.append(0 if compares[-1] else digest)
        compared = (m.layout.key[:2] for m, now in zip(matrices, compares) if now)
        self.statuses.compared.update(compared)
        device = self.buffers.device
        if compares != self._compares:
            self._compares, self._differs = compares, meanings(compares, device)
        values = self._digests_of_values() if any(compares) else None
        self._said = self.statuses.said(statuses, digests, device, values)
        for ranks, group, numbers in self.buffers.replica_sets:
            places = self._places_of(numbers)
            said, differs = self._said[places], self._differs[places]
            with self._named_joining(ranks, numbers):
                joining = self.statuses.start_joining(said, group, differs)
            self._joining.append((ranks, numbers, joining))

    def _named_joining(
        self, ranks: tuple[int, ...], numbers: Sequence[int]
    ) -> AbstractContextManager[None]:
        layouts = (self.matrices[number].layout for number in numbers)
        return named("all-reduce of what replicas say", layouts, ranks)

    def _digests_of_values(self) -> Tensor:
        """Of this rank's shards that have replicas, where these are compared; zeros of others."""
        found = []
        for matrix, compares in zip(
            self.matrices.values(), self._compares, strict=True
        ):
            total = torch.zeros((), dtype=torch.int64, device=self.buffers.device)
            if compares and len(matrix.replicas) > 1:
                for region in matrix.shard:
                    total = total + digest_of(matrix.local(region)).to(total.device)
            found.append(total)
        return torch.stack(found)

    def _equals(self, bucket: BucketBuffers) -> Tensor | None:
        """Which flags have to be equal where values are compared, for :meth:`GradStatuses.summarize`."""
        received = bucket.gather_recv
        compares = [self._compares[self._place[number]] for number in received.matrices]
        if not any(compares):
            return None
        rows = []
        for number, of_values, ranks in zip(
            received.matrices, compares, received.flag_ranks(), strict=True
        ):
            if not of_values:
                rows.append([len(ranks)] * len(ranks))
                continue
            shards = self.matrices[number].layout.shards
            # The first of each set stands for all; the owner stands after the last.
            first: dict[tuple[int, ...], int] = {
                shards.replicas_of(self.rank): len(ranks)
            }
            rows.append(
                [
                    at
                    if shards.is_empty(rank)
                    else first.setdefault(shards.replicas_of(rank), at)
                    for at, rank in enumerate(ranks)
                ]
            )
        return torch.tensor(rows, dtype=torch.long, device=self.buffers.device)

    def said(self, matrices: Sequence[int]) -> Tensor:
        """What this rank says of ``matrices``, or all of its replicas do."""
        while self._joining:
            ranks, numbers, joining = self._joining.pop()
            with self._named_joining(ranks, numbers):
                self._said[self._places_of(numbers)] = joining.wait()
        return self._said[self._places_of(matrices)]

    def _places_of(self, numbers: Sequence[int]) -> Tensor:
        numbers = tuple(numbers)
        if numbers not in self._places:
            places = [self._place[number] for number in numbers]
            self._places[numbers] = torch.tensor(
                places, dtype=torch.long, device=self.buffers.device
            )
        return self._places[numbers]

    @_profiled("gather")
    def gather(self, bucket: BucketBuffers) -> None:
        """Takes the gradients of the bucket's matrices in, and sends this rank's shards off."""
        matrices = self._matrices_of(bucket)
        # A CPU goes matrix by matrix, each packed while it is in the cache; others in few launches.
        one_by_one = self.device.type == "cpu"
        for some in [[m] for m in matrices] if one_by_one else [matrices]:
            self._at = "accumulate", some
            self.accumulate(some)
            self._at = "gather", some
            packed = []
            for matrix in some:
                matrix.log("gather")
                if matrix.param.has_grad:
                    found = bucket.gather_send.regions(matrix.number)
                    packed += [(matrix, region, view) for _, region, view in found]
            self.copy_prepared(packed)
        self._at = "gather", matrices
        send = bucket.gather_send
        self.statuses.send(send, bucket.bucket.index, self.said(send.matrices))
        bucket.start_gather()

    def copy_prepared(
        self, targets: Iterable[tuple[MatrixState, Region, Tensor]]
    ) -> None:
        """Writes regions of what is to be orthogonalized to where they are wanted."""
        if self.device.type == "cpu":
            for matrix, region, target in targets:
                target.copy_(matrix.prepared(self._scratch, region))
            return
        for some in _bounded(targets):
            formulas = some[0][0].param.formulas
            sources = formulas.prepare_together(
                [region.of_local(matrix.param.momentum) for matrix, region, _ in some],
                [region.of_local(matrix.param.blended) for matrix, region, _ in some],
            )
            copy_all(list(zip((target for _, _, target in some), sources)))

    def accumulate(self, matrices: Iterable[MatrixState]) -> None:
        together: dict[int, list[ParamState]] = {}
        for matrix in matrices:
            if matrix.param.take_gradient():
                formulas = matrix.param.formulas
                together.setdefault(id(formulas), []).append(matrix.param)
        for params in together.values():
            params[0].formulas.accumulate(
                [param.momentum for param in params],
                [param.grad for param in params if param.grad is not None],
            )

    @_profiled("orthogonalize")
    def orthogonalize(self, bucket: BucketBuffers) -> None:
        """Makes the updates of this rank's matrices and packs them for their holders."""
        if not bucket.owned:
            return
        matrices = [self.matrices[number] for number in bucket.owned]
        if bucket.group is not None:
            summary = self.statuses.summarize(
                bucket.gather_recv,
                [bucket.scatter_send, bucket.kept],
                bucket.bucket.index,
                bucket.owned,
                self.said(bucket.owned),
                self._differs[self._places_of(bucket.owned)],
                self._equals(bucket),
            )
            self.statuses.keep([matrix.layout for matrix in matrices], summary)
            if summary.device.type == "cpu" and not is_dry_run():
                # An owner whose own shard is empty learns here that nobody has a gradient. Elsewhere it
                # would have to wait for the device, and orthogonalizes what nobody applies.
                found = zip(matrices, summary.tolist(), strict=True)
                matrices = [m for m, value in found if value & Summary.SOME_PRESENT]
        batches, relays = self.batches(matrices), len(self._relays)
        for done, batch in enumerate(batches, 1):
            self.orthogonalize_batch(bucket, batch)
            # Evenly, so that the next ones are under way during the next batch.
            self.relay(leave=relays - relays * done // len(batches))

    def batches(self, matrices: Iterable[MatrixState]) -> list[list[MatrixState]]:
        """Matrices of one shape and one kind of Newton-Schulz, as many as the formulas want."""
        alike: dict[Hashable, list[list[MatrixState]]] = {}
        for matrix in matrices:
            if not matrix.status.applies:
                continue
            formulas, shape = matrix.param.formulas, matrix.layout.shape
            found = alike.setdefault((formulas.compute_key, shape), [[]])
            if len(found[-1]) == formulas.batch_size(shape, self.device):
                found.append([])
            found[-1].append(matrix)
        return [batch for found in alike.values() for batch in found]

    def orthogonalize_batch(
        self, bucket: BucketBuffers, batch: Sequence[MatrixState]
    ) -> None:
        self._at = "assemble", batch
        shape, dtype = batch[0].layout.shape, bucket.bucket.scatter_dtype
        whole = self._scratch.get(
            "whole", (len(batch), *shape), dtype, bucket.scatter_send.flat.device
        )
        wholes = whole.unbind()
        self.assemble(bucket, batch, wholes)
        self._at = "orthogonalize", batch
        formulas = batch[0].param.formulas
        if len(batch) == 1:
            updates = [formulas.orthogonalize(wholes[0])]
        else:
            updates = list(formulas.orthogonalize(whole).unbind())
        for i, update in enumerate(updates):
            if not update.is_contiguous():
                # Turning a tall one once, as a whole, is faster than turning each region of it.
                updates[i] = wholes[i].copy_(update)
        made = list(zip(batch, updates, strict=True))
        copy_all(
            [pair for m, update in made for pair in bucket.returned(m.number, update)]
        )
        # Now, while updates are there: the owner's own part of one does not travel.
        self._at = "apply", batch
        for matrix in batch:
            matrix.log("apply")
        self.apply(
            (matrix, region, region.of_matrix(update))
            for matrix, update in made
            for region in matrix.shard
        )

    def assemble(
        self,
        bucket: BucketBuffers,
        batch: Sequence[MatrixState],
        wholes: Sequence[Tensor],
    ) -> None:
        """Puts matrices together from what came and what this rank holds itself."""
        held: list[tuple[MatrixState, Region, Tensor]] = []
        came: list[tuple[Tensor, Tensor]] = []
        for matrix, out in zip(batch, wholes, strict=True):
            if matrix.layout.shards.partial:
                own = [
                    (region, matrix.prepared(self._scratch, region).clone())
                    for region in matrix.own
                ]
                add_contributions(
                    bucket, matrix.number, matrix.layout, own, self.rank, out
                )
            else:
                held += [(matrix, r, r.of_matrix(out)) for r in matrix.own]
                came += bucket.received(matrix.number, out)
            matrix.log("orthogonalize")
        self.copy_prepared(held)
        copy_all(came)

    def finish(self, bucket: BucketBuffers) -> None:
        """Waits for the bucket's results and applies them; what is to be relayed is packed."""
        self.relay()
        self._at = "wait for scatter", self._matrices_of(bucket)
        with _range("wait for scatter", bucket):
            bucket.wait()
        with _range("apply", bucket):
            self.take(bucket, bucket.scatter_recv)
            for relay in bucket.relays:
                if relay.relay.source == self.rank:
                    relay.pack(bucket)
        self._relays.extend(bucket.relays)

    def relay(self, leave: int = 0) -> None:
        """Passes results on along replicas until ``leave`` broadcasts are left.

        Of those some are under way. All ranks start them in one order.
        """
        while self._relays:
            for relay in islice(self._relays, RELAYS_IN_FLIGHT):
                relay.start()
            if len(self._relays) <= leave:
                return
            relay = self._relays.popleft()
            self._at = (
                "wait for relay",
                [self.matrices[number] for number in relay.packed.matrices],
            )
            with _range("wait for relay", relay):
                relay.wait()
            if relay.relay.source != self.rank:
                with _range("apply", relay):
                    self.take(relay, relay.packed)

    def take(self, bucket: BucketBuffers | RelayBuffer, received: PackedBuffer) -> None:
        """Applies what this rank has received."""
        matrices = [self.matrices[number] for number in received.matrices]
        self._at = "apply", matrices
        layouts = [matrix.layout for matrix in matrices]
        self.statuses.receive(received, bucket.bucket.index, layouts)
        moves: list[tuple[MatrixState, Region, Tensor | None]] = []
        for matrix in matrices:
            if not matrix.status.applies:
                continue
            matrix.log("apply")
            if matrix.receives:
                for _, region, update in received.regions(matrix.number):
                    moves.append((matrix, region, update))
            else:
                moves += [(matrix, region, None) for region in matrix.shard]
        self.apply(moves)

    def apply(self, moves: Iterable[tuple[MatrixState, Region, Tensor | None]]) -> None:
        """Decays and moves regions of parameters: one by one on a CPU, else in few launches."""
        alike: dict[Hashable, list[tuple[Tensor, Tensor | None]]] = {}
        formulas: dict[Hashable, tuple[Formulas, tuple[int, int]]] = {}
        for matrix, region, update in moves:
            local, how = matrix.local(region), matrix.param.formulas
            shape = matrix.layout.shape
            if update is not None and update.device != local.device:
                # Offloaded parameters: the exchange was between accelerators.
                update = update.to(local.device)
            if local.device.type == "cpu":
                how.apply([local], None if update is None else [update], shape)
                continue
            key = (id(how), shape, update is None)
            alike.setdefault(key, []).append((local, update))
            formulas[key] = how, shape
        for key, found in alike.items():
            how, shape = formulas[key]
            updates = [update for _, update in found if update is not None]
            how.apply([local for local, _ in found], updates or None, shape)


def _bounded(
    targets: Iterable[tuple[MatrixState, Region, Tensor]],
) -> list[list[tuple[MatrixState, Region, Tensor]]]:
    """Those of one kind of formulas together, up to ``PREPARED_BYTES`` of them."""
    made: list[list[tuple[MatrixState, Region, Tensor]]] = []
    last: dict[int, tuple[int, int]] = {}
    for target in targets:
        matrix, region, _ = target
        nbytes = region.numel * matrix.layout.dtype.itemsize
        at, room = last.get(id(matrix.param.formulas), (0, -1))
        if nbytes > room:
            at, room = len(made), max(nbytes, PREPARED_BYTES)
            made.append([])
        made[at].append(target)
        last[id(matrix.param.formulas)] = at, room - nbytes
    return made


def digest_of(values: Tensor) -> Tensor:
    """A few bits of a sum over the bits of ``values``: an integer without dimensions, on their device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = values.view(ints[values.itemsize]).sum(dtype=torch.int64)
    # The golden ratio's bits carry a difference in any bit into the highest ones.
    return ((total * -7046029254386353131) >> 48) & 0xFFFF
