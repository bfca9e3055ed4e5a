"""A step of the engine on one rank: the operations of its plan, in their order.

The memory of a bucket belongs to the step: its gather takes it, and it is free when its updates are applied.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The public profiler range costs tens of microseconds even when no profiler runs.
from torch._C._profiler import _RecordFunctionFast
from torch.distributed import ProcessGroup

from .._muon_formulas import CACHE_BYTES
from .._newton_schulz import NS_DTYPE
from .flights import drain, InFlight
from .inputs import StepInputs
from .params import Matrix
from .plan import (
    Bucket,
    buckets_in_flight,
    Move,
    Phase,
    Plan,
    Round,
    ROUNDS_IN_FLIGHT,
)
from .process_groups import GridGroups, is_dry_run, listed
from .regions import Grid, Region
from .statuses import ELSEWHERE, Statuses


log = logging.getLogger("torch.optim.muon")
# Accelerators blend and apply regions of this many bytes at once, unless one region is larger.
TOGETHER_BYTES = 64 * 1024**2


class Progress:
    """Which phase of a step is running, and for which matrices or parameters; ("", ()) between steps."""

    def __init__(self) -> None:
        self.now: tuple[str, Sequence[Any]] = ("", ())

    def __str__(self) -> str:
        """For errors."""
        phase, subjects = self.now
        described = [subject.described for subject in subjects]
        return f"{phase} of {listed(described)}" if phase else ""


class BucketFlight(InFlight):
    """A bucket on its way: the memory that its shards and updates take in a step, and its collectives."""

    def __init__(
        self, bucket: Bucket, groups: GridGroups, rank: int, device: torch.device
    ) -> None:
        super().__init__(bucket.matrices)
        self.bucket = bucket
        self.name = (
            f"bucket {bucket.number} of {len(bucket.row) * len(bucket.column)} ranks"
        )
        self._group, self._device = groups.row, device
        self.rounds: list[RoundFlight] = []
        for of_round in bucket.rounds:
            self.rounds.append(RoundFlight(self, of_round, groups.column, rank))
        kept = sum(move.region.numel for move in bucket.kept) if self.rounds else 0
        self._numels = sum(bucket.exchange.send_sizes), kept
        self.free_memory()

    def take_memory(self) -> None:
        numel = sum(self.bucket.exchange.receive_sizes)
        # The others' shards of this rank's matrices, and later their updates.
        self.owned = torch.empty(numel, dtype=NS_DTYPE, device=self._device)
        # This rank's shards, and later their updates: first those of the row's other owners, then of its own matrices.
        self.held = torch.empty(sum(self._numels), dtype=NS_DTYPE, device=self._device)
        self.sent, self.kept = self.held.split(self._numels)

    def free_memory(self) -> None:
        self.held = self.sent = self.kept = self.owned = torch.empty(0)

    def start_gather(self) -> None:
        """Starts to send this rank's shards to the owners, and to receive those of its matrices."""
        _, _, send_sizes, receive_sizes = self.bucket.exchange
        self._start("gather", self.owned, self.sent, receive_sizes, send_sizes)

    def start_scatter(self) -> None:
        """Starts to send the updates to the row, and to receive those of this rank's shards."""
        _, _, send_sizes, receive_sizes = self.bucket.exchange
        self._start("scatter", self.sent, self.owned, send_sizes, receive_sizes)

    def start_rounds(self, first: int, count: int) -> None:
        """Starts to exchange updates along the column, of which this rank has its row's."""
        for of_round in self.rounds[first : first + count]:
            of_round.start(self.held)

    def _start(
        self,
        name: str,
        target: Tensor,
        source: Tensor,
        target_sizes: list[int],
        source_sizes: list[int],
    ) -> None:
        if self._group is None:
            return
        # The fake backend refuses an empty side.
        if is_dry_run() and not (target.numel() and source.numel()):
            return

        def start(target: Tensor, source: Tensor) -> Any:
            sizes, group = (target_sizes, source_sizes), self._group
            return dist.all_to_all_single(
                target, source, *sizes, group=group, async_op=True
            )

        self.launch(f"{name} of {self.name}", self.bucket.row, start, target, source)


class RoundFlight(InFlight):
    """A round along the column of a bucket."""

    def __init__(
        self,
        bucket: BucketFlight,
        planned: Round,
        group: ProcessGroup | None,
        rank: int,
    ) -> None:
        super().__init__(bucket.matrices)
        self.planned = planned
        self._name, self._column = f"forwarding of {bucket.name}", bucket.bucket.column
        self._group, self._rank = group, rank
        self.free_memory()

    def start(self, held: Tensor) -> None:
        """Starts to send a piece of the updates that this rank has, and to receive those of the other rows."""
        sizes = dict(self.planned.sizes)
        self.sent = held.narrow(0, self.planned.start, sizes.pop(self._rank, 0))
        numels = [*sizes.values()]
        self.received = held.new_empty(sum(numels))
        piece_of = dict(zip(sizes, self.received.split(numels)))
        piece_of[self._rank] = self.sent
        nothing = self.sent[:0]
        pieces = [piece_of.get(peer, nothing) for peer in self._column]
        group = self._group
        if not held.is_cpu:
            # One call, which NCCL makes as a group of broadcasts.
            def start(own: Tensor, *pieces: Tensor) -> Any:
                return dist.all_gather([*pieces], own, group=group, async_op=True)

            self.launch(self._name, self._column, start, self.sent, *pieces)
            return
        # Gloo has no all-gather of different sizes.
        for peer, piece in zip(self._column, pieces):
            if piece.numel():
                start_one = partial(
                    dist.broadcast, src=peer, group=group, async_op=True
                )
                self.launch(self._name, self._column, start_one, piece)

    def free_memory(self) -> None:
        # A piece of the updates that this rank has, and the updates of other rows.
        self.sent = self.received = torch.empty(0)


class PackedStep:
    """Runs the ``plan`` of one rank, step after step. ``groups`` has the groups of each grid."""

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[Grid, GridGroups],
        rank: int,
        device: torch.device,
    ) -> None:
        self.progress = Progress()
        # Whether ranks know how they differ before anything moves.
        self.awaits_statuses = False
        self.device = device
        self._owners = plan.owners
        self.buckets: list[BucketFlight] = []
        for bucket in plan.buckets:
            flight = BucketFlight(bucket, groups[bucket.grid], rank, device)
            self.buckets.append(flight)
        self._operations: list[tuple[Phase, BucketFlight, str]] = []
        for phase, index in plan.operations:
            flight = self.buckets[index]
            label = f"Muon {phase.value}, {flight.name}"
            self._operations.append((phase, flight, label))
        # Smaller grids first, so that they pass a difference on to the larger ones that contain them.
        self.statuses: list[Statuses] = []
        for grid, shared in plan.members.items():
            if groups[grid].several:
                channel = Statuses(shared, groups[grid], rank, device)
                self.statuses.insert(0, channel)
        self._sent_whole = self._params_sent_whole()
        # Those of which kernels take the gradient into momentum where they blend the two.
        self._fused: set[int] = set()

    def _params_sent_whole(self) -> set[int]:
        """The indices of the parameters of which this rank blends all that it stores, in regions without gaps."""
        sent: set[Matrix] = set()
        others: set[int] = set()
        for flight in self.buckets:
            bucket = flight.bucket
            for matrix, region in (*bucket.exchange.outgoing, *bucket.kept):
                sent.add(matrix)
                if matrix.param.is_sum or not region.is_contiguous:
                    others.add(matrix.index)
            others.update(m.index for m in bucket.matrices if m not in sent)
        return {matrix.index for matrix in sent} - others

    @property
    def _is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def share_statuses(
        self, step: int, inputs: StepInputs | None, has_changed: bool = False
    ) -> str:
        """Begins the ``step``-th step. Returns how ranks differ, if it waits for that. Without ``inputs``, this rank's
        parameters have changed, or it raises an error and tells the others that it has a problem.
        """
        shared = [matrix for each in self.statuses for matrix in each.matrices]
        self.progress.now = "statuses", shared
        self.awaits_statuses = all(each.awaits for each in self.statuses)
        # A rank that cannot use a gradient tells all of its grids, because each of them must end the step here. The
        # gradient may be of a matrix that no other rank has.
        has_problem = bool(inputs.problems) if inputs is not None else not has_changed
        text = ""
        for statuses in self.statuses:
            knows_of_problem = has_problem or bool(text)
            statuses.start(step, inputs, knows_of_problem, has_changed)
            if statuses.awaits or has_changed:
                reason = statuses.difference(inputs)
                # A larger grid's own reason says more.
                if reason and text in ("", ELSEWHERE):
                    text = reason
        return text

    def mismatch(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""
        texts = [each.difference() for each in self.statuses]
        return "; ".join(filter(None, texts))

    def drain(self) -> None:
        """After an error, waits for everything in flight."""
        # The memory stays, because a failed collective may write to it.
        drain(self.statuses)
        for flight in self.buckets:
            drain([flight, *flight.rounds])

    def run(self, inputs: StepInputs) -> None:
        """Makes a step. DTensor's collectives for gradients come first."""
        inputs.place(self.progress)
        self._fused = self._params_with_kernels(inputs)
        for phase, flight, label in self._operations:
            self.progress.now = phase.value, flight.matrices
            with _RecordFunctionFast(label):
                if phase is Phase.GATHER:
                    self._gather(flight, inputs)
                elif phase is Phase.COMPUTE:
                    self._compute(flight, inputs)
                elif phase is Phase.FORWARD:
                    self._wait(flight, "scatter")
                    flight.start_rounds(0, ROUNDS_IN_FLIGHT)
                else:
                    self._apply_updates(flight, inputs)
        for statuses in self.statuses:
            statuses.finish()
        self.progress.now = "", ()

    def _params_with_kernels(self, inputs: StepInputs) -> set[int]:
        has_kernels = [f.has_kernels(self.device) for f in inputs.formulas]
        fused: set[int] = set()
        if any(has_kernels):
            for index in self._sent_whole:
                if has_kernels[inputs.params[index].param.param_group]:
                    fused.add(index)
        return fused

    def _wait(self, flight: InFlight, collective: str) -> None:
        self.progress.now = f"wait for {collective}", flight.matrices
        flight.wait()

    def _gather(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Packs this rank's shards for their owners. The shards of matrices that it owns do not travel."""
        flight.take_memory()
        outgoing = flight.bucket.exchange.outgoing
        self._blend(outgoing, _views(flight.sent, outgoing), inputs)
        flight.start_gather()
        indices = dict.fromkeys(matrix.index for matrix in flight.matrices)
        inputs.accumulate(index for index in indices if index not in self._fused)
        self._log("gather", flight.matrices, inputs)

    def _compute(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Orthogonalizes this rank's matrices, applies its part of the updates, and starts to send the other parts."""
        self._wait(flight, "gather")
        bucket = flight.bucket
        incoming = bucket.exchange.incoming
        received = _by_matrix(incoming, _views(flight.owned, incoming))
        # With rounds, the updates of this rank's own regions travel, too.
        kept: Sequence[Tensor | None] = [None] * len(bucket.kept)
        if flight.rounds:
            kept = _views(flight.kept, bucket.kept)
        own = _by_matrix(bucket.kept, kept)
        present: list[Matrix] = []
        unsent: list[Tensor] = []
        for matrix in bucket.owned:
            if inputs.applies(matrix):
                present.append(matrix)
                continue
            for _, view in (*received.get(matrix, ()), *own.get(matrix, ())):
                if view is not None:
                    unsent.append(view)
        if unsent:
            # They travel, but are not applied.
            torch._foreach_zero_(unsent)
        for batch in self._batches(present, inputs):
            self.progress.now = Phase.COMPUTE.value, batch
            self._log("orthogonalize", batch, inputs)
            wholes = flight.owned.new_empty(len(batch), *batch[0].shape)
            self._orthogonalize(batch, wholes, own, received, inputs)
        self.progress.now = "scatter", flight.matrices
        flight.start_scatter()
        if len(bucket.row) == 1:
            flight.start_rounds(0, ROUNDS_IN_FLIGHT)

    def _batches(
        self, matrices: Sequence[Matrix], inputs: StepInputs
    ) -> Iterator[list[Matrix]]:
        """Matrices of one shape and equal options, as many as their formulas allow in a batch."""
        keys = [formulas.compute_key for formulas in inputs.formulas]
        alike: dict[tuple, list[Matrix]] = {}
        for matrix in matrices:
            key = keys[matrix.param.param_group], matrix.shape, matrix.split
            alike.setdefault(key, []).append(matrix)
        for (_, shape, _), members in alike.items():
            size = inputs.formulas_of(members[0]).batch_size(shape, self.device)
            for start in range(0, len(members), size):
                yield members[start : start + size]

    def _orthogonalize(
        self,
        batch: Sequence[Matrix],
        wholes: Tensor,
        own: "ByMatrix",
        received: "ByMatrix",
        inputs: StepInputs,
    ) -> None:
        """Puts matrices together in ``wholes`` out of this rank's ``own`` regions and those that it has ``received``,
        orthogonalizes them, and cuts the updates into regions: those of other ranks go where the momentum was, and its own
        are applied, or kept for the rounds.
        """
        moves: list[Move] = []
        own_regions: list[Tensor] = []
        kept: list[Tensor] = []
        packed: list[Tensor] = []
        regions: list[Tensor] = []
        for matrix, whole in zip(batch, wholes.unbind()):
            for region, view in own.get(matrix, ()):
                moves.append(Move(matrix, region))
                own_regions.append(region.of_matrix(whole))
                if view is not None:
                    kept.append(view)
            for region, view in received.get(matrix, ()):
                packed.append(view)
                regions.append(region.of_matrix(whole))
        self._blend(moves, own_regions, inputs)
        _copy(regions, packed)
        inputs.formulas_of(batch[0]).orthogonalize_all(wholes)
        _copy(packed, regions)
        if kept:
            _copy(kept, own_regions)
        else:
            # Here and not with the updates that arrive, because the next batch needs the memory.
            self._apply(moves, own_regions, inputs)

    def _apply_updates(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Applies the updates that this rank receives: those of the other rows, and those of its own."""
        self._wait(flight, "scatter")
        outgoing = flight.bucket.exchange.outgoing
        if not flight.rounds:
            self._apply(outgoing, _views(flight.sent, outgoing), inputs)
        # Ranks with the same shard apply its updates in the same pieces, because a CPU may round the last elements of a
        # bfloat16 tensor otherwise.
        for number, of_round in enumerate(flight.rounds):
            self._wait(of_round, "updates of replicas")
            planned = of_round.planned
            updates = _views(of_round.sent, planned.outgoing)
            updates += _views(of_round.received, planned.incoming)
            self._apply(planned.outgoing + planned.incoming, updates, inputs)
            of_round.free_memory()
            flight.start_rounds(number + ROUNDS_IN_FLIGHT, 1)
        flight.free_memory()

    def _blend(
        self, moves: Sequence[Move], targets: Sequence[Tensor], inputs: StepInputs
    ) -> None:
        """Writes regions of the tensors to orthogonalize to ``targets``: momentum, blended with the gradient if nesterov;
        without a gradient momentum, so that the owner receives defined values.
        """

        def kind_of(place: int) -> Hashable:
            param = moves[place].matrix.param
            # The kernels take contiguous targets only.
            is_contiguous = targets[place].is_contiguous()
            return param.param_group, param.index in self._fused, is_contiguous

        for places in self._together(moves, kind_of, inputs):
            first = moves[places[0]].matrix
            is_fused = first.index in self._fused
            if not is_fused:
                inputs.accumulate(moves[place].matrix.index for place in places)
            momenta: list[Tensor] = []
            gradients: list[Any] = []
            for place in places:
                matrix, region = moves[place]
                of_param = inputs.params[matrix.index]
                momentum = region.of_local(of_param.momentum)
                momenta.append(momentum)
                if of_param.gradient is not None:
                    gradients.append(region.of_local(of_param.gradient))
                else:
                    gradients.append(None if is_fused else momentum)
            written = [targets[place] for place in places]
            formulas = inputs.formulas_of(first)
            if is_fused:
                formulas.accumulate_and_blend(momenta, gradients, written)
            else:
                torch._foreach_copy_(written, formulas.blend(momenta, gradients))

    def _apply(
        self, moves: Sequence[Move], updates: Sequence[Tensor], inputs: StepInputs
    ) -> None:
        """Decays and updates regions of parameters."""
        applied: list[Move] = []
        pieces: list[tuple[Sequence[int], Tensor, Tensor]] = []
        for move, update in zip(moves, updates):
            matrix, region = move
            if not inputs.applies(matrix):
                continue
            param = region.of_local(inputs.params[matrix.index].local)
            if param.device != update.device:
                # An offloaded parameter.
                update = update.to(param.device)
            of_move = [(matrix.shape, param, update)]
            if matrix.split.sizes:
                of_move = inputs.pieces(matrix, region[:2], param, update)
            applied += [move] * len(of_move)
            pieces += of_move

        def kind_of(place: int) -> Hashable:
            shape, param, _ = pieces[place]
            # One launch rounds to one dtype.
            group = applied[place].matrix.param.param_group
            return group, shape, param.device, param.dtype

        for places in self._together(applied, kind_of, inputs):
            shape, _, _ = pieces[places[0]]
            params = [pieces[place][1] for place in places]
            given = [pieces[place][2] for place in places]
            inputs.apply(applied[places[0]].matrix, shape, params, given)
        self._log("apply", (move.matrix for move in applied), inputs)

    def _together(
        self,
        moves: Sequence[Move],
        kind_of: Callable[[int], Hashable],
        inputs: StepInputs,
    ) -> Iterator[list[int]]:
        """The places of ``moves`` whose regions one foreach call takes: of one kind, and few enough bytes."""
        most = CACHE_BYTES if self._is_cpu else TOGETHER_BYTES
        alike: dict[Hashable, list[int]] = {}
        for place in range(len(moves)):
            alike.setdefault(kind_of(place), []).append(place)
        for places in alike.values():
            formulas = inputs.formulas_of(moves[places[0]].matrix)
            if formulas.has_kernels(self.device):
                # All regions in one launch, which needs no memory of its own.
                yield places
                continue
            room, chunk = most, []
            for place in places:
                matrix, region = moves[place]
                nbytes = region.numel * matrix.param.traits.momentum_dtype.itemsize
                if chunk and nbytes > room:
                    yield chunk
                    room, chunk = most, []
                chunk.append(place)
                room -= nbytes
            yield chunk

    def _log(self, phase: str, matrices: Iterable[Matrix], inputs: StepInputs) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for matrix in matrices:
                values = inputs.rank, phase, matrix.described, self._owners[matrix]
                log.debug("rank %d: %s %s, owner %d", *values)

    def reserve(self, prefetch_count: int) -> None:
        """Takes and frees the memory of the buckets that are in flight together, of each grid."""
        for flight in self.buckets:
            in_flight = buckets_in_flight(flight.bucket.grid, prefetch_count)
            if flight.bucket.number < in_flight:
                flight.take_memory()
        for flight in self.buckets:
            flight.free_memory()

    def connect(self) -> None:
        """Uses every communicator once while no other one is in use. Accelerator backends connect two ranks when
        they first exchange something. With other collectives in flight, ranks may wait for each other.
        """
        try:
            for statuses in self.statuses:
                statuses.reduce()
                self._finish(statuses)
            for flight in self.buckets:
                flight.take_memory()
                # A debugging backend looks for NaN in what is sent.
                for memory in flight.held, flight.owned:
                    memory.zero_()
                flight.start_gather()
                self._finish(flight)
                flight.start_scatter()
                self._finish(flight)
                for number, of_round in enumerate(flight.rounds):
                    flight.start_rounds(number, 1)
                    self._finish(of_round)
                    of_round.free_memory()
                flight.free_memory()
        except BaseException:
            self.drain()
            raise

    def _finish(self, flight: InFlight) -> None:
        flight.wait()
        if not self._is_cpu and torch.accelerator.is_available():
            torch.accelerator.synchronize(self.device)


# Matrix -> its regions, each with a view of packed memory, or None.
ByMatrix = Mapping[Matrix, Sequence[tuple[Region, Any]]]


def _by_matrix(moves: Sequence[Move], views: Sequence[Any]) -> ByMatrix:
    found: dict[Matrix, list[tuple[Region, Any]]] = {}
    for (matrix, region), view in zip(moves, views):
        found.setdefault(matrix, []).append((region, view))
    return found


def _views(flat: Tensor, moves: Sequence[Move]) -> list[Tensor]:
    """The views of packed memory, one for each region."""
    parts = flat.split([region.numel for _, region in moves])
    return [
        part.view(region.height, region.width)
        for part, (_, region) in zip(parts, moves)
    ]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # Foreach functions refuse empty lists.
        torch._foreach_copy_(targets, sources)
