"""The live objects of a step: this rank's parameters and matrices, from the engine's build on."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..._muon_split import Split
from ..layouts import dtensor, Key
from ..schedule.packs import Schedule


class Status(IntEnum):
    """The gradient of a matrix, as one of its holders sees it."""

    PRESENT = 0
    ABSENT = 1
    # There is a gradient that this holder cannot use.
    UNUSABLE = 2
    # The holder stores no element of the parameter's matrix, so the holder cannot know.
    EMPTY = 3


class Param:
    """A parameter on this rank, with the gradient and the ``formulas`` (MuonFormulas of its group) of one step."""

    def __init__(
        self, index: int, tensor: Tensor, name: str | None, group: int, formulas: Any
    ) -> None:
        self.tensor = tensor
        self.key = Key(index, 0, name)
        # Its index when the optimizer got it, which the config's dicts count by.
        self.config_index = index
        self.param_group = group
        self.formulas = formulas
        # The properties that the layout is read from. Every step compares them.
        self.traits = dtensor.traits_of(tensor)
        self.local: Tensor
        self.momentum: Tensor
        # The gradient that the user set, and its local part placed like the parameter.
        self.user_grad: Tensor | None = None
        self.grad: Tensor | None = None
        self.problem = ""

    @property
    def described(self) -> str:
        return self.key.describe(self.tensor.shape)

    @property
    def form(self) -> tuple[Split, bool]:
        return self.formulas.form

    @property
    def frozen(self) -> bool:
        """Whether it took no gradients when the engine was built."""
        return self.traits[0]

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is this parameter, and its layout is that of the build."""
        return self.tensor is tensor and self.traits == dtensor.traits_of(tensor)

    def check_form(self, formulas: Any) -> None:
        if self.form != formulas.form:
            raise ValueError(
                f"split or flatten of {self.described} was {self.form}, and is now {formulas.form}: set it back, or build a new Muon"
            )

    def begin(self, formulas: Any, grad: Tensor | None, state: Any) -> None:
        """Takes one step's hyperparameters and gradient. Makes a missing momentum buffer."""
        self.formulas = formulas
        buffer = state.get("momentum_buffer")
        if buffer is None:
            dtype = dtensor.gradient_dtype(self.tensor)
            if dtype is None:
                dtype = self.tensor.dtype if grad is None else grad.dtype
            zeros = torch.zeros_like(dtensor.local_part(self.tensor), dtype=dtype)
            buffer = dtensor.like_param(self.tensor, zeros)
        else:
            buffer = dtensor.fitting_momentum(self.tensor, buffer, self.described)
        state["momentum_buffer"] = buffer
        self.local = dtensor.local_part(self.tensor)
        self.momentum = dtensor.local_part(buffer)
        self.user_grad, self.grad, self.is_accumulated = grad, None, False
        self.problem = "" if grad is None else dtensor.problem_with(self.tensor, grad)

    def end(self) -> None:
        """Drops what the user may free or replace between steps."""
        self.user_grad = self.grad = None
        for name in ("local", "momentum"):
            vars(self).pop(name, None)

    @property
    def lerp_start(self) -> Tensor:
        """First operand of the Nesterov lerp; without a gradient the momentum, which makes it a no-op."""
        return self.momentum if self.grad is None else self.grad

    def place_gradient(self) -> None:
        """Sets ``grad``: the gradient, placed like the parameter, if need be by a collective of DTensor's, and in the
        dtype of the momentum.
        """
        if self.user_grad is not None and not self.problem:
            dtype = self.momentum.dtype
            grad = dtensor.local_gradient(self.tensor, self.user_grad, dtype)
            self.grad = grad.contiguous() if self.formulas.flatten else grad


class Matrix:
    """A matrix on this rank: its layout, its owner, the regions that this rank holds, and its Param."""

    def __init__(self, schedule: Schedule, index: int, param: Param, rank: int) -> None:
        self.index = index
        self.layout = schedule.layouts[index]
        self.owner = schedule.owners[index]
        self.param = param
        self.shard = self.layout.shards.of(rank)
        self.is_empty = self.layout.shards.is_empty(rank)
        # Whether this rank stores an element of the matrix, or of the fused weight that it is a part of, and so
        # knows whether there is a gradient.
        self.knows_gradient = not self.is_empty
        # One replica of each shard sends it; one contribution to a sum receives the update.
        self.sent = self.shard if schedule.is_source(index, rank) else ()
        self.receives = schedule.receives(index, rank)
        # On the owners of a divided matrix: what they compute together.
        self.products: Any = None

    @property
    def source_of_gradient(self) -> tuple[int, int]:
        """The parameter and the matrix in it, as it was before it was split or divided: it has one gradient."""
        (split, _), key = self.param.form, self.layout.key
        return key.index, key.sub // max(1, len(split.sizes))

    @property
    def status(self) -> Status:
        """The status of the gradient in this step, as this rank sees it."""
        if self.param.problem:
            return Status.UNUSABLE
        if not self.knows_gradient:
            return Status.EMPTY
        return Status.PRESENT if self.param.user_grad is not None else Status.ABSENT

    @property
    def applies(self) -> bool:
        """Whether this rank applies the update. A rank with an empty shard does what the others do."""
        return self.status in (Status.PRESENT, Status.EMPTY)

    @property
    def is_orthogonalized(self) -> bool:
        """Whether the owner orthogonalizes it; always if it is divided, because other owners take part."""
        return self.applies or self.products is not None
