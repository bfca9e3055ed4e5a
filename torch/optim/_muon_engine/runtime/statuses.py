"""The side channel: how the ranks of a group learn at the start of a step that they differ.

Gradients never decide which of the engine's collectives run. At the start of a step, each rank of a group puts what it
knows into one all-reduce of bytes (see ``agreement``): a head, and a byte for each gradient. The first steps, and each one on a
CPU, wait for the result, and raise before anything moves if the ranks differ. On accelerators, a later step acts on what
this rank knows, and the step after it reads the result.
"""

import itertools
import zlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..agreement import Agreement, all_gather_object, BYTES, differences
from ..process_groups import group_ranks, is_dry_run, larger_first, listed, Ranks
from .matrices import LocalMatrix, Status
from .params import StepInputs
from .transport import InFlight


# The head: whether parameters have changed since the engine was built, and whether this rank knows of a problem; and
# four bytes each of the step, of the optimizer, of the options and of the placements that gradients must change.
_CHANGED, _PROBLEM = 0, 1
_STEP, _OPTIMIZER, _OPTIONS, _MOVES = (
    slice(2, 6),
    slice(6, 10),
    slice(10, 14),
    slice(14, 18),
)
_FIRST_GRADIENT = 18
# Bytes of the head that say no and yes. Zero is no opinion.
_NO, _YES = 1, 2

_OTHER_STEP = "the ranks are not in the same step(): a closure or a check raised on some of them, and the caller went on"
_OTHER_OPTIMIZER = "the ranks step different optimizers. Build and step them in the same order; a set has its own on each rank"
_CHANGED_ALONE = (
    "parameters changed on some of the ranks that share these, and not on others. All of them must make the change "
    "before the same step()"
)
_ELSEWHERE = (
    "ranks that share matrices with this one have a problem. Their error says how"
)
_OTHER_OPTIONS = "the ranks have different hyperparameters. A scheduler or a checkpoint changed those of some ranks only"
_OTHER_VALUES = (
    "the ranks hold different values of these, so they are not replicas. Broadcast the parameters before the first "
    "step, as DistributedDataParallel does. If each rank has parameters of its own (ZeroRedundancyOptimizer, layers or "
    "experts that are not shared), leave their group out of the config"
)
_UNUSABLE = "a rank has a gradient or momentum for these that it cannot use. The error on that rank says why"
_SOME_ABSENT = (
    "some of the ranks that hold these have a gradient and some have none. All need one, or none of them: zeros for an "
    "unused expert or a branch that one rank skips"
)
_OTHER_PLACEMENTS = (
    "the ranks have gradients or momentum of different placements, or some of them have another one than the "
    "parameter. DTensor's redistribute() needs all of them. Give all ranks the parameter's placement"
)


class Statuses(InFlight):
    """The side channel of a group of ranks, for the ``matrices`` that it shares, in the order of all ranks. ``serial`` is
    the number of this optimizer among those over the same ranks.
    """

    def __init__(
        self,
        matrices: Sequence[LocalMatrix],
        ranks: Ranks,
        group: ProcessGroup,
        serial: int,
        device: torch.device,
    ) -> None:
        super().__init__(matrices, ranks)
        self._group, self.device = group, device
        # The matrices of each gradient: the parts of a fused weight have one.
        by_gradient: dict[tuple[int, int], list[LocalMatrix]] = {}
        for matrix in matrices:
            by_gradient.setdefault(matrix.gradient_key, []).append(matrix)
        self.gradients = list(by_gradient.values())
        # The matrices with replicas, whose values were not compared yet.
        self._replicated = [
            matrix
            for matrix in matrices
            if matrix.layout.shards.most_replicas > 1 and not matrix.is_sum
        ]
        # Whether the ranks know how they differ before anything moves: on a CPU, and elsewhere in the first steps.
        self.awaits = True
        # Whether the last step had all gradients, so that the bytes of gradients stay the same if the next one has, too.
        self._was_complete = False
        # What this rank says, with its complement; what the group reduces; and the result on the host. Only copies
        # between a device and pinned memory do not wait.
        tables = -(-(_FIRST_GRADIENT + len(self.gradients)) // BYTES)
        self._own = torch.zeros(tables, 2, BYTES, dtype=torch.uint8, device="cpu")
        self._table = torch.zeros_like(self._own, device=device)
        self._host = self._table
        self._copied: torch.Event | None = None
        self._has_host_copy = device.type != "cpu"
        if self._has_host_copy:
            pins = torch.accelerator.is_available()
            self._host = torch.zeros_like(self._own, pin_memory=pins)
        self._identity = _identity(serial, matrices)
        # Fake tensors have no values.
        self._is_dry_run = is_dry_run()
        # Whether the result in ``_host`` is unread.
        self._is_unread = False

    def _write_opinions(self, opinions: Sequence[int]) -> None:
        """Writes a byte for each gradient, and its complement. Status.EMPTY is no opinion."""
        values = torch.zeros(len(self._own) * BYTES, dtype=torch.uint8, device="cpu")
        of_gradients = torch.tensor(opinions, dtype=torch.uint8, device="cpu")
        values[_FIRST_GRADIENT : _FIRST_GRADIENT + len(opinions)] = of_gradients
        tables = values.view(-1, BYTES)
        self._own[:, 0] = tables
        self._own[:, 1] = torch.where(tables == Status.EMPTY, 0, 255 - tables)

    def start(
        self,
        step: int,
        inputs: StepInputs | None,
        knows_of_problem: bool,
        has_changed: bool = False,
    ) -> None:
        """Starts the ``step``-th step's all-reduce. This rank may know of a problem: its own, or that of a smaller group.
        Without ``inputs``, it has no opinion of gradients and options: its parameters have changed since the engine was
        built, or its options are invalid.
        """
        head = [_YES if has_changed else _NO, _YES if knows_of_problem else _NO]
        numbers = [step, self._identity]
        if inputs is None:
            self._own.zero_()
            self._was_complete = False
        else:
            numbers += [self._options_digest(inputs), self._moves_digest(inputs)]
            if not (inputs.is_complete and self._was_complete):
                self._write_opinions([g[0].status(inputs) for g in self.gradients])
            self._was_complete = inputs.is_complete
        for number in numbers:
            head += number.to_bytes(4, "little")
        complements = [255 - value for value in head]
        both = torch.tensor([head, complements], dtype=torch.uint8, device="cpu")
        self._own[0, :, : len(head)] = both
        if self._has_host_copy:
            # The last result was read, so this memory is free. A copy from it does not wait.
            self._host.copy_(self._own)
            self._table.copy_(self._host, non_blocking=True)
        else:
            self._table.copy_(self._own)
        self._is_unread = True
        self.reduce()

    def reduce(self) -> None:
        """Starts the all-reduce, or several if gradients are many."""
        for table in self._table:
            self._reduce(table)

    def _reduce(self, table: Tensor) -> None:
        largest, group = dist.ReduceOp.MAX, self._group
        start = partial(dist.all_reduce, op=largest, group=group, async_op=True)
        self.launch("all-reduce of statuses", start, table)

    def _options_digest(self, inputs: StepInputs) -> int:
        """Of the options of each gradient. Ranks may have equal options in one parameter group or in several."""
        of_groups = [formulas.options_digest for formulas in inputs.formulas]
        digests = [of_groups[g[0].param_group] for g in self.gradients]
        runs = [(digest, len([*run])) for digest, run in itertools.groupby(digests)]
        return zlib.crc32(repr(runs).encode())

    def _moves_digest(self, inputs: StepInputs) -> int:
        """Of the gradients and momenta that collectives of DTensor's must bring to other placements."""
        if not inputs.moves:
            return 0
        # Moves of other groups do not count.
        moves = [inputs.moves.get(g[0].param_index, "") for g in self.gradients]
        return zlib.crc32(repr(moves).encode()) if any(moves) else 0

    def difference(self, inputs: StepInputs | None = None) -> str:
        """How the ranks differ in the last step; "" if they do not, or if the answer was given before. Waits. With the
        ``inputs`` of a step at whose start all ranks of the group wait, they tell each other more if they differ.
        """
        if not self._is_unread or self._is_dry_run:
            return ""
        self._is_unread = False
        self._fetch()
        if self._copied is not None:
            self._copied.synchronize()
        text = ""
        # If the maxima are what this rank said, all ranks said the same.
        if not torch.equal(self._host, self._own):
            text = self._difference(inputs)
        if not text and inputs is not None:
            text = self._other_values(inputs)
        return text

    def _difference(self, inputs: StepInputs | None) -> str:
        """How the ranks differ, in words. With ``inputs``, all ranks of the group make this call."""
        differs = differences(self._host)
        text = self._other_program(differs)
        if text:
            shared = listed([matrix.layout.describe() for matrix in self.matrices], 4)
            return f"{text}. This rank's optimizer has {shared}"
        gradients = self._other_gradients(differs)
        has_problem = self._host[0, 0, _PROBLEM] == _YES
        for places, text in (_OPTIONS, _OTHER_OPTIONS), (_MOVES, _OTHER_PLACEMENTS):
            # A rank without a gradient has none to move.
            if differs[places].any() and not (gradients and places is _MOVES):
                # A rank with a problem may have no inputs.
                if inputs is not None and not has_problem:
                    text += self._first_difference(inputs)
                return text
        return gradients or (_ELSEWHERE if has_problem else "")

    def _other_program(self, differs: Tensor) -> str:
        """Whether the ranks are in different steps or optimizers, or only some of them build theirs again."""
        if differs[_OPTIMIZER].any():
            return _OTHER_OPTIMIZER
        if differs[_STEP].any():
            return _OTHER_STEP
        return _CHANGED_ALONE if differs[_CHANGED] else ""

    def _other_gradients(self, differs: Tensor) -> str:
        """The gradients that some ranks lack or cannot use, in words."""
        found: dict[str, list[str]] = {}
        largest = self._host[:, 0].flatten()
        for place, of_gradient in enumerate(self.gradients, _FIRST_GRADIENT):
            if largest[place] == Status.UNUSABLE:
                found.setdefault(_UNUSABLE, []).append(_described(of_gradient))
            elif differs[place]:
                found.setdefault(_SOME_ABSENT, []).append(_described(of_gradient))
        for reason in (_UNUSABLE, _SOME_ABSENT):
            if reason in found:
                return f"{reason}: {listed(found[reason], 4)}"
        return ""

    def _first_difference(self, inputs: StepInputs) -> str:
        """The first option or placement that differs, and its values. All ranks of the group make this call."""
        own: list[tuple[str, dict[str, str]]] = []
        for of_gradient in self.gradients:
            matrix = of_gradient[0]
            values = inputs.formulas[matrix.param_group].option_texts()
            values["placements"] = inputs.moves.get(matrix.param_index, "usual")
            own.append((_described(of_gradient), values))
        first, *others = all_gather_object(own, self._group)
        first_rank, *ranks = group_ranks(self._group)
        for rank, its_own in zip(ranks, others, strict=True):
            for (described, values), (_, its_values) in zip(first, its_own):
                for name, value in values.items():
                    if its_values[name] != value:
                        return f": {name} of {described} is {value} on rank {first_rank} and {its_values[name]} on rank {rank}"
        return ""

    def _other_values(self, inputs: StepInputs) -> str:
        """The matrices whose replicas have different values, in words. All ranks of the group make this call. The values are
        compared in the first step that moves them: a checkpoint makes one that does not before it loads them.
        """
        moved: list[LocalMatrix] = []
        remaining: list[LocalMatrix] = []
        for matrix in self._replicated:
            moves = inputs.formulas[matrix.param_group].moves_parameters
            (moved if moves else remaining).append(matrix)
        if not moved:
            return ""
        # Eight bytes for each shard of each matrix. A rank has an opinion of its own shards only.
        counts = [len(matrix.layout.shards.replica_sets) for matrix in moved]
        device = self._table.device
        values = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        is_known = torch.zeros_like(values, dtype=torch.bool)
        start = 0
        for matrix, count in zip(moved, counts):
            if matrix.shard:
                place = start + matrix.replica_set
                values[place] = _digest_of(matrix, inputs)
                is_known[place] = True
            start += count
        of_bytes = values.view(torch.uint8).view(-1, 8)
        complements = torch.where(is_known[:, None], 255 - of_bytes, 0)
        table = torch.stack([of_bytes.flatten(), complements.flatten()])[None]
        self._reduce(table)
        self.wait()
        differs = differences(table.cpu()).view(-1, 8).any(dim=1)
        if torch.equal(differs, torch.zeros_like(differs)):
            self._replicated = remaining
            return ""
        others = []
        for matrix, of_matrix in zip(moved, differs.split(counts)):
            if of_matrix.any():
                others.append(matrix.described)
        return f"{_OTHER_VALUES}: {listed(others, 4)}"

    def finish(self) -> None:
        """Ends a step that has moved its matrices."""
        if self.works:
            self._fetch()
        self.awaits = bool(self._replicated) or self.device.type == "cpu"

    def _fetch(self) -> None:
        """Waits for the all-reduce in flight, and brings its result to the host. On accelerators, the device waits and
        not the host: neither for it nor for the copy.
        """
        was_in_flight = bool(self.works)
        self.wait()
        if was_in_flight and self._has_host_copy and not self._is_dry_run:
            self._host.copy_(self._table, non_blocking=True)
            # An event alone would record on the current device, which may be another one.
            stream = torch.accelerator.current_stream(self.device)
            self._copied = stream.record_event(self._copied)


def _identity(serial: int, matrices: Sequence[LocalMatrix]) -> int:
    """32 bits of an optimizer's number over these ranks, and of its names and shapes."""
    keys = [(matrix.layout.key, matrix.layout.shape) for matrix in matrices]
    # Ranks may name the modules of an expert differently.
    names = [(k.name if k.expert is None else k.expert, shape) for k, shape in keys]
    return zlib.crc32(repr((serial, names)).encode())


def _described(matrices: Sequence[LocalMatrix]) -> str:
    """The matrices of one gradient, in words."""
    text = matrices[0].layout.describe()
    if len(matrices) == 1:
        return text
    return f"{text} and {len(matrices) - 1} more of its parts"


def _digest_of(matrix: LocalMatrix, inputs: StepInputs) -> Tensor:
    """A digest of the bits of the values that this rank has of a matrix: an integer on their device. It knows the rows and
    columns of each value, without memory for another matrix.
    """
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = inputs.params[matrix.param_index].local
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for region in matrix.shard:
        values = region.of_local(local)
        values = values.view(ints[values.itemsize])
        for dims in range(values.ndim):
            others = [dim for dim in range(values.ndim) if dim != dims]
            sums = values.sum(others, dtype=torch.int64)
            places = torch.arange(1, 2 * len(sums), 2, device=local.device)
            total = 31 * total + (sums * places).sum()
    return total


class SideChannel:
    """All side channels of this rank, smaller groups first, so that a difference reaches the larger ones that contain
    them.
    """

    def __init__(self, statuses: Sequence[Statuses]) -> None:
        self.statuses = statuses
        # All matrices that this rank shares.
        self.matrices: list[LocalMatrix] = []
        for each in statuses:
            self.matrices += each.matrices

    @property
    def awaits(self) -> bool:
        """Whether all groups know how their ranks differ before anything moves."""
        return all(each.awaits for each in self.statuses)

    def share(
        self, step: int, inputs: StepInputs | None, has_changed: bool = False
    ) -> str:
        """Starts the exchange of this rank's ``step``-th step, before anything moves. A group passes a difference on to
        larger groups. A rank that cannot use a gradient tells all of its groups, because each of them must end the
        step here. Returns how ranks differ; "" if they do not, or if it does not wait. Without ``inputs``, this rank's
        parameters have changed, or its options are invalid.
        """
        text = ""
        # The unusable gradient may be of a matrix that no other rank has.
        has_problem = bool(inputs.problems) if inputs is not None else not has_changed
        for statuses in self.statuses:
            knows_of_problem = has_problem or bool(text)
            statuses.start(step, inputs, knows_of_problem, has_changed)
            if statuses.awaits or has_changed:
                reason = statuses.difference(inputs)
                # A larger group's own reason says more.
                if reason and text in ("", _ELSEWHERE):
                    text = reason
        return text

    def finish(self) -> None:
        """Ends a step that has moved its matrices."""
        for statuses in self.statuses:
            statuses.finish()

    def difference(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""
        texts = [each.difference() for each in self.statuses]
        return "; ".join(filter(None, texts))


def side_channel(
    matrices: Sequence[LocalMatrix], agreement: Agreement, device: torch.device
) -> SideChannel:
    """The side channels of the groups that share ``matrices``."""
    by_ranks: dict[Ranks, list[LocalMatrix]] = {}
    for matrix in matrices:
        by_ranks.setdefault(matrix.layout.holders, []).append(matrix)
    statuses = []
    for ranks in reversed(larger_first(by_ranks)):
        group = agreement.groups[ranks]
        if group is not None:
            serial = agreement.serials[ranks]
            statuses.append(Statuses(by_ranks[ranks], ranks, group, serial, device))
    return SideChannel(statuses)
