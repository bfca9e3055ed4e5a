"""The ``distributed_config`` of a Muon: data, and its checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class DistributedConfig:
    r"""How the pieces of each matrix get to one owner rank and return.

    :func:`create_dtensor_config` and :func:`create_auto_config` return one whose three functions run on
    packed, overlapped collectives. You may replace ``assign_fn``, ``gather_fn`` and ``redistribute_fn``,
    or write all three for a framework other than ``torch.distributed``. With a ``gather_fn`` or
    ``redistribute_fn`` of yours, :meth:`Muon.step` issues no collective but that of the function you
    kept, and DTensor's for gradients.

    During :meth:`Muon.step`, every rank that holds a piece calls ``gather_fn`` and then ``redistribute_fn``
    for every parameter that takes gradients, whether or not it has one, in the order of their indices (experts
    last, by id). With ``prefetch_count``, later gathers come first. ``state["current_param_idx"]`` and
    ``state["current_owner"]`` are set before each call. Indices count the parameters in the order of
    ``param_groups``. Muon reads the flags when it is built.

    Args:
        assign_fn (Callable[[list[Tensor], dict], dict[int, list[int]]]): maps the parameters and
            ``state`` to a dict of global rank -> indices that it orthogonalizes. Each index must appear
            exactly once. Called at construction, by ``add_param_group``, and when parameters were
            replaced, frozen or unfrozen.
        gather_fn (Callable[[Tensor, int, dict], Tensor | None]): takes this rank's piece of the tensor to
            orthogonalize, the owner's global rank and ``state``. Returns the whole matrix on the owner,
            and a tensor of the same shape or None elsewhere.
        redistribute_fn (Callable[[Tensor | None, int, dict], Tensor]): takes the orthogonalized matrix on
            the owner. Elsewhere it takes zeros of the gathered shape to receive into, or None if
            ``gather_fn`` returned None. Returns this rank's piece of the update.
        state (dict): passed to the functions. ``state["rank"]`` and ``state["world_size"]``, if present,
            replace those of ``torch.distributed``. If plain tensors are shards and ``gather_fn`` returns
            None, the learning rate is scaled by ``state["global_shapes"]``, a dict of index -> shape of
            the whole matrix.
        async_gpu_parallelism (bool, optional): lets all owners work at the same time. False is for
            debugging: with ``prefetch_count=0``, each matrix is finished before the next one, in the order of
            owners (default: True)
        prefetch_count (int, optional): number of later gathers in flight while one bucket is
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
        """Raises ValueError if a flag is invalid."""
        count = self.prefetch_count
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"prefetch_count must be an int >= 0 but is {count!r}")
