"""An optimizer's parameters on this rank, and what a step knows of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import fitting, local
from ..layouts.layout import Key


class Param:
    """A parameter on this rank, as it was when the engine was built.

    ``group`` is the index of its parameter group, and ``formulas`` (a MuonFormulas) has the group's options then.
    """

    def __init__(
        self, index: int, tensor: Tensor, name: str | None, group: int, formulas: Any
    ) -> None:
        self.tensor = tensor
        self.key = Key(index, 0, name)
        # Its index when the optimizer got it, which the config's dicts count by.
        self.config_index = index
        self.group = group
        self.formulas = formulas
        # How it becomes matrices: ``split`` and ``flatten``.
        self.form = formulas.form
        # The properties that the layout is read from. Every step compares them.
        self.traits = local.traits_of(tensor)
        # Whether it took no gradients when the engine was built, and the dtype of the gradients that it takes.
        self.frozen: bool = self.traits[0]
        self.grad_dtype: torch.dtype | None = self.traits[1]
        # A DTensor does not see writes to its local tensor.
        self.is_dtensor = local.is_dtensor(tensor)

    @property
    def described(self) -> str:
        return self.key.describe(self.tensor.shape)


class ParamInputs:
    """A parameter's tensors in one step: this rank's parts of the parameter, of its momentum and of its gradient."""

    __slots__ = ("gradient", "local", "momentum", "param", "problem", "user_gradient")

    def __init__(self, param: Param, gradient: Tensor | None, state: Any) -> None:
        """Makes a missing momentum buffer in ``state``, and replaces one that does not fit."""
        tensor = param.tensor
        # Why the momentum or the gradient cannot be used.
        self.problem = ""
        dtype = param.grad_dtype
        if dtype is None and gradient is not None:
            # Gradients may have any dtype, which the momentum takes.
            dtype = gradient.dtype
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = _new_momentum(tensor, dtype)
        elif not isinstance(buffer, Tensor) or not fitting.fits(tensor, buffer, dtype):
            try:
                buffer = fitting.fitting_momentum(tensor, buffer, dtype)
                state["momentum_buffer"] = buffer
            except (TypeError, ValueError) as error:
                # The other ranks wait for this one, so they must hear of it first.
                self.problem = str(error)
                buffer = _new_momentum(tensor, dtype)
        self.param = param
        self.local = local.local_part(tensor)
        self.momentum = local.local_part(buffer)
        # As the user set it.
        self.user_gradient = gradient
        # This rank's part, placed like the parameter; None until ``place_gradients``.
        self.gradient: Tensor | None = None
        if gradient is not None and not self.problem:
            self.problem = fitting.problem_with(tensor, gradient)


def _new_momentum(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    stored = local.local_part(tensor)
    zeros = torch.zeros_like(stored, dtype=dtype or tensor.dtype)
    return local.like_param(tensor, zeros)


class StepInputs:
    """The values of one step: the hyperparameters of each parameter group, and each parameter's tensors."""

    def __init__(
        self, formulas: Sequence[Any], params: Sequence[ParamInputs | None]
    ) -> None:
        # A MuonFormulas for each parameter group.
        self.formulas = formulas
        # A ParamInputs by the index of each parameter; None for a frozen one.
        self.params: Sequence[Any] = params
        self.trained = [of_param for of_param in params if of_param is not None]
        self.problems: list[str] = []
        # Whether every parameter has a gradient that can be used.
        self.is_complete = True
        for of_param in self.trained:
            if of_param.user_gradient is None:
                self.is_complete = False
            if of_param.problem:
                self.is_complete = False
                problem = f"{of_param.param.described}: {of_param.problem}"
                self.problems.append(problem)

    def place_gradients(self, order: Sequence[Param]) -> None:
        """Brings gradients to the placements of their parameters, if need be by a collective of DTensor's, and to the
        dtype of the momentum. All ranks have one ``order`` of parameters.
        """
        for param in order:
            of_param = self.params[param.key.index]
            if of_param is None or of_param.user_gradient is None or of_param.problem:
                continue
            gradient = fitting.local_gradient(
                param.tensor, of_param.user_gradient, of_param.momentum.dtype
            )
            if self.formulas[param.group].flatten:
                gradient = gradient.contiguous()
            of_param.gradient = gradient

    def accumulate(self, group: int, param_indices: Sequence[int]) -> None:
        """Takes the gradients of parameters of one group into their momentum."""
        momenta, gradients = [], []
        for index in param_indices:
            of_param = self.params[index]
            if of_param.gradient is not None:
                momenta.append(of_param.momentum)
                gradients.append(of_param.gradient)
        if momenta:
            self.formulas[group].accumulate(momenta, gradients)
