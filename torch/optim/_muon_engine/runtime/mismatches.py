"""What a difference between the ranks' tables of statuses means, in words."""

from collections.abc import Sequence

from ..process_groups import listed
from .matrices import LocalMatrix
from .params import StepInputs
from .status_rows import Column, Header


_OTHER_STEP = "the ranks are not in the same step(): a closure or a check raised on some of them, and the caller went on"
_OTHER_OPTIMIZER = "the ranks step different optimizers. Build and step them in the same order; a set has its own on each rank"
_OTHER_OPTIONS = "the ranks have different hyperparameters for these. A scheduler or a checkpoint changed those of some ranks only"
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
    "the ranks have gradients or momentum of different placements for these, or some of them have another one than the "
    "parameter. DTensor's redistribute() needs all of them. Give all ranks the parameter's placement"
)


def other_program(header: Sequence[int], matrices: Sequence[LocalMatrix]) -> str:
    """Whether the ranks that share ``matrices`` are in different steps, or step different optimizers; "" if not."""
    reason = ""
    if header[Header.STEP] + header[Header.MINUS_STEP]:
        reason = _OTHER_STEP
    if header[Header.OPTIMIZER] + header[Header.MINUS_OPTIMIZER]:
        reason = _OTHER_OPTIMIZER
    if not reason:
        return ""
    shared = listed([matrix.layout.describe() for matrix in matrices], 4)
    return f"{reason}. This rank's optimizer has {shared}"


def difference(
    gradients: Sequence[Sequence[LocalMatrix]],
    rows: Sequence[Sequence[int]],
    inputs: StepInputs | None,
) -> str:
    """The first kind of difference that there is, and the matrices that have it; "" if there is none.

    ``gradients`` has the matrices of each gradient, and ``rows`` the reduced row of each. With ``inputs``, the text
    has this rank's options.
    """
    tests = {
        _OTHER_OPTIONS: lambda row: row[Column.OPTIONS] + row[Column.MINUS_OPTIONS],
        _OTHER_VALUES: lambda row: row[Column.VALUES] + row[Column.MINUS_VALUES],
        _UNUSABLE: lambda row: row[Column.UNUSABLE],
        _SOME_ABSENT: lambda row: row[Column.PRESENT] and row[Column.ABSENT],
        _OTHER_PLACEMENTS: lambda row: row[Column.MOVES] + row[Column.MINUS_MOVES],
    }
    for reason, differs in tests.items():
        different = []
        for matrices, row in zip(gradients, rows, strict=True):
            if differs(row):
                different.append(matrices)
        if different:
            names = [_described(matrices) for matrices in different]
            text = f"{reason}: {listed(names, 4)}"
            if reason == _OTHER_OPTIONS and inputs is not None:
                text += (
                    f". This rank has {inputs.formulas[different[0][0].param_group]}"
                )
            return text
    return ""


def _described(matrices: Sequence[LocalMatrix]) -> str:
    """The matrices of one gradient, in words."""
    text = matrices[0].layout.describe()
    if len(matrices) == 1:
        return text
    return f"{text} and {len(matrices) - 1} more of its parts"
