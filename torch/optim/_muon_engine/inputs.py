"""The inputs of a step on this rank: the tensors of parameters, as a step takes them, and the options of their groups. It brings
gradients and momentum that do not fit to the placement, dtype and device of their parameter.
"""

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from .._muon_formulas import _adjust_lr
from .dtensors import matrices_of_dtensor
from .params import (
    fitting_part,
    is_sum,
    like_param,
    local_part,
    Matrix,
    Param,
    placement_of,
    States,
    summed,
    takes_update,
)
from .process_groups import process_rank


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
        # Without a problem, both are None until ``place`` if they do not fit. The other ranks wait for this one, so they
        # must hear of a problem first.
        self.momentum: Any = param.part_of_momentum(buffer, dtype)
        self.gradient = fitting_part(tensor, gradient, dtype)
        if self.momentum is None:
            self.problem = problem_with_momentum(tensor, buffer)
        if gradient is not None and self.gradient is None and not self.problem:
            self.problem = problem_with(tensor, gradient)
        if self.problem and self.momentum is None:
            # The other ranks may go on, and receive defined values.
            self.momentum = local_part(self._new_momentum())

    def _new_momentum(self) -> Tensor:
        tensor = self.param.tensor
        dtype = self._momentum_dtype or tensor.dtype
        return like_param(tensor, torch.zeros_like(local_part(tensor), dtype=dtype))

    def place(self, formulas: Any) -> None:
        """Brings momentum and gradient to the placement of the parameter, if need be by collectives of DTensor's, and to
        one dtype. The momentum goes to the state. With the option ``flatten``, both are contiguous.
        """
        if self.momentum is None:
            buffer = self.state["momentum_buffer"]
            dtype = self._momentum_dtype
            buffer = fitting_momentum(self.param.tensor, buffer, dtype)
            self.state["momentum_buffer"] = buffer
            self.momentum = local_part(buffer)
        if self.gradient is None and self.user_gradient is not None:
            self.gradient = local_gradient(
                self.param.tensor, self.user_gradient, self.momentum.dtype
            )
        if self.param.flatten and self.gradient is not None:
            self.gradient = self.gradient.contiguous()
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
        start, begin = 0, first[split.dim]
        end = begin + local.shape[split.dim]
        # How many lines of each part the region has, in the order of all repeats.
        lines: list[int] = []
        for size in split.sizes * split.repeats:
            lines.append(max(0, min(start + size, end) - max(start, begin)))
            start += size
        parts = local.split(lines, split.dim), update.split(lines, split.dim)
        pieces = zip(itertools.cycle(shapes), *parts)
        return [piece for piece in pieces if piece[1].numel()]


def local_gradient(param: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad`` on this rank, with the placement of ``param`` and of ``dtype``. Changing the placement is the
    framework's collective, which every rank of the mesh must join. The contributions to a sum may have one
    replicated gradient, that of the sum. The first one takes it.
    """
    takes = True
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if grad.placements != param.placements:
            placements = list(param.placements)
            coordinate = param.device_mesh.get_coordinate() or ()
            for dim, placement in enumerate(grad.placements):
                if placements[dim].is_partial() and not placement.is_partial():
                    placements[dim] = Replicate()
                    takes = takes and coordinate[dim] == 0
            grad = grad.redistribute(param.device_mesh, placements)
    local = local_part(grad).to(dtype)
    return local if takes else torch.zeros_like(local)


def problem_with(param: Tensor, grad: Tensor) -> str:
    """Why ``grad`` cannot be used for ``param``; "" if it can."""
    if grad.layout != torch.strided:
        return "Muon does not support sparse gradients"
    has_numbers = param.is_complex() == grad.is_complex()
    if has_numbers and isinstance(param, DTensor) and isinstance(grad, DTensor):
        is_on_mesh = param.device_mesh == grad.device_mesh and param.shape == grad.shape
        if is_on_mesh and param.placements != grad.placements:
            problem = _problem_with_move(grad, param.placements)
            return problem and f"its gradient's {problem}"
    if not has_numbers or fitting_part(param, grad) is None:
        return (
            f"the parameter is {_in_words(param)}, but its gradient {_in_words(grad)}"
        )
    return ""


def _in_words(tensor: Tensor) -> str:
    """The properties that a parameter and its gradient share, in words."""
    local = local_part(tensor)
    text = f"of shape {tuple(tensor.shape)}, {tensor.dtype}, on {local.device}"
    if isinstance(tensor, DTensor):
        text = f"a DTensor {text}, here of shape {tuple(local.shape)}, on {tensor.device_mesh}"
    return text


def _problem_with_move(tensor: DTensor, placements: Sequence[Placement]) -> str:
    """Why DTensor cannot bring ``tensor`` to ``placements``; "" if it can."""
    for dim, (old, new) in enumerate(zip(tensor.placements, placements)):
        sums = old.is_partial() and (new.is_partial() or new.is_replicate())
        if old == new or old.is_replicate() or sums:
            continue
        with unset_fake_temporarily():
            ascends = bool((tensor.device_mesh.mesh.diff(dim=dim) > 0).all())
        if not ascends:
            return (
                f"placements {tensor.placements} cannot become {tuple(placements)}: the mesh's ranks do not ascend, so DTensor's "
                "redistribute() would mix up the shards. Make the mesh of ascending ranks"
            )
    return ""


def problem_with_momentum(param: Tensor, buffer: Any) -> str:
    """Why the momentum ``buffer``, which does not fit ``param``, cannot be made to; "" if it can."""
    if not isinstance(buffer, Tensor):
        return f"the momentum buffer must be a Tensor but is a {type(buffer).__name__}"
    if buffer.is_meta and not param.is_meta:
        return "the momentum buffer has no data, because it is on the meta device; delete it or load it"
    if param.shape != buffer.shape:
        return f"the momentum buffer has shape {tuple(buffer.shape)}: load the whole one, or a DTensor of it"
    if isinstance(buffer, DTensor) and placement_of(param) != placement_of(buffer):
        problem = _problem_with_move(buffer, _replicated(buffer))
        return problem and f"the momentum buffer: {problem}"
    return ""


def fitting_momentum(param: Tensor, buffer: Any, dtype: torch.dtype | None) -> Tensor:
    """A momentum ``buffer`` that a checkpoint, a framework or an earlier parameter left, as ``param`` needs it. All
    ranks must make this call, because a change of the placement is a collective. :func:`problem_with_momentum` must
    have found no problem.
    """
    if placement_of(param) != placement_of(buffer):
        if isinstance(buffer, DTensor):
            mesh, whole = buffer.device_mesh, _replicated(buffer)
            buffer = buffer.redistribute(mesh, whole).to_local()
        if isinstance(param, DTensor):
            buffer = cut_out(matrices_of_dtensor(Param(0, param), {}), buffer, param)
    moved = local_part(buffer).to(local_part(param).device, dtype or buffer.dtype)
    return like_param(param, moved.contiguous())


def _replicated(tensor: DTensor) -> Sequence[Placement]:
    """The placements of the whole ``tensor``."""
    return [Replicate()] * tensor.device_mesh.ndim


def cut_out(matrices: Sequence[Matrix], full: Tensor, like: Tensor) -> Tensor:
    """This rank's shards of ``full``, placed like ``like``. One contribution to a sum takes all of it."""
    rank, part = process_rank(), local_part(like)
    local = full.new_zeros(part.shape, device=part.device)
    if is_sum(like) and not takes_update(like):
        return like_param(like, local)
    for matrix in matrices:
        if rank in matrix.layout.ranks:
            # A matrix without elements has no regions.
            for region in matrix.layout.regions_of(rank):
                whole = full.reshape(-1, *matrix.shape)[matrix.sub]
                region.of_local(local).copy_(region.of_matrix(whole))
    return like_param(like, local)
