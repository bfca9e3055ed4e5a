"""What is looked at where ``TORCH_DISTRIBUTED_DEBUG`` is INFO or DETAIL, at the cost of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.optim._muon_engine.agreement import exchange, names_ranks
from torch.optim._muon_engine.layouts import larger_first, listed
from torch.optim._muon_engine.layouts.dtensor import local_part
from torch.optim._muon_engine.runtime.pipeline import digest_of


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Layout
    from torch.optim._muon_engine.runtime.pipeline import ParamState


def is_on() -> bool:
    return dist.is_initialized() and dist.get_debug_level() != dist.DebugLevel.OFF


def compare_gradients(
    layouts: Sequence[Layout],
    params: Mapping[int, ParamState],
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    rank: int,
) -> None:
    """Raises RuntimeError on all ranks of a group where replicas have other gradients of a matrix.

    Args:
        params: by index, before their momentum takes the gradient in.
        groups: by their sorted ranks.
    """
    error: BaseException | None = None
    for ranks in larger_first(groups):
        shared = [l for l in layouts if l.group == ranks and l.shards.replicas > 1]
        group = groups[ranks]
        if group is None or not shared:
            continue
        mine = [
            _digest(layout, params.get(layout.key.index), rank) for layout in shared
        ]
        told, error = exchange(group, mine, error)
        place = {r: at for at, r in enumerate(dist.get_process_group_ranks(group))}
        found = []
        for number, layout in enumerate(shared):
            for replicas in layout.shards.replica_sets:
                digests = {r: told[place[r]][number] for r in replicas}
                if len({d for d in digests.values() if d is not None}) > 1:
                    found.append(f"{layout.describe()} on ranks {list(replicas)}")
                    break
        if found and error is None:
            error = names_ranks(
                RuntimeError(
                    "replicas have other gradients, and the owner's alone would count. Gradients have to be averaged over "
                    "replicas before step(), as DistributedDataParallel does outside of no_sync(): "
                    + listed(found)
                )
            )
    if error is not None:
        raise error


def _digest(layout: Layout, param: ParamState | None, rank: int) -> int | None:
    """Of this rank's shard of the gradient; None where it has none, or one that is placed otherwise."""
    if param is None or not param.has_grad or layout.shards.is_empty(rank):
        return None
    grad = param.param.grad
    if grad is None or getattr(grad, "placements", None) != getattr(
        param.param.tensor, "placements", None
    ):
        return None
    local = local_part(grad)
    return sum(int(digest_of(r.of_local(local))) for r in layout.shards.of(rank))
