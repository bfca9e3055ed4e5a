"""What a step does with the schedule.

What the optimizer hands over is here: its formulas, and one :class:`StepParam` for each parameter.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch
    from torch import Tensor


class Formulas(Protocol):
    """The phases of an optimizer that updates a matrix by a function of its whole momentum.

    Everything but :meth:`orthogonalize` works element by element, on pieces as on wholes.
    """

    @property
    def dtype(self) -> torch.dtype:
        """What :meth:`orthogonalize` reads and writes, and so what travels."""

    @property
    def compute_key(self) -> Hashable:
        """Matrices of equal keys may be orthogonalized in one batch."""

    @property
    def digest(self) -> int:
        """Of the hyperparameters as they are in this step; equal on all ranks that share a matrix."""

    @property
    def moves(self) -> bool:
        """Whether a step changes parameters; checkpoints make momentum by a step that does not."""

    def check(self) -> None:
        """Raises ValueError where the hyperparameters make no sense."""

    def signature(self) -> dict[str, str]:
        """The hyperparameters in words, by name; equal on all ranks that share a matrix."""

    def accumulate(self, momentum_bufs: list[Tensor], grads: list[Tensor]) -> None:
        """Takes gradients into momentum."""

    def prepare(
        self, momentum_buf: Tensor, grad: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """What is to be orthogonalized; may write it to ``out``."""

    def prepare_together(
        self, momentum_bufs: list[Tensor], grads: list[Tensor]
    ) -> Sequence[Tensor]:
        """Like :meth:`prepare`, for many in few launches."""

    def orthogonalize(self, prepared: Tensor) -> Tensor:
        """The update of a (rows, columns) or of several (matrices, rows, columns)."""

    def batch_size(self, shape: Sequence[int], device: torch.device) -> int:
        """How many matrices of ``shape`` make one batch."""

    def apply(
        self, params: list[Tensor], updates: list[Tensor] | None, shape: Sequence[int]
    ) -> None:
        """Moves pieces of matrices of the global ``shape``; without updates they only decay."""


class StepParam(NamedTuple):
    """One parameter of the optimizer, as it is at one step."""

    tensor: Tensor
    name: str | None
    grad: Tensor | None
    formulas: Formulas
