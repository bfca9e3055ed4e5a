"""An optimizer's parameters on this rank, what a step knows of them, and who inherits the momentum of replaced ones."""

import bisect
from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._muon_formulas import _adjust_lr
from . import fitting
from .local import (
    fitting_part,
    is_dtensor,
    is_sum,
    like_param,
    local_part,
    summed,
    takes_update,
    traits_of,
)
from .regions import describe, Matrix


States = MutableMapping[Tensor, MutableMapping[str, Any]]


class Param:
    """A parameter on this rank, as it was when the engine was built.

    ``param_group`` is the index of its parameter group, and ``formulas`` (a MuonFormulas) has the group's options then.
    """

    def __init__(
        self,
        index: int,
        tensor: Tensor,
        name: str | None,
        param_group: int,
        formulas: Any,
    ) -> None:
        self.index, self.tensor, self.name = index, tensor, name
        # Its index when the optimizer got it, which the config's dicts count by.
        self.config_index = index
        self.param_group = param_group
        self.formulas = formulas
        # How it becomes matrices: ``split`` and ``flatten``.
        self.form = formulas.form
        # The properties that the layout is read from. Every step compares them.
        self.traits = traits_of(tensor)
        # Whether it took no gradients when the engine was built, and the dtype of the gradients that it takes.
        self.frozen = self.traits.frozen
        self.grad_dtype = self.traits.grad_dtype
        # A DTensor does not see writes to its local tensor.
        self.is_dtensor = is_dtensor(tensor)
        # Whether ranks hold contributions to a sum.
        self.is_sum = is_sum(tensor)

    @property
    def described(self) -> str:
        return describe(self.index, self.tensor.shape, self.name)


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
        self.param = param
        # As the user set it.
        self.user_gradient = gradient
        # Why the momentum or the gradient cannot be used.
        self.problem = ""
        # The momentum in the state, if it does not fit the parameter.
        self.misfit: Any = None
        tensor, dtype = param.tensor, self._momentum_dtype
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = self._new_momentum()
        self.local = local_part(tensor)
        momentum = fitting_part(tensor, buffer, dtype)
        if momentum is None:
            # The other ranks wait for this one, so they must hear of a problem first.
            self.problem = fitting.problem_with_momentum(tensor, buffer)
            self.misfit = buffer
            # A step that moves nothing does not read it.
            momentum = local_part(self._new_momentum())
        self.momentum = momentum
        # None until ``place`` if it does not fit.
        self.gradient = fitting_part(tensor, gradient, momentum.dtype)
        lacks_gradient = gradient is not None and self.gradient is None
        if lacks_gradient and not self.problem:
            self.problem = fitting.problem_with(tensor, gradient)
        # Whether momentum and gradient, if there is one, are as a step takes them.
        fits = self.misfit is None and not lacks_gradient
        self.is_placed = fits and not param.is_sum

    @property
    def moves(self) -> str:
        """The placements that collectives of DTensor's must change, in words; "" for none."""
        return fitting.moves(self.param.tensor, self.misfit, self.user_gradient)

    @property
    def _momentum_dtype(self) -> torch.dtype | None:
        """The dtype that the momentum must have; None for any."""
        if self.param.grad_dtype is None and self.user_gradient is not None:
            # Gradients may have any dtype, which the momentum takes.
            return self.user_gradient.dtype
        return self.param.grad_dtype

    def _new_momentum(self) -> Tensor:
        tensor = self.param.tensor
        dtype = self._momentum_dtype or tensor.dtype
        return like_param(tensor, torch.zeros_like(local_part(tensor), dtype=dtype))

    def place(self, state: Any, formulas: Any) -> None:
        """Brings momentum and gradient to the placement of the parameter, if need be by collectives of DTensor's, and to
        one dtype. The momentum goes to ``state``. With the option ``flatten``, both become contiguous.
        """
        if self.misfit is not None:
            buffer = fitting.fitting_momentum(
                self.param.tensor, self.misfit, self._momentum_dtype
            )
            state["momentum_buffer"] = buffer
            self.momentum = local_part(buffer)
        if self.gradient is None and self.user_gradient is not None:
            self.gradient = fitting.local_gradient(
                self.param.tensor, self.user_gradient, self.momentum.dtype
            )
        if formulas.flatten:
            self._make_contiguous(state)
        if self.param.is_sum:
            self._add_up(formulas)

    def _add_up(self, formulas: Any) -> None:
        """Takes the gradient into momentum. What is to be orthogonalized becomes the sum of what the ranks contribute, as
        if it were momentum without a gradient. One contribution takes the update of the sum. The others only decay.
        """
        tensor, blended = self.param.tensor, self.momentum
        if self.gradient is not None:
            formulas.accumulate([self.momentum], [self.gradient])
            (blended,) = formulas.blend([self.momentum], [self.gradient])
            if not takes_update(tensor):
                step_size = formulas.step_size(tensor.shape[-2:], self.local.device)
                formulas.apply([self.local], None, step_size)
                self.local = torch.empty_like(self.local)
        self.gradient = None
        self.momentum = local_part(summed(like_param(tensor, blended)))

    def _make_contiguous(self, state: Any) -> None:
        if self.gradient is not None:
            self.gradient = self.gradient.contiguous()
        if not self.momentum.is_contiguous():
            # A user may put it back in channels_last.
            self.momentum = self.momentum.contiguous()
            state["momentum_buffer"] = like_param(self.param.tensor, self.momentum)


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
        # Parameter index -> the placements of its momentum and gradient, if collectives must change them.
        self.moves: dict[int, str] = {}
        # Those whose gradient or momentum is not yet as a step takes it.
        self._to_place: list[ParamInputs] = []
        # The indices of parameters whose gradients are in their momentum.
        self._accumulated: set[int] = set()
        # (Parameter group, shape, device) -> the step size of these matrices. It may be on the device.
        self._step_sizes: dict[Hashable, Any] = {}
        self._states = states
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
            is_as_needed = of_param.is_placed
            moves = "" if is_as_needed else of_param.moves
            if moves:
                self.moves[index] = moves
            if formulas[param.param_group].flatten:
                is_as_needed = False
            if not is_as_needed:
                self._to_place.append(of_param)
        # Whether every parameter has a gradient that can be used.
        self.is_complete = not self.problems and not self.without_gradient

    def formulas_of(self, matrix: Matrix) -> Any:
        """The MuonFormulas of the matrix's parameter group."""
        return self.formulas[self.params[matrix.index].param.param_group]

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
        for of_param in self._to_place:
            param = of_param.param
            progress.now = "placement of the gradient", [param]
            of_param.place(self._states[param.tensor], self.formulas[param.param_group])

    def accumulate(self, indices: Iterable[int]) -> None:
        """Takes the gradients of parameters into their momentum, unless that is done."""
        new = [index for index in indices if index not in self._accumulated]
        if not new:
            return
        self._accumulated.update(new)
        by_group: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for index in dict.fromkeys(new):
            of_param = self.params[index]
            if of_param.gradient is not None:
                group = of_param.param.param_group
                momenta, gradients = by_group.setdefault(group, ([], []))
                momenta.append(of_param.momentum)
                gradients.append(of_param.gradient)
        for group, (momenta, gradients) in by_group.items():
            self.formulas[group].accumulate(momenta, gradients)

    def apply(
        self,
        matrix: Matrix,
        shape: Sequence[int],
        params: list[Tensor],
        updates: list[Tensor],
    ) -> None:
        """Decays and updates regions of parameters. The ``shape`` of the matrix, or of a part of it, scales the update."""
        group, device = self.params[matrix.index].param.param_group, params[0].device
        key = group, shape, device
        step_size = self._step_sizes.get(key)
        if step_size is None:
            step_size = self.formulas[group].step_size(shape, device)
            self._step_sizes[key] = step_size
        self.formulas[group].apply(params, updates, step_size)

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
        ends: list[int] = []
        for size in split.sizes:
            ends.append(size + (ends[-1] if ends else 0))
        pieces = []
        done, extent = 0, local.shape[split.dim]
        while done < extent:
            line = (first[split.dim] + done) % ends[-1]
            part = bisect.bisect_right(ends, line)
            count = min(ends[part] - line, extent - done)
            where = split.dim, done, count
            pieces.append((shapes[part], local.narrow(*where), update.narrow(*where)))
            done += count
        return pieces


class Replacement(NamedTuple):
    """A parameter, the one that took its place, and whether this one inherits the momentum."""

    former: Param
    current: Param
    inherits: bool


@dataclass
class Lineage:
    """The parameters that an engine has seen, by which it finds those that take the places of others."""

    # As a step or a checkpoint saw them last.
    seen: Sequence[Param]
    # Parameter -> its index in the config's dicts, -1 for a later one. It may leave, and come back.
    config_indices: dict[Tensor, int]

    def take_places(self, params: Sequence[Param]) -> list[Replacement]:
        """Parameters take the indices of those whose places they took."""
        replaced = _replaced(self.seen, params)
        self.seen = params
        for old, new, _ in replaced:
            # A parameter that left may have no index.
            if old.tensor in self.config_indices:
                self.config_indices[new.tensor] = self.config_indices.pop(old.tensor)
        return replaced


def _replaced(former: Sequence[Param], now: Sequence[Param]) -> list[Replacement]:
    """Each parameter that took another one's place. It inherits the momentum if the shape and the name are the
    same and nothing else in its group moved. Without names, the type, placement, dtype or device must differ as
    well: a framework has sharded the parameter. Otherwise it is another layer of equal shape, whose momentum
    starts at zero as in stock Muon.
    """
    stayed = {param.tensor for param in former} & {param.tensor for param in now}
    replaced: list[Replacement] = []
    for param_group in dict.fromkeys(param.param_group for param in now):
        before = [param for param in former if param.param_group == param_group]
        after = [param for param in now if param.param_group == param_group]
        moved = 0
        pairs: list[tuple[Param, Param]] = []
        for old, new in zip(before, after):
            if old.tensor is not new.tensor:
                moved += 1
                if old.tensor not in stayed and new.tensor not in stayed:
                    pairs.append((old, new))
        for old, new in pairs:
            inherits = len(pairs) == moved and _is_same(old, new)
            replaced.append(Replacement(old, new, inherits))
    return replaced


def _is_same(old: Param, new: Param) -> bool:
    """Whether a parameter is another form of the one whose place it took."""
    if old.tensor.shape != new.tensor.shape or old.name != new.name:
        return False
    if new.name:
        return True
    # Freezing a parameter does not make it another kind of tensor.
    return old.traits[1:] != new.traits[1:]


def inherit_momentum(replaced: Iterable[Replacement], states: States) -> list[str]:
    """Gives momentum to parameters that replace others. Returns those that get none. The momentum of a parameter
    that left the groups stays with that parameter, too.
    """
    restarted = []
    for old, new, inherits in replaced:
        if "momentum_buffer" in states.get(old.tensor, {}) and new.tensor not in states:
            if inherits:
                states[new.tensor] = dict(states[old.tensor])
            else:
                restarted.append(new.described)
    return restarted


def fit_momentum(params: Sequence[Param], states: States) -> list[str]:
    """Deletes momentum of another shape. Returns the parameters that had it."""
    restarted = []
    for param in params:
        state = states.get(param.tensor, {})
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != param.tensor.shape:
            restarted.append(param.described)
            del state["momentum_buffer"]
    return restarted
