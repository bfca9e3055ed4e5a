"""What a user hands to ``Muon(distributed_config=...)``: data, and the checks of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
            appear exactly once. Called at construction, by ``add_param_group`` and when parameters were
            replaced, frozen or unfrozen.
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

    Raises:
        ValueError: ``prefetch_count`` is not an int of at least 0.
    """

    assign_fn: Callable[[list[Tensor], dict[str, Any]], dict[int, list[int]]]
    gather_fn: Callable[[Tensor, int, dict[str, Any]], Tensor | None]
    redistribute_fn: Callable[[Tensor | None, int, dict[str, Any]], Tensor]
    state: dict[str, Any]
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError where a flag makes no sense; users change flags between steps."""
        ahead = self.prefetch_count
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ValueError(f"prefetch_count has to be an int >= 0 but is {ahead!r}")
