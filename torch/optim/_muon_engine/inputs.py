"""The inputs of a step on this rank: the tensors of parameters, as a step takes them, and the options of their groups."""

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .._muon_formulas import _adjust_lr
from . import fitting
from .local import fitting_part, like_param, local_part, summed, takes_update
from .params import Matrix, Param, States


class Status(IntEnum):
    """The gradient of a matrix, as one of its ranks sees it. A rank that stores no element of it has no opinion."""

    EMPTY = 0
    ABSENT = 1
    PRESENT = 2
    # There is a gradient that this rank cannot use.
    UNUSABLE = 3


class ParamInputs:
    """A parameter's tensors in one step: this rank's parts of the parameter, of its momentum and of its gradient."""

    def __init__(self, param: Param, gradient: Tensor | None, state: Any) -> None:
        """Makes a missing momentum buffer in ``state``."""
        self.param, self.state = param, state
        # As the user set it.
        self.user_gradient = gradient
        # Why the momentum or the gradient cannot be used.
        self.problem = ""
        # Whether the momentum in the state does not fit the parameter.
        self._is_misfit = False
        # The dtype that the momentum must have; None for any.
        dtype = param.traits.grad_dtype
        if dtype is None and gradient is not None:
            # Gradients may have any dtype, which the momentum takes.
            dtype = gradient.dtype
        self._momentum_dtype = dtype
        tensor = param.tensor
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = self._new_momentum()
        self.local = local_part(tensor)
        momentum = fitting_part(tensor, buffer, dtype)
        if momentum is None:
            # The other ranks wait for this one, so they must hear of a problem first.
            self.problem = fitting.problem_with_momentum(tensor, buffer)
            self._is_misfit = True
            # A step that moves nothing does not read it.
            momentum = local_part(self._new_momentum())
        self.momentum = momentum
        # None until ``place`` if it does not fit.
        self.gradient = fitting_part(tensor, gradient, momentum.dtype)
        lacks_gradient = gradient is not None and self.gradient is None
        if lacks_gradient and not self.problem:
            self.problem = fitting.problem_with(tensor, gradient)

    def _new_momentum(self) -> Tensor:
        tensor = self.param.tensor
        dtype = self._momentum_dtype or tensor.dtype
        return like_param(tensor, torch.zeros_like(local_part(tensor), dtype=dtype))

    def place(self, formulas: Any) -> None:
        """Brings momentum and gradient to the placement of the parameter, if need be by collectives of DTensor's, and to
        one dtype. The momentum goes to the state. With the option ``flatten``, both become contiguous.
        """
        if self._is_misfit:
            buffer = self.state["momentum_buffer"]
            dtype = self._momentum_dtype
            buffer = fitting.fitting_momentum(self.param.tensor, buffer, dtype)
            self.state["momentum_buffer"] = buffer
            self.momentum = local_part(buffer)
        if self.gradient is None and self.user_gradient is not None:
            self.gradient = fitting.local_gradient(
                self.param.tensor, self.user_gradient, self.momentum.dtype
            )
        if self.param.flatten and self.gradient is not None:
            self.gradient = self.gradient.contiguous()
        if self.param.flatten and not self.momentum.is_contiguous():
            # A user may put it back in channels_last.
            self.momentum = self.momentum.contiguous()
            buffer = like_param(self.param.tensor, self.momentum)
            self.state["momentum_buffer"] = buffer
        if self.param.is_sum:
            self._add_up(formulas)

    def _add_up(self, formulas: Any) -> None:
        """Takes the gradient into momentum. The owner gets the sum of all contributions, as if it were momentum without a
        gradient. One contribution takes the update of the sum. The others only decay.
        """
        tensor, blended = self.param.tensor, self.momentum
        if self.gradient is not None:
            formulas.accumulate([self.momentum], [self.gradient])
            (blended,) = formulas.blend([self.momentum], [self.gradient])
            if not takes_update(tensor):
                step_size = formulas.step_size(tensor.shape[-2:], self.local.device)
                self.local.mul_(step_size.decay)
                self.local = torch.empty_like(self.local)
        self.gradient = None
        self.momentum = local_part(summed(like_param(tensor, blended)))


class StepInputs:
    """The values of one step of ``rank``: the hyperparameters of each parameter group, and each parameter's tensors.

    ``ordered`` has the parameters in the order of all ranks, ``states`` their states, and ``gradients`` the gradient
    of each parameter by its index (default: its ``grad``).
    """

    def __init__(
        self,
        rank: int,
        formulas: Sequence[Any],
        ordered: Sequence[Param],
        states: States,
        gradients: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.rank = rank
        # A MuonFormulas for each parameter group.
        self.formulas = formulas
        # A ParamInputs by the index of each parameter; None for a frozen one.
        self.params: list[Any] = [None] * len(ordered)
        self.problems: list[str] = []
        self.without_gradient: list[Param] = []
        # In the order of all ranks.
        self._usable: list[ParamInputs] = []
        for param in ordered:
            if param.frozen:
                continue
            tensor, index = param.tensor, param.index
            gradient = tensor.grad if gradients is None else gradients[index]
            of_param = ParamInputs(param, gradient, states[tensor])
            self.params[index] = of_param
            if of_param.problem:
                self.problems.append(f"{param.described}: {of_param.problem}")
                continue
            if gradient is None:
                self.without_gradient.append(param)
            self._usable.append(of_param)
        # Whether every parameter has a gradient that can be used.
        self.is_complete = not self.problems and not self.without_gradient

    def formulas_of(self, matrix: Matrix) -> Any:
        """The MuonFormulas of the matrix's parameter group."""
        return self.formulas[matrix.param.param_group]

    def status(self, matrix: Matrix) -> Status:
        """The status of the gradient, as this rank sees it."""
        of_param = self.params[matrix.index]
        if of_param.problem:
            return Status.UNUSABLE
        if not matrix.layout.numel_of(self.rank):
            return Status.EMPTY
        return Status.ABSENT if of_param.user_gradient is None else Status.PRESENT

    def applies(self, matrix: Matrix) -> bool:
        """Whether this rank applies the update. A rank with an empty shard does what the others do."""
        return self.is_complete or self.status(matrix) in (Status.PRESENT, Status.EMPTY)

    def place(self, progress: Any) -> None:
        """Makes all momenta and gradients what a step takes. All ranks do so in one order of parameters, of which
        ``progress`` is told.
        """
        for of_param in self._usable:
            param = of_param.param
            progress.now = "placement of the gradient", [param]
            of_param.place(self.formulas[param.param_group])

    def pieces(
        self, matrix: Matrix, first: tuple[int, int], local: Tensor, update: Tensor
    ) -> list[tuple[Sequence[int], Tensor, Tensor]]:
        """A region of a matrix and its update, in pieces that have one step size each, with the shapes that scale it.
        ``first`` are the region's first row and column. Parts of a fused weight may differ.
        """
        split = matrix.split
        shapes: Sequence[Sequence[int]] = split.shapes_of_parts(matrix.shape)
        adjust_lr_fn = self.formulas_of(matrix).adjust_lr_fn
        if len({_adjust_lr(1.0, adjust_lr_fn, shape) for shape in shapes}) == 1:
            return [(shapes[0], local, update)]
        pieces = []
        start, begin = 0, first[split.dim]
        end = begin + local.shape[split.dim]
        for shape, size in itertools.cycle(zip(shapes, split.sizes)):
            if start >= end:
                break
            place, stop = max(start, begin), min(start + size, end)
            if place < stop:
                where = split.dim, place - begin, stop - place
                pieces.append((shape, local.narrow(*where), update.narrow(*where)))
            start += size
        return pieces
