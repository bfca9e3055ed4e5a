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

from ..agreement import Agreement, all_gather_object, differences
from ..process_groups import group_ranks, is_dry_run, larger_first, listed, Ranks
from .matrices import LocalMatrix, Status
from .params import StepInputs
from .transport import InFlight


# All optimizers send as many bytes, so that ranks which confuse them get an error instead of another size.
BYTES = 2048
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
_PLACES = BYTES - _FIRST_GRADIENT
# Bytes of the head that say no and yes. Zero is no opinion.
_NO, _YES = 1, 2

_OTHER_STEP = "the ranks are not in the same step(): a closure or a check raised on some of them, and the caller went on"
_OTHER_OPTIMIZER = "the ranks step different optimizers. Build and step them in the same order; a set has its own on each rank"
_CHANGED_ALONE = (
    "parameters changed on some of the ranks that share these, and not on others. All of them must make the change "
    "before the same step()"
)
_ELSEWHERE = "ranks that share matrices with this one have a problem with others that this rank does not hold. Their error says how"
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
        self._param_groups = _runs_of_param_groups(self.gradients)
        # Those that are whole on every rank and whose values were not compared yet.
        self._replicated = [
            of_gradient
            for of_gradient in self.gradients
            if all(_is_replicated(matrix) for matrix in of_gradient)
        ]
        # Whether the last step had all gradients, so that the bytes of gradients stay the same if the next one has, too.
        self._was_complete = False
        # What this rank says, with its complement; what the group reduces; and the result on the host. Only copies
        # between a device and pinned memory do not wait.
        self._own = torch.zeros(2, BYTES, dtype=torch.uint8, device="cpu")
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

    def _write(self, start: int, values: Sequence[int], unknown: int = -1) -> None:
        """Writes bytes and their complements from place ``start``. The value ``unknown`` is no opinion."""
        complements = [0 if value == unknown else 255 - value for value in values]
        both = torch.tensor([values, complements], dtype=torch.uint8, device="cpu")
        self._own[:, start : start + len(values)] = both

    def start(
        self, step: int, inputs: StepInputs | None, knows_of_problem: bool
    ) -> None:
        """Starts the ``step``-th step's all-reduce. This rank may know of a problem: its own, or that of a smaller group.
        Without ``inputs``, its parameters have changed since the engine was built.
        """
        head = [_YES if inputs is None else _NO, _YES if knows_of_problem else _NO]
        numbers = [step, self._identity]
        if inputs is None:
            self._own.zero_()
        else:
            numbers += [self._options_digest(inputs), self._moves_digest(inputs)]
            if not (inputs.is_complete and self._was_complete):
                opinions = self._opinions(inputs)
                self._write(_FIRST_GRADIENT, opinions, unknown=Status.EMPTY)
            self._was_complete = inputs.is_complete
        for number in numbers:
            head += number.to_bytes(4, "little")
        self._write(_CHANGED, head)
        if self._has_host_copy:
            # The last result was read, so this memory is free. A copy from it does not wait.
            self._host.copy_(self._own)
            self._table.copy_(self._host, non_blocking=True)
        else:
            self._table.copy_(self._own)
        self._is_unread = True
        self.reduce()

    def reduce(self) -> None:
        """Starts the all-reduce."""
        self._reduce(self._table)

    def _reduce(self, table: Tensor) -> None:
        largest, group = dist.ReduceOp.MAX, self._group
        start = partial(dist.all_reduce, op=largest, group=group, async_op=True)
        self.launch("all-reduce of statuses", start, table)

    def _options_digest(self, inputs: StepInputs) -> int:
        digests = []
        for param_group, count in self._param_groups:
            digests.append((inputs.formulas[param_group].options_digest, count))
        return zlib.crc32(repr(digests).encode())

    def _moves_digest(self, inputs: StepInputs) -> int:
        """Of the gradients and momenta that collectives of DTensor's must bring to other placements."""
        if not inputs.moves:
            return 0
        # Moves of other groups do not count.
        moves = [inputs.moves.get(g[0].param_index, "") for g in self.gradients]
        return zlib.crc32(repr(moves).encode()) if any(moves) else 0

    def _opinions(self, inputs: StepInputs) -> list[int]:
        """A byte for each gradient; for several, if there are more of them than places."""
        opinions = [int(g[0].status(inputs)) for g in self.gradients]
        shared = opinions[_PLACES:]
        if not shared:
            return opinions
        places = opinions[:_PLACES]
        for number, opinion in enumerate(shared):
            place = number % _PLACES
            is_known = places[place] and opinion
            # Ranks with the same opinions have the same byte, which is not zero.
            places[place] = 1 + (3 * places[place] + opinion) % 251 if is_known else 0
        return places

    def difference(self, inputs: StepInputs | None, awaits: bool) -> str:
        """How the ranks differ in the last step; "" if they do not, or if the answer was given before. Waits. Ranks that
        all wait at the start of a step tell each other more if they differ.
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
            text = self._difference(inputs if awaits else None)
        if not text and awaits and inputs is not None:
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
        for places, text in (_OPTIONS, _OTHER_OPTIONS), (_MOVES, _OTHER_PLACEMENTS):
            # A rank without a gradient has none to move.
            if differs[places].any() and not (gradients and places is _MOVES):
                if inputs is not None:
                    text += self._first_difference(inputs)
                return text
        return gradients or (_ELSEWHERE if self._host[0, _PROBLEM] == _YES else "")

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
        largest = self._host[0]
        for number, of_gradient in enumerate(self.gradients):
            place = _FIRST_GRADIENT + number % _PLACES
            is_alone = len(self.gradients) <= _PLACES
            if is_alone and largest[place] == Status.UNUSABLE:
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
        moved = []
        remaining = []
        for of_gradient in self._replicated:
            formulas = inputs.formulas[of_gradient[0].param_group]
            (moved if formulas.moves_parameters else remaining).append(of_gradient)
        if not moved:
            return ""
        digests = [
            _digest_of(of_gradient, inputs).to(self.device) for of_gradient in moved
        ]
        values = torch.stack(digests).view(torch.uint8)
        own = torch.stack([values, 255 - values])
        table = own.clone()
        self._reduce(table)
        self.wait()
        if torch.equal(table, own):
            self._replicated = remaining
            return ""
        differs = differences(table.cpu()).view(len(moved), -1).any(dim=1)
        others = [_described(moved[number]) for number in differs.nonzero().flatten()]
        return f"{_OTHER_VALUES}: {listed(others, 4)}"

    @property
    def has_uncompared_values(self) -> bool:
        """Whether a later step compares values, for which all ranks must wait at its start."""
        return bool(self._replicated)

    def finish(self) -> None:
        """Ends a step that has moved its matrices."""
        if self.works:
            self._fetch()

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


def _runs_of_param_groups(
    gradients: Sequence[Sequence[LocalMatrix]],
) -> list[tuple[int, int]]:
    """The parameter group of each gradient, as (parameter group, number of gradients that follow each other)."""
    param_groups = [of_gradient[0].param_group for of_gradient in gradients]
    return [(group, len([*run])) for group, run in itertools.groupby(param_groups)]


def _is_replicated(matrix: LocalMatrix) -> bool:
    """Whether all ranks of the group hold the whole matrix."""
    return len(matrix.layout.shards.replica_sets) == 1 and not matrix.is_sum


def _described(matrices: Sequence[LocalMatrix]) -> str:
    """The matrices of one gradient, in words."""
    text = matrices[0].layout.describe()
    if len(matrices) == 1:
        return text
    return f"{text} and {len(matrices) - 1} more of its parts"


def _digest_of(of_gradient: Sequence[LocalMatrix], inputs: StepInputs) -> Tensor:
    """A digest of the bits of the matrices' values: an integer on their device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = inputs.params[of_gradient[0].param_index].local
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for matrix in of_gradient:
        for region in matrix.shard:
            values = region.of_local(local)
            total += values.view(ints[values.itemsize]).sum(dtype=torch.int64)
    return total


class SideChannel:
    """All side channels of this rank, smaller groups first, so that a difference reaches the larger ones that contain
    them.
    """

    def __init__(self, statuses: Sequence[Statuses], device: torch.device) -> None:
        self.statuses = statuses
        self.device = device
        # All matrices that this rank shares.
        self.matrices: list[LocalMatrix] = []
        for each in statuses:
            self.matrices += each.matrices
        # Whether ranks know how they differ before anything moves: on a CPU, and elsewhere in the first steps.
        self.awaits = True

    def share(self, step: int, inputs: StepInputs | None) -> str:
        """Starts the exchange of this rank's ``step``-th step, before anything moves. A group passes a difference on to
        larger groups. A rank that cannot use a gradient tells all of its groups, because each of them must end the
        step here. Returns how ranks differ; "" if they do not, or if it does not wait. Without ``inputs``, this rank's
        parameters have changed, and it waits.
        """
        text = ""
        # The unusable gradient may be of a matrix that no other rank has.
        has_problem = inputs is not None and bool(inputs.problems)
        awaits = self.awaits or inputs is None
        for statuses in self.statuses:
            statuses.start(step, inputs, has_problem or bool(text))
            if awaits:
                reason = statuses.difference(inputs, awaits)
                # A larger group's own reason says more.
                if reason and text in ("", _ELSEWHERE):
                    text = reason
        return text

    def finish(self) -> None:
        """Ends a step that has moved its matrices."""
        for statuses in self.statuses:
            statuses.finish()
        has_uncompared = any(each.has_uncompared_values for each in self.statuses)
        self.awaits = has_uncompared or self.device.type == "cpu"

    def difference(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""
        texts = [each.difference(None, awaits=False) for each in self.statuses]
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
    return SideChannel(statuses, device)
