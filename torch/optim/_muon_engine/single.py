"""A blocking exchange of one parameter, for a config of which one function was replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon import _NS_DTYPE
from torch.optim._muon_engine.runtime import assembly
from torch.optim._muon_engine.runtime.buffers import Exchange
from torch.optim._muon_engine.local import like_param, local_part
from torch.optim._muon_engine.runtime.pipeline import (
    ABSTAINS,
    HAS_GRAD,
    HAS_NONE,
    is_at_odds,
    SOME_HAVE,
    SOME_LACK,
    VOTES,
)
from torch.optim._muon_engine.schedule.buckets import make_schedule


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Layout


class SingleExchange:
    """The same hops as a bucket's, for one matrix and waited for at once."""

    def __init__(
        self,
        layouts: list[Layout],
        owners: list[int],
        rank: int,
        groups: dict[tuple[int, ...], ProcessGroup | None],
        device: torch.device,
    ) -> None:
        if len(layouts) != 1:
            raise ValueError(
                f"{layouts[0].describe()} belongs to a flat parameter of {len(layouts)} matrices, which gather_fn and "
                "redistribute_fn cannot hand over one by one; leave both as the factory made them"
            )
        self.rank = rank
        self.schedule = make_schedule(layouts, owners, _NS_DTYPE)
        self.exchange = Exchange(self.schedule, rank, groups, device, prefetch_count=0)
        # What the owner found in the last exchange: some holders, but not all, had a gradient; all had.
        self.is_split = self.is_updated = False
        self._verdict = 0

    def gather(self, piece: Tensor, has_grad: bool, call: int) -> Tensor | None:
        """Sends ``piece`` in this rank's step number ``call``; the whole matrix on its owner."""
        (buffers,) = self.exchange.buckets
        local = local_part(piece)
        held = any(r.numel for r in self.schedule.layouts[0].shard_of(self.rank))
        vote = (HAS_GRAD if has_grad else HAS_NONE) if held else ABSTAINS
        device = buffers.gather_send.flat.device
        flag = vote + VOTES * (call % (256 // VOTES))
        buffers.gather_send.write_flags(torch.tensor([flag], device=device))
        assembly.pack(buffers, 0, lambda region: region.of_local(local))
        buffers.start_gather()
        buffers.wait()
        if self.schedule.owners[0] != self.rank:
            return None
        votes = [vote]
        if buffers.gather_recv.matrices:
            flags = buffers.gather_recv.read_flags()[0].int()
            if (flags // VOTES != call % (256 // VOTES)).any():
                raise RuntimeError(
                    f"the ranks are not in the same step: found when {self.schedule.layouts[0].describe()} was gathered"
                )
            votes += (flags % VOTES).tolist()
        self._verdict = SOME_HAVE * (HAS_GRAD in votes) + SOME_LACK * (
            HAS_NONE in votes
        )
        out = torch.empty(
            self.schedule.layouts[0].shape,
            dtype=buffers.bucket.scatter_dtype,
            device=buffers.gather_recv.flat.device,
        )
        return assembly.assemble(
            self.schedule,
            self.rank,
            buffers,
            0,
            lambda region: region.of_local(local),
            out,
        )

    def redistribute(self, update: Tensor | None, param: Tensor) -> Tensor:
        (buffers,) = self.exchange.buckets
        layout = self.schedule.layouts[0]
        piece = torch.zeros_like(local_part(param), dtype=buffers.bucket.scatter_dtype)
        mine = self.schedule.owners[0] == self.rank
        if mine:
            if update is None or update.shape != layout.shape:
                found = "None" if update is None else tuple(update.shape)
                raise RuntimeError(
                    f"redistribute_fn was given {found} for {layout.describe()} on its owner"
                )
            assembly.pack_update(buffers, 0, update)
            device = buffers.scatter_send.flat.device
            buffers.scatter_send.write_flags(
                torch.tensor([self._verdict], device=device)
            )
        buffers.start_scatter()
        buffers.wait()
        verdict = self._verdict
        if buffers.scatter_recv.matrices:
            verdict = int(buffers.scatter_recv.read_flags()[0, 0])
        self.is_split = is_at_odds(verdict)
        self.is_updated = verdict == SOME_HAVE
        # A gather_fn of the user's tells nothing about gradients.
        self._verdict = 0
        if mine:
            for region in layout.shard_of(self.rank):
                region.of_local(piece).copy_(region.of_matrix(update))
        for region, view in buffers.scatter_recv.regions(0):
            region.of_local(piece).copy_(view)
        return like_param(param, piece)
