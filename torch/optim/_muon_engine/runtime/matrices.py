"""The matrices of an optimizer on this rank."""

from collections.abc import Iterable
from enum import IntEnum

from ..schedule.schedule import Schedule
from .params import Param, StepInputs


class Status(IntEnum):
    """The gradient of a matrix, as one of its holders sees it. The holder of no element of it has no opinion."""

    EMPTY = 0
    ABSENT = 1
    PRESENT = 2
    # There is a gradient that this holder cannot use.
    UNUSABLE = 3


class LocalMatrix:
    """A matrix on this rank: its layout, its owner, its parameter, and the regions that this rank holds."""

    def __init__(
        self, schedule: Schedule, matrix_index: int, param: Param, rank: int
    ) -> None:
        self.index = matrix_index
        self.layout = schedule.layouts[matrix_index]
        self.owner = schedule.owners[matrix_index]
        self.param_index = param.key.index
        # The parameter group, whose hyperparameters the matrix has.
        self.param_group = param.param_group
        # The parameter and the matrix in it as it was before it was split: this one has one gradient.
        sub = self.layout.key.sub
        split, _ = param.form
        if split.sizes:
            sub //= len(split.sizes)
        self.gradient_key = param.key.index, sub
        self.shard = self.layout.shards.of(rank)
        # Whether this rank stores an element of the matrix, and so knows whether there is a gradient. With
        # ``matrices_of``, an element of any matrix that has the same gradient.
        self.knows_gradient = not self.layout.shards.is_empty(rank)
        # One replica of each shard sends it.
        self.sent = self.shard if schedule.is_source(matrix_index, rank) else ()
        # Which of the shards it is; replicas have the same number.
        self.replica_set = self.layout.shards.replica_set_of(rank)
        # Whether ranks hold contributions to a sum, and not replicas.
        self.is_sum = param.is_sum

    @property
    def described(self) -> str:
        return self.layout.describe()

    def status(self, inputs: StepInputs) -> Status:
        """The status of the gradient in this step, as this rank sees it."""
        of_param = inputs.params[self.param_index]
        if of_param.problem:
            return Status.UNUSABLE
        if not self.knows_gradient:
            return Status.EMPTY
        if of_param.user_gradient is None:
            return Status.ABSENT
        return Status.PRESENT

    def applies(self, inputs: StepInputs) -> bool:
        """Whether this rank applies the update. A rank with an empty shard does what the others do."""
        return self.status(inputs) in (Status.PRESENT, Status.EMPTY)


def matrices_of(
    schedule: Schedule, params: Iterable[Param], rank: int
) -> dict[int, LocalMatrix]:
    """This rank's matrices in the buckets of ``schedule``, by their index there."""
    by_index = {param.key.index: param for param in params}
    matrices: dict[int, LocalMatrix] = {}
    for bucket in schedule.buckets:
        for index in bucket.matrices if rank in bucket.ranks else ():
            param = by_index[schedule.layouts[index].key.index]
            matrices[index] = LocalMatrix(schedule, index, param, rank)
    known = {m.gradient_key for m in matrices.values() if m.knows_gradient}
    for matrix in matrices.values():
        matrix.knows_gradient = matrix.gradient_key in known
    return matrices
