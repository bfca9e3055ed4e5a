"""What is behind the three functions of a config that a factory made."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon_engine.layouts import Key, Layout, whole_regions
from torch.optim._muon_engine.schedule.owners import assign_owners, by_rank


if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.engine import Engine


# Where ``state`` names the BuiltFunctions that it belongs to, for wrappers that hide them.
STATE_KEY = "_muon_functions"


def process_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def process_count() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def is_frozen(param: Tensor) -> bool:
    """A Parameter that takes no gradients. A plain tensor here is given its gradient by hand."""
    # Not a word of param.grad: what decides about the schedule must be the same on all ranks.
    return isinstance(param, torch.nn.Parameter) and not param.requires_grad


def whole_layout(key: Key, param: Tensor) -> Layout:
    """The layout of a matrix that this rank alone answers for, whole."""
    if param.ndim != 2:
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found {key.describe(param.shape)}"
        )
    rows, columns = param.shape
    full = whole_regions(rows, columns)
    return Layout(
        key, (rows, columns), param.dtype, (process_rank(),), (full,), "a plain tensor"
    )


class BuiltFunctions:
    """The three functions of a config, over a reader that subclasses provide.

    Bound to an optimizer, :attr:`engine` runs them; called directly they are a plain round trip.
    """

    takes_flat_params = False

    def __init__(self) -> None:
        self.engine: Engine | None = None
        # Rank and world size as they were last written into the config's state.
        self.told: dict[str, int] = {}
        self._optimizer: weakref.ref | None = None
        self._seen: list[Tensor] | None = None
        self._layouts: list[Layout] = []

    # What a reader provides.

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``, in an order that all who share some have alike.

        A reader that asks other ranks tells them an ``error`` of this one, and raises it then.
        """
        raise NotImplementedError

    def describe_state(self, layouts: Sequence[Layout], state: dict[str, Any]) -> None:
        """Writes into ``state`` what users are promised to find there."""

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """Sorted ranks that share a matrix -> the framework's groups for it.

        Where reading failed, what can be told without it: equal on all ranks for which it failed.
        """
        raise NotImplementedError

    def meeting(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """Ranks that have to read ``params`` together, with their groups; known without reading."""
        return self.sharing(params)

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        """Where the groups' collectives take their buffers."""
        raise NotImplementedError

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        """The full matrix of ``tensor``, on every caller."""
        raise NotImplementedError

    def piece(self, full: Tensor, index: int) -> Tensor:
        """This rank's piece of ``full``, cut without communication."""
        raise NotImplementedError

    # The functions themselves.

    def prepare(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None,
    ) -> BaseException | None:
        """Reads ``params``, together with the other ranks; returns what is wrong, if anything."""
        self._seen, self._layouts = None, []
        try:
            self._layouts = self.read(params, names, error)
            self._seen = list(params)
        except Exception as found:
            return error or found
        return error

    def layouts(self, params: Sequence[Tensor]) -> list[Layout]:
        same = (
            self._seen is not None
            and len(params) == len(self._seen)
            and all(a is b for a, b in zip(params, self._seen, strict=True))
        )
        if not same:
            error = self.prepare(params, [None] * len(params), None)
            if error is not None:
                raise error
        return self._layouts

    def owners(self, params: Sequence[Tensor], layouts: Sequence[Layout]) -> list[int]:
        """One owner a layout. Frozen parameters are spread apart, for they are no work."""
        frozen = [is_frozen(params[layout.key.index]) for layout in layouts]
        owners = [0] * len(layouts)
        for kind in (False, True):
            chosen = [i for i, is_kind in enumerate(frozen) if is_kind == kind]
            for i, owner in zip(
                chosen, assign_owners(layouts[i] for i in chosen), strict=True
            ):
                owners[i] = owner
        return owners

    def assign(
        self, params: list[Tensor], state: dict[str, Any]
    ) -> dict[int, list[int]]:
        """Gives each parameter to one rank among those that hold a piece of it.

        Args:
            params (list of Tensor): the parameters, in the order of their indices.
            state (dict): receives what is known about them.

        Returns:
            dict of global rank -> indices, over the ranks that share a parameter with this one.
        """
        layouts = self.layouts(params)
        self.describe_state(layouts, state)
        state[STATE_KEY] = self
        owned = by_rank(
            [layout.key.index for layout in layouts], self.owners(params, layouts)
        )
        ranks = {rank for layout in layouts for rank in layout.ranks}
        return {rank: owned.get(rank, []) for rank in sorted(ranks)}

    def gather(self, tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
        """Brings the pieces of one matrix together.

        Args:
            tensor (Tensor): this rank's piece.
            rank (int): the owner's global rank. Not used outside of ``step()``.
            state (dict): names the parameter by ``current_param_idx``, else 0.

        Returns:
            The whole matrix; in ``step()`` on the owner only, elsewhere None.
        """
        index = state.get("current_param_idx", 0)
        if "current_owner" in state:
            return self._running_engine().gather_one(index, tensor)
        return self.whole(tensor, index)

    def _running_engine(self) -> Engine:
        if self.engine is None:
            # A config of the user's, with a state and an assign_fn of its own, around our functions.
            raise RuntimeError(
                "gather_fn and redistribute_fn of a factory's config were called in step() of an optimizer that does "
                "not know them. Keep the config that the factory returned and replace functions on it, or hand its "
                "state on"
            )
        return self.engine

    def redistribute(
        self, tensor: Tensor | None, rank: int, state: dict[str, Any]
    ) -> Tensor:
        """Cuts one matrix into pieces.

        Args:
            tensor (Tensor): the whole matrix; in ``step()`` only the owner's is looked at.
            rank (int): the owner's global rank. Not used outside of ``step()``.
            state (dict): names the parameter by ``current_param_idx``, else 0.

        Returns:
            This rank's piece.
        """
        index = state.get("current_param_idx", 0)
        if "current_owner" in state:
            return self._running_engine().redistribute_one(index, tensor)
        if tensor is None:
            raise ValueError(
                "redistribute_fn was given None outside of step(), where nothing is received: pass the full matrix"
            )
        return self.piece(tensor, index)
