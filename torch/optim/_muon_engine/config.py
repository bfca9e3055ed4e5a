"""What a user hands to ``Muon(distributed_config=...)``."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim._muon_engine.functions import BuiltFunctions


@dataclass
class DistributedConfig:
    r"""How the pieces of each matrix meet at one owner rank and return.

    :func:`create_dtensor_config` and :func:`create_auto_config` make one whose three functions run
    on packed, overlapped exchanges. Any of the three may be replaced, and a config may be written
    from scratch for a framework other than ``torch.distributed``: then :meth:`Muon.step` issues no
    collective of its own.

    During :meth:`Muon.step` every rank that holds a piece calls ``gather_fn`` and then
    ``redistribute_fn`` for every parameter, in the order of the parameters' indices, whether or not
    it has a gradient. ``state["current_param_idx"]`` and ``state["current_owner"]`` are set before
    each call. Indices count the parameters in the order of ``param_groups``. Functions and flags are
    read at every step; whoever changes them does so on all ranks alike.

    Args:
        assign_fn (Callable[[list[Tensor], dict], dict[int, list[int]]]): maps the parameters and
            ``state`` to a dict of global rank -> indices that it orthogonalizes. Each index has to
            appear exactly once. Called at construction, by ``add_param_group`` and when a frozen
            parameter was unfrozen.
        gather_fn (Callable[[Tensor, int, dict], Tensor | None]): takes this rank's piece of what is to
            be orthogonalized, the owner's global rank and ``state``; returns the whole matrix on the
            owner. Elsewhere it returns a tensor of the same shape, or None.
        redistribute_fn (Callable[[Tensor | None, int, dict], Tensor]): takes the orthogonalized matrix
            on the owner, elsewhere zeros of the gathered shape to receive into (None if ``gather_fn``
            returned None); returns this rank's piece of the update.
        state (dict): handed to all three. ``state["rank"]`` and ``state["world_size"]``, where
            present, stand for those of ``torch.distributed``. Where plain tensors are shards and
            ``gather_fn`` returns None, ``state["global_shapes"]``, a dict of index -> shape of the
            whole matrix, is what the learning rate is scaled by.
        async_gpu_parallelism (bool, optional): lets all owners work at the same time. False is for
            debugging: one owner after the other, in rank order (default: True)
        prefetch_count (int, optional): number of later exchanges in flight while one is
            orthogonalized; each takes memory (default: 1)
    """

    assign_fn: Callable[[list[Tensor], dict[str, Any]], dict[int, list[int]]]
    gather_fn: Callable[[Tensor, int, dict[str, Any]], Tensor | None]
    redistribute_fn: Callable[[Tensor | None, int, dict[str, Any]], Tensor]
    state: dict[str, Any]
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1

    def __post_init__(self) -> None:
        self._check_flags()
        # Not fields: two configs that a user compares or copies differ in neither.
        self._engine: Any = None
        self._optimizer: weakref.ref | None = None

    def _check_flags(self) -> None:
        ahead = self.prefetch_count
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ValueError(f"prefetch_count has to be an int >= 0 but is {ahead!r}")

    def _serves_an_optimizer(self) -> bool:
        holder = self._built() or self
        return holder._optimizer is not None and holder._optimizer() is not None

    def _built(self) -> BuiltFunctions | None:
        """The object behind the functions that a factory of ours made, while any of them is in use."""
        from torch.optim._muon_engine.functions import BuiltFunctions, STATE_KEY

        for fn in (self.gather_fn, self.redistribute_fn, self.assign_fn):
            behind = getattr(fn, "__self__", None)
            if isinstance(behind, BuiltFunctions):
                return behind
        # Wrapped by functions of the user's, all three: the state that they are handed still tells.
        return self.state.get(STATE_KEY)

    def _runs_on_engine(self) -> bool:
        """Whether both functions that move data are the ones a factory of ours made."""
        built = self._built()
        return (
            built is not None
            and self.gather_fn == built.gather
            and self.redistribute_fn == built.redistribute
        )

    def _takes_flat_params(self) -> bool:
        built = self._built()
        return built is not None and built.takes_flat_params

    def _claim(self, optimizer: Any) -> ValueError | None:
        """Ties the config to ``optimizer``, whose schedule it carries; returns why that cannot be.

        Copies of a config share the object behind its functions, and so the claim.
        """
        holder = self._built() or self
        other = holder._optimizer() if holder._optimizer is not None else None
        if other is not None and other is not optimizer:
            return ValueError(
                "this distributed_config already serves another live Muon; make one config for each optimizer"
            )
        holder._optimizer = weakref.ref(optimizer)
        return None

    def _release(self) -> None:
        (self._built() or self)._optimizer = None
        self._engine = None
