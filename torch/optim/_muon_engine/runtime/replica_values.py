"""Whether replicas have the same values: ranks compare them in the first step that moves them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .matrices import LocalMatrix
from .params import StepInputs
from .status_rows import Column


class ReplicaValues:
    """Compares the values of matrices that are whole on every rank. ``gradients`` has the matrices of each gradient, whose
    rows of statuses follow the header. ``places`` are the rows of these matrices.
    """

    def __init__(
        self, gradients: Sequence[Sequence[LocalMatrix]], places: Sequence[int]
    ) -> None:
        self._gradients = gradients
        # Those whose values were not compared yet.
        self._places = places

    def write(self, table: Tensor, inputs: StepInputs) -> None:
        """Writes digests of the values that this step moves for the first time."""
        # A checkpoint makes a step that moves nothing before it loads the values.
        places = [place for place in self._places if self._moves(place, inputs)]
        if not places:
            return
        digests: list[Tensor] = []
        for place in places:
            digest = _digest_of(self._gradients[place - 1], inputs)
            digests.append(digest.to(table.device))
        values = torch.stack(digests)
        table[places, Column.VALUES] = values
        table[places, Column.MINUS_VALUES] = -values

    def finish(self, inputs: StepInputs) -> None:
        """Ends a step that has moved its matrices. After one that raised, the next one compares the values again."""
        remaining = []
        for place in self._places:
            if not self._moves(place, inputs):
                remaining.append(place)
        self._places = remaining

    def _moves(self, place: int, inputs: StepInputs) -> bool:
        """Whether this step moves the matrices of a row."""
        param_group = self._gradients[place - 1][0].param_group
        return inputs.formulas[param_group].moves_parameters


def _digest_of(of_gradient: Sequence[LocalMatrix], inputs: StepInputs) -> Tensor:
    """32 bits of a sum over the bits of the matrices' values: a scalar integer on their device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = inputs.params[of_gradient[0].param_index].local
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for matrix in of_gradient:
        for region in matrix.shard:
            values = region.of_local(local)
            total += values.view(ints[values.itemsize]).sum(dtype=torch.int64)
    # The golden ratio's bits carry a difference in any bit into the highest ones.
    return ((total * -7046029254386353131) >> 32) & 0xFFFFFFFF
