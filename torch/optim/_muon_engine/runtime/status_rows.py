"""What this rank says in the side channel of a group: a header, and a row for each gradient."""

import zlib
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .matrices import LocalMatrix, Status
from .params import StepInputs


# Rows of the first all-reduce: equal for optimizers of all sizes, so that ranks which confuse them get an
# error instead of another size. Few optimizers need a second one.
FIRST_ROWS = 256
# Statuses that have a column.
_TOLD = (Status.PRESENT, Status.ABSENT, Status.UNUSABLE)


class Header(IntEnum):
    """The columns of the first row. Two that are negatives of each other add up to zero if all ranks agree."""

    STEP = 0
    MINUS_STEP = 1
    OPTIMIZER = 2
    MINUS_OPTIMIZER = 3
    # A rank knows of a problem, of its own or of another group.
    ELSEWHERE = 4


class Column(IntEnum):
    """The columns of a gradient's row. The first ones are those of Status, but for EMPTY, which says nothing."""

    PRESENT = 0
    ABSENT = 1
    UNUSABLE = 2
    OPTIONS = 3
    MINUS_OPTIONS = 4
    # The digest of placements that a collective of DTensor's must change; 0 for none.
    MOVES = 5
    MINUS_MOVES = 6
    VALUES = 7
    MINUS_VALUES = 8


class StatusRows:
    """This rank's rows, of which a step writes what is different now. Matrices that have one gradient have one row.
    ``serial`` is the number of this optimizer among those over the same ranks.
    """

    def __init__(self, matrices: Sequence[LocalMatrix], serial: int) -> None:
        by_gradient: dict[tuple[int, int], list[LocalMatrix]] = {}
        for matrix in matrices:
            by_gradient.setdefault(matrix.gradient_key, []).append(matrix)
        # The matrices of each gradient, whose rows come after the header.
        self.gradients = list(by_gradient.values())
        # The header and the rows of gradients; what follows is not used.
        self.count = 1 + len(self.gradients)
        shape = max(FIRST_ROWS, self.count), len(Column)
        self.rows = torch.zeros(shape, dtype=torch.int64, device="cpu")
        identity = _identity(serial, matrices)
        self.rows[0, Header.OPTIMIZER] = identity
        self.rows[0, Header.MINUS_OPTIMIZER] = -identity
        self.rows[1 : self.count, Column.PRESENT] = 1
        self._written = [Status.PRESENT] * len(self.gradients)
        self._places_of_param_group = _places_of_param_groups(self.gradients)
        # Parameter group -> the digest of its options in its rows.
        self._written_digests: dict[int, int] = {}
        # Whether the last step had all gradients. The first one may be of a rank that stores no element of some.
        self._is_complete = False
        # Whether a gradient or momentum of the last step had another placement than its parameter.
        self._has_moves = False

    def write(self, step: int, inputs: StepInputs, knows_of_problem: bool) -> None:
        """Writes what this rank knows at the start of a step."""
        self.rows[0, Header.STEP] = step
        self.rows[0, Header.MINUS_STEP] = -step
        self.rows[0, Header.ELSEWHERE] = knows_of_problem
        for param_group, places in self._places_of_param_group.items():
            digest = inputs.formulas[param_group].options_digest
            # Without a schedule of the learning rate, it stays the same.
            if digest != self._written_digests.get(param_group):
                self._written_digests[param_group] = digest
                self.rows[places, Column.OPTIONS] = digest
                self.rows[places, Column.MINUS_OPTIONS] = -digest
        # The usual step has all gradients, and so has the same statuses as the last one.
        if not (inputs.is_complete and self._is_complete):
            self._write_statuses(inputs)
        if inputs.move_digests or self._has_moves:
            self._write_moves(inputs)

    def _write_statuses(self, inputs: StepInputs) -> None:
        """Writes the statuses that differ from those of the last step."""
        self._is_complete = inputs.is_complete
        places: list[int] = []
        one_hots: list[list[int]] = []
        for place, of_gradient in enumerate(self.gradients):
            status = of_gradient[0].status(inputs)
            if status != self._written[place]:
                self._written[place] = status
                places.append(1 + place)
                one_hots.append([int(status == told) for told in _TOLD])
        if places:
            one_hot_rows = torch.tensor(one_hots, device="cpu")
            self.rows[places, : len(_TOLD)] = one_hot_rows

    def _write_moves(self, inputs: StepInputs) -> None:
        """Writes which tensors must be brought to other placements."""
        self._has_moves = bool(inputs.move_digests)
        digests = [
            inputs.move_digests.get(of_gradient[0].param_index, 0)
            for of_gradient in self.gradients
        ]
        moves = torch.tensor(digests, dtype=torch.int64, device="cpu")
        self.rows[1 : self.count, Column.MOVES] = moves
        self.rows[1 : self.count, Column.MINUS_MOVES] = -moves


def _identity(serial: int, matrices: Sequence[LocalMatrix]) -> int:
    """32 bits of an optimizer's number over these ranks, and of its names and shapes."""
    keys = [(matrix.layout.key, matrix.layout.shape) for matrix in matrices]
    # Ranks may name the modules of an expert differently.
    names = [(k.name if k.expert is None else k.expert, shape) for k, shape in keys]
    return zlib.crc32(repr((serial, names)).encode())


def _places_of_param_groups(
    gradients: Sequence[Sequence[LocalMatrix]],
) -> dict[int, Tensor]:
    """Parameter group -> the places of its rows in the table."""
    places: dict[int, list[int]] = {}
    for place, of_gradient in enumerate(gradients, 1):
        places.setdefault(of_gradient[0].param_group, []).append(place)
    return {group: torch.tensor(of, device="cpu") for group, of in places.items()}
