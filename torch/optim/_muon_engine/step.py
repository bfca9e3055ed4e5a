"""A step of the engine on one rank: the operations of its plan, in their order.

The memory of a bucket belongs to the step: its gather takes it, and it is free when its updates are applied.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The public profiler range costs tens of microseconds even when no profiler runs.
from torch._C._profiler import _RecordFunctionFast

from .._muon_formulas import CACHE_BYTES
from .._newton_schulz import NS_DTYPE
from .inputs import StepInputs
from .params import Matrix
from .plan import (
    Bucket,
    Move,
    numel_of,
    Phase,
    Plan,
    Round,
    ROUNDS_IN_FLIGHT,
)
from .process_groups import GridGroups, InFlight, listed
from .regions import Grid, Region


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


# Memory, and how many elements of it each rank of a row sends or receives.
Side = tuple[Tensor, list[int]]


class BucketFlight(InFlight):
    """A bucket on its way through a step: the memory that its shards and updates take, and its collectives."""

    def __init__(
        self, bucket: Bucket, groups: GridGroups, device: torch.device
    ) -> None:
        super().__init__(bucket.matrices)
        self.bucket, self.groups = bucket, groups
        numels = numel_of(bucket.held), sum(bucket.receive_sizes)
        memory = torch.empty(sum(numels), dtype=NS_DTYPE, device=device)
        # This rank's shards, the peers' shards of its matrices, and later the updates of both.
        self.held, received = memory.split(numels)
        # This rank's shards of its own matrices do not travel in the row.
        sent, self.gathered = memory.tensor_split([sum(bucket.send_sizes)])
        self._outward = sent, bucket.send_sizes
        self._inward = received, bucket.receive_sizes
        # The rounds along the column that have not begun, and those that have.
        self._planned = iter(bucket.rounds)
        self.rounds: list[RoundFlight] = []

    def start_gather(self) -> None:
        """Starts to send this rank's shards to the owners, and to receive those of its matrices."""
        self._start("gather", self._inward, self._outward)

    def start_scatter(self) -> None:
        """Starts to send the updates to the row, and to receive those of this rank's shards."""
        self._start("scatter", self._outward, self._inward)

    def _start(self, name: str, receives: Side, sends: Side) -> None:
        (target, target_sizes), (source, source_sizes) = receives, sends
        group = self.groups.row
        if group is None:
            return
        # The fake backend refuses to send nothing. With it, one process tells what a rank of a large job needs.
        if not source.numel() and dist.get_backend(group) == "fake":
            return
        start = partial(
            dist.all_to_all_single,
            output_split_sizes=target_sizes,
            input_split_sizes=source_sizes,
        )
        name = f"{name} of {self.bucket.name}"
        self.launch(name, group, start, target, source)

    def start_rounds(self, count: int) -> None:
        """Starts the next rounds along the column, which exchange the updates of all rows."""
        for planned in islice(self._planned, count):
            of_round = RoundFlight(self.matrices)
            self.rounds.append(of_round)
            of_round.start(planned, self)


class RoundFlight(InFlight):
    """A round along the column of a bucket."""

    def start(self, planned: Round, flight: BucketFlight) -> None:
        """Starts to send a piece of the updates that this rank has, and to receive those of the other rows."""
        start, sizes, moves = planned
        self.moves = moves
        group: Any = flight.groups.column
        name = f"forwarding of {flight.bucket.name}"
        own = flight.held.narrow(0, start, sizes[group.rank()])
        # A piece of the updates of each row.
        self.received = own.new_empty(sum(sizes))
        pieces = self.received.split(sizes)
        if not own.is_cpu and group._get_backend(own.device).name() != "gloo":
            # One call, which NCCL makes as a group of broadcasts.
            def gather(sent: Tensor, *parts: Tensor, **options: Any) -> Any:
                return dist.all_gather([*parts], sent, **options)

            self.launch(name, group, gather, own, *pieces)
            return
        # Gloo has no all-gather of different sizes.
        pieces[group.rank()].copy_(own)
        for peer, piece in zip(flight.bucket.column, pieces):
            if piece.numel():
                self.launch(name, group, partial(dist.broadcast, src=peer), piece)


# The parameter group of some tensors, and the other properties that tensors of one call share.
Kind = tuple[int, tuple]


class PackedStep:
    """Runs the ``plan`` of one rank, step after step. ``groups`` has the groups of each grid."""

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[Grid, GridGroups],
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.device, self.is_cpu = device, device.type == "cpu"
        self._plan, self._groups, self._progress = plan, groups, progress
        # The index of a bucket in the plan -> its memory and its collectives, from its gather until its updates are applied.
        self._flights: dict[int, BucketFlight] = {}

    def drain(self) -> None:
        """After an error, waits for the collectives of its buckets."""
        # The memory stays, because a failed collective may write to it.
        for flight in self._flights.values():
            for each in (flight, *flight.rounds):
                each.drain()

    def run(self, inputs: StepInputs) -> None:
        """Makes a step."""
        for phase, index in self._plan.operations:
            bucket = self._plan.buckets[index]
            self._progress.now = phase.value, bucket.matrices
            with _RecordFunctionFast(f"Muon {phase.value}, {bucket.name}"):
                if phase is Phase.GATHER:
                    self._gather(self._begin(index), inputs)
                elif phase is Phase.COMPUTE:
                    self._compute(self._flights[index], inputs)
                elif phase is Phase.FORWARD:
                    self._flights[index].wait()
                    self._flights[index].start_rounds(ROUNDS_IN_FLIGHT)
                else:
                    self._apply_updates(self._flights[index], inputs)
                    # No name refers to it, so its memory is free.
                    del self._flights[index]

    def _begin(self, index: int) -> BucketFlight:
        """Makes the flight of a bucket, which takes its memory."""
        bucket = self._plan.buckets[index]
        flight = BucketFlight(bucket, self._groups[bucket.grid], self.device)
        self._flights[index] = flight
        return flight

    def _gather(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Packs this rank's shards, and starts to send them to their owners."""
        bucket = flight.bucket
        self._blend(bucket.held, inputs, _views(flight.held, bucket.held))
        flight.start_gather()
        self._blend(bucket.elsewhere, inputs)
        self._log("gather", flight.matrices, inputs)

    def _compute(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Orthogonalizes this rank's matrices, and starts to send the updates."""
        flight.wait()
        bucket = flight.bucket
        # Each matrix's regions and where they are packed.
        parts: dict[Matrix, list[tuple[Region, Tensor]]] = {}
        views = _views(flight.gathered, bucket.gathered)
        for (matrix, region), view in zip(bucket.gathered, views):
            parts.setdefault(matrix, []).append((region, view))
        # Momentum without a gradient returns as it came.
        present = [matrix for matrix in bucket.owned if inputs.applies(matrix)]
        for batch in self._batches(present, inputs):
            self._progress.now = Phase.COMPUTE.value, batch
            self._log("orthogonalize", batch, inputs)
            wholes = flight.held.new_empty(len(batch), *batch[0].shape)
            packed: list[Tensor] = []
            regions: list[Tensor] = []
            for matrix, whole in zip(batch, wholes.unbind()):
                for region, view in parts.get(matrix, ()):
                    packed.append(view)
                    regions.append(region.of_matrix(whole))
            _copy(regions, packed)
            inputs.formulas_of(batch[0]).orthogonalize_all(wholes)
            _copy(packed, regions)
        flight.start_scatter()
        if len(bucket.row) == 1:
            flight.start_rounds(ROUNDS_IN_FLIGHT)

    def _batches(
        self, matrices: Sequence[Matrix], inputs: StepInputs
    ) -> Iterator[list[Matrix]]:
        """Matrices of one shape and equal options, as many as their formulas allow in a batch."""
        alike: dict[tuple, list[Matrix]] = {}
        for matrix in matrices:
            formulas = inputs.formulas_of(matrix)
            key = formulas.compute_key, matrix.shape, matrix.split
            alike.setdefault(key, []).append(matrix)
        for (_, shape, _), members in alike.items():
            size = inputs.formulas_of(members[0]).batch_size(shape, self.device)
            for start in range(0, len(members), size):
                yield members[start : start + size]

    def _apply_updates(self, flight: BucketFlight, inputs: StepInputs) -> None:
        """Applies the updates of this rank's shards."""
        flight.wait()
        held = flight.bucket.held
        if not flight.bucket.rounds:
            self._apply(held, _views(flight.held, held), inputs)
        # Ranks with the same shard apply its updates in the same pieces, because a CPU may round the last elements of a
        # bfloat16 tensor otherwise.
        while flight.rounds:
            of_round = flight.rounds[0]
            of_round.wait()
            views = _views(of_round.received, of_round.moves)
            self._apply(of_round.moves, views, inputs)
            # The next round takes memory, too.
            del flight.rounds[0], of_round, views
            flight.start_rounds(1)

    def _blend(
        self, moves: Sequence[Move], inputs: StepInputs, *targets: Sequence[Tensor]
    ) -> None:
        """Takes gradients into momentum, and writes regions of the tensors to orthogonalize to ``targets``, if they are given:
        momentum, blended with the gradient if nesterov; without a gradient momentum, so that the owner receives defined values.
        """
        entries: list[tuple[Kind, Sequence[Any]]] = []
        for (matrix, region), *target in zip(moves, *targets):
            of_param = inputs.params[matrix.index]
            momentum, gradient = region.of_local(of_param.momentum), of_param.gradient
            if gradient is not None:
                gradient = region.of_local(gradient)
            # The kernels take contiguous tensors only.
            properties = momentum.dtype, momentum.is_contiguous()
            kind = matrix.param.param_group, properties
            entries.append((kind, (momentum, gradient, *target)))
        for (param_group, _), together in self._together(entries, inputs):
            momenta, gradients, *of_targets = map(list, zip(*together))
            inputs.formulas[param_group].accumulate_and_blend(
                momenta, gradients, *of_targets
            )

    def _apply(
        self, moves: Sequence[Move], updates: Sequence[Tensor], inputs: StepInputs
    ) -> None:
        """Decays and updates regions of parameters."""
        entries: list[tuple[Kind, Sequence[Any]]] = []
        for (matrix, region), update in zip(moves, updates):
            if not inputs.applies(matrix):
                continue
            param = region.of_local(inputs.params[matrix.index].local)
            if param.device != update.device:
                # An offloaded parameter.
                update = update.to(param.device)
            pieces = [(matrix.shape, param, update)]
            if matrix.split.sizes:
                pieces = inputs.pieces(matrix, region[:2], param, update)
            for shape, *tensors in pieces:
                # One launch rounds to one dtype.
                properties = shape, param.device, param.dtype
                entries.append(((matrix.param.param_group, properties), tensors))
        for (param_group, properties), together in self._together(entries, inputs):
            shape, device, _ = properties
            formulas = inputs.formulas[param_group]
            params, of_params = map(list, zip(*together))
            formulas.apply(params, of_params, formulas.step_size(shape, device))
        applied = (matrix for matrix, _ in moves if inputs.applies(matrix))
        self._log("apply", applied, inputs)

    def _together(
        self, entries: Iterable[tuple[Kind, Sequence[Any]]], inputs: StepInputs
    ) -> Iterator[tuple[Kind, list[Sequence[Any]]]]:
        """The tensors that one foreach call takes: those of one kind, and few enough bytes. The first tensors count."""
        alike: dict[Kind, list[Sequence[Any]]] = {}
        for kind, tensors in entries:
            alike.setdefault(kind, []).append(tensors)
        most = CACHE_BYTES if self.is_cpu else TOGETHER_BYTES
        for kind, of_kind in alike.items():
            if inputs.formulas[kind[0]].has_kernels(self.device):
                # All of them in one launch, which needs no memory of its own.
                yield kind, of_kind
                continue
            room, chunk = most, []
            for tensors in of_kind:
                nbytes = tensors[0].nbytes
                if chunk and nbytes > room:
                    yield kind, chunk
                    room, chunk = most, []
                chunk.append(tensors)
                room -= nbytes
            yield kind, chunk

    def _log(self, phase: str, matrices: Iterable[Matrix], inputs: StepInputs) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for matrix in matrices:
                values = inputs.rank, phase, matrix.described, self._plan.owners[matrix]
                log.debug("rank %d: %s %s, owner %d", *values)

    def reserve(self) -> None:
        """Takes and frees the memory of all buckets, as a step does."""
        for phase, index in self._plan.operations:
            if phase is Phase.GATHER:
                self._begin(index)
            elif phase is Phase.APPLY:
                del self._flights[index]

    def connect(self) -> None:
        """Makes the collectives of a step, each while no other one is in flight."""
        for index, bucket in enumerate(self._plan.buckets):
            flight = self._begin(index)
            # A debugging backend looks for NaN in what is sent.
            flight.held.zero_()
            flight.gathered.zero_()
            flight.start_gather()
            self.wait_for(flight)
            flight.start_scatter()
            self.wait_for(flight)
            for _ in bucket.rounds:
                flight.start_rounds(1)
                self.wait_for(flight.rounds[0])
                flight.rounds.clear()
            del self._flights[index], flight

    def wait_for(self, flight: InFlight) -> None:
        """Waits for a collective, and on accelerators for its end."""
        flight.wait()
        if not self.is_cpu and torch.accelerator.is_available():
            torch.accelerator.synchronize(self.device)


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
