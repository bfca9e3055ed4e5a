"""The three functions of a factory's config, and a step through functions that a user replaced.

A user may replace ``gather_fn`` or ``redistribute_fn``, wrap them, or write a config from scratch. The
step then goes parameter by parameter, in index order. A factory's own function among them makes its
exchange through a schedule of one bucket.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon_engine.layouts.dtensor import (
    is_frozen,
    like_param,
    local_part,
)
from torch.optim._muon_engine.layouts import listed, process_rank
from torch.optim._muon_engine.runtime.buffers import (
    add_contributions,
    Buffers,
    copy_all,
)
from torch.optim._muon_engine.runtime.grad_status import meanings
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, by_rank


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.config import DistributedConfig
    from torch.optim._muon_engine.layouts import Layout, Reader
    from torch.optim._muon_engine.runtime.buffers import BucketBuffers
    from torch.optim._muon_engine.runtime.grad_status import GradStatuses
    from torch.optim._muon_engine.runtime.pipeline import ParamState
    from torch.optim._muon_engine.schedule.specs import Schedule


# Where ``state`` names the ConfigFunctions that it belongs to, for wrappers that hide them.
STATE_KEY = "_muon_functions"


class ConfigFunctions:
    """The three functions of a config, over a reader.

    In :meth:`Muon.step` they run on the step that is under way; called directly they are a plain round
    trip.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        # Set while a step through callbacks is under way.
        self.running: CallbackStep | None = None
        self._read: list[Tensor] | None = None
        self._layouts: list[Layout] = []

    def run(self, config: DistributedConfig) -> bool:
        """Whether both functions of ``config`` that move data are these."""
        return (
            config.gather_fn == self.gather
            and config.redistribute_fn == self.redistribute
        )

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None,
    ) -> BaseException | None:
        """Reads ``params``, together with the other ranks; returns what is wrong, if anything."""
        self._read, self._layouts = None, []
        try:
            self._layouts = self.reader.read(params, names, error)
            self._read = list(params)
        except Exception as found:
            return error or found
        return error

    def layouts(self, params: Sequence[Tensor]) -> list[Layout]:
        """As last read, if ``params`` are the same."""
        same = (
            self._read is not None
            and len(params) == len(self._read)
            and all(a is b for a, b in zip(params, self._read, strict=True))
        )
        if not same:
            error = self.read(params, [None] * len(params), None)
            if error is not None:
                raise error
        return self._layouts

    def owners(self, params: Sequence[Tensor], layouts: Sequence[Layout]) -> list[int]:
        """One owner a layout. Frozen parameters are spread apart, for they are no work."""
        frozen = [is_frozen(params[layout.key.index]) for layout in layouts]
        owners = [0] * len(layouts)
        for kind in (False, True):
            chosen = [i for i, is_kind in enumerate(frozen) if is_kind == kind]
            found = assign_owners(layouts[i] for i in chosen)
            for i, owner in zip(chosen, found, strict=True):
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
        self.reader.describe_state(state)
        state[STATE_KEY] = self
        owned = by_rank(
            [layout.key.index for layout in layouts], self.owners(params, layouts)
        )
        ranks = {rank for group in {l.group for l in layouts} for rank in group}
        # A stack of matrices of which this rank holds none is nobody's work here.
        held = {layout.key.index for layout in layouts}
        none = [index for index in range(len(params)) if index not in held]
        if none:
            me = process_rank()
            ranks.add(me)
            owned[me] = sorted([*owned.get(me, []), *none])
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
        self.reader.check_index(tensor, index)
        if "current_owner" in state:
            return self._step_under_way().gather_one(index, tensor)
        return self.reader.whole(tensor, index)

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
        if tensor is not None:
            self.reader.check_index(tensor, index)
        if "current_owner" in state:
            return self._step_under_way().redistribute_one(index, tensor)
        if tensor is None:
            raise ValueError(
                "redistribute_fn was given None outside of step(), where nothing is received: pass the full matrix"
            )
        return self.reader.piece(tensor, index)

    def _step_under_way(self) -> CallbackStep:
        if self.running is None:
            # A config of the user's, with a state and an assign_fn of its own, around our functions.
            raise RuntimeError(
                "gather_fn and redistribute_fn of a factory's config were called in step() of an optimizer that does "
                "not know them. Keep the config that the factory returned and replace functions on it, or hand its "
                "state on"
            )
        return self.running


def functions_of(config: DistributedConfig) -> ConfigFunctions | None:
    """The factory's functions behind ``config``, while any of the three is in use."""
    for fn in (config.gather_fn, config.redistribute_fn, config.assign_fn):
        behind = getattr(fn, "__self__", None)
        if isinstance(behind, ConfigFunctions):
            return behind
    # Wrapped by functions of the user's, all three: the state that they are handed still tells.
    return config.state.get(STATE_KEY)


class SingleMatrix:
    """Gather and scatter of one matrix, each waited for at once."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        owners: Sequence[int],
        rank: int,
        groups: Mapping[tuple[int, ...], ProcessGroup | None],
        device: torch.device,
        statuses: GradStatuses,
    ) -> None:
        if len(layouts) != 1:
            raise ValueError(
                f"{layouts[0].describe()} belongs to a parameter of {len(layouts)} matrices, which gather_fn and "
                "redistribute_fn cannot hand over one by one; leave both as the factory made them"
            )
        (self.layout,), (owner,) = layouts, owners
        self.rank = rank
        self.device = device
        self.is_owner = owner == rank
        self.statuses = statuses
        self.shard = self.layout.shards.of(rank)
        self._groups = groups
        self._owner = owner
        self._made: tuple[Schedule, BucketBuffers] | None = None
        # What the owner made of the statuses in this step's gather, if that was ours.
        self._summary: Tensor | None = None

    def _bucket(self, dtype: torch.dtype) -> tuple[Schedule, BucketBuffers]:
        if self._made is None or self._made[1].bucket.scatter_dtype != dtype:
            # Nobody here relays: waited for at once, that would only add a trip.
            schedule = make_schedule(
                [self.layout],
                [self._owner],
                dtype,
                bucket_bytes=sys.maxsize,
                max_replicas=len(self.layout.group),
                # All on one node, for there are no groups for exchanges in two levels.
                ranks_per_node=max(self.layout.group) + 1,
            )
            buffers = Buffers(schedule, self.rank, self._groups, self.device, 0)
            self._made = schedule, buffers.buckets[0]
        return self._made

    def gather(self, piece: Tensor, param: ParamState) -> Tensor | None:
        """The whole matrix on its owner, None elsewhere."""
        schedule, bucket = self._bucket(param.formulas.dtype)
        local = local_part(piece)
        status = param.status_of(self.shard)
        send = bucket.gather_send
        copy_all(
            [(view, region.of_local(local)) for _, region, view in send.regions(0)]
        )
        # Values are compared where all matrices of a step go together.
        device, digests = send.flat.device, [param.formulas.digest]
        said = self.statuses.said([status], digests, device)
        self.statuses.send(send, 0, said[: len(send.matrices)])
        bucket.start_gather()
        bucket.wait()
        if not self.is_owner:
            return None
        self._summary = self.statuses.summarize(
            bucket.gather_recv,
            [bucket.scatter_send],
            0,
            [0],
            said,
            meanings([False], device),
        )
        own = self.shard if schedule.is_source(0, self.rank) else ()
        out = torch.empty(
            self.layout.shape, dtype=param.formulas.dtype, device=self.device
        )
        pieces = [(region, region.of_local(local)) for region in own]
        if self.layout.shards.partial:
            add_contributions(bucket, 0, self.layout, pieces, self.rank, out)
        else:
            mine = [(region.of_matrix(out), piece) for region, piece in pieces]
            copy_all(mine + bucket.received(0, out))
        return out

    def redistribute(self, update: Tensor | None, param: ParamState) -> Tensor:
        """This rank's piece of ``update``, which only the owner has to have."""
        dtype = param.formulas.dtype
        _, bucket = self._bucket(dtype)
        piece = torch.zeros_like(param.local, dtype=dtype)
        if self.is_owner:
            if update is None or update.shape != self.layout.shape:
                found = "None" if update is None else tuple(update.shape)
                raise RuntimeError(
                    f"redistribute_fn was given {found} for {self.layout.describe()} on its owner"
                )
            if self._summary is None:
                # A gather_fn of the user's tells nothing about gradients.
                self.statuses.say_nothing(bucket.scatter_send, 0)
            else:
                self.statuses.keep([self.layout], self._summary)
            self._summary = None
            own = [(r.of_local(piece), r.of_matrix(update)) for r in self.shard]
            copy_all(own + bucket.returned(0, update))
        bucket.start_scatter()
        bucket.wait()
        self.statuses.receive(bucket.scatter_recv, 0, [self.layout])
        received = bucket.scatter_recv.regions(0)
        copy_all([(region.of_local(piece), view) for _, region, view in received])
        return like_param(param.param.tensor, piece)


class CallbackStep:
    """One step that calls ``gather_fn`` and ``redistribute_fn`` of ``config`` for every parameter.

    The sequence of calls is the same on every rank: a parameter without a gradient brings a zero piece,
    and its update is not applied. Ranks that share parameters go through them in one order: ascending,
    but experts after the others and by their ids.

    Args:
        owners: by index.
        layouts: as far as a factory's functions know them.
        single: gives the exchange of one parameter, for a factory's function beside a user's.
        is_first: whether this is the first step, in which pieces are looked at.
    """

    def __init__(
        self,
        config: DistributedConfig,
        functions: ConfigFunctions | None,
        params: Mapping[int, ParamState],
        owners: Sequence[int],
        describe: Sequence[str],
        layouts: Sequence[Layout],
        rank: int,
        single: Callable[[int], SingleMatrix],
        is_first: bool = False,
    ) -> None:
        self.config = config
        self.functions = functions
        self.is_first = is_first
        self.zeros: list[str] = []
        # By index; frozen parameters take no part.
        self.params = params
        self.owners = owners
        self.describe = describe
        self.layouts = {layout.key.index: layout for layout in layouts}
        self.rank = rank
        self.single = single
        order = list(self.layouts) or list(range(len(owners)))
        self.order = [index for index in order if index in self.params]
        self.gathered: dict[int, Tensor | None] = {}
        # What this rank does, or did when an error came.
        self.where = ""

    def run(self) -> None:
        state = self.config.state
        outside = state.get("current_param_idx")
        if self.functions is not None:
            self.functions.running = self
        try:
            self._run(self.config.prefetch_count)
        finally:
            if self.functions is not None:
                self.functions.running = None
            state.pop("current_owner", None)
            state.pop("current_param_idx", None)
            if outside is not None:
                state["current_param_idx"] = outside

    def _run(self, prefetch_count: int) -> None:
        for index, param in self.params.items():
            self.where = f"accumulate of {self.describe[index]}"
            if param.take_gradient() and param.grad is not None:
                param.formulas.accumulate([param.momentum], [param.grad])
        # Ranks of a group may hold other parameters beside: each looks ahead among the group's own.
        waiting: dict[tuple[int, ...] | None, list[int]] = {}
        for index in self.order:
            waiting.setdefault(self._group(index), []).append(index)
        first = {i for queue in waiting.values() for i in queue[: prefetch_count + 1]}
        for index in self.order:
            if index in first:
                self.gather(index)
        for queue in waiting.values():
            del queue[: prefetch_count + 1]
        for index in self.order:
            whole = self.gathered.pop(index)
            update = self.redistribute(index, self.orthogonalized(index, whole))
            following = waiting[self._group(index)]
            if following:
                self.gather(following.pop(0))
            if self.params[index].has_grad:
                self.look_at(index, update)
                self.apply(index, update, whole)
        self.where = ""
        if self.zeros:
            warnings.warn(
                "redistribute_fn gave this rank exactly zeros as its piece of the update of matrices that other ranks own, "
                "so replicas will hold other values than their owners. It has to send the owner's result to every rank "
                f"that holds a piece, as broadcast or scatter do: {listed(self.zeros)}",
                stacklevel=2,
            )

    def look_at(self, index: int, update: Tensor) -> None:
        """Notes a piece that nobody seems to have sent."""
        own = self.owners[index] == self.rank
        if self.is_first and not own and update.numel() and not update.any():
            self.zeros.append(self.describe[index])

    def _group(self, index: int) -> tuple[int, ...] | None:
        return self.layouts[index].group if index in self.layouts else None

    def announce(self, index: int, what: str) -> int:
        self.where = f"{what} of {self.describe[index]}"
        owner = self.owners[index]
        self.config.state["current_param_idx"] = index
        self.config.state["current_owner"] = owner
        return owner

    def gather(self, index: int) -> None:
        piece = self.piece(self.params[index])
        owner = self.announce(index, "gather_fn")
        whole = self.config.gather_fn(piece, owner, self.config.state)
        if whole is None and owner == self.rank:
            raise RuntimeError(
                f"gather_fn returned None for {self.describe[index]} on its owner, rank {owner}; there it has to "
                "return the whole matrix"
            )
        self.gathered[index] = whole

    @staticmethod
    def piece(param: ParamState) -> Tensor:
        """A copy of this rank's part of what is to be orthogonalized, of the parameter's type."""
        if param.grad is None:
            return like_param(param.param.tensor, torch.zeros_like(param.local))
        local = param.formulas.prepare(param.momentum, param.grad)
        local = local.clone() if local is param.momentum else local
        return like_param(param.param.tensor, local)

    def orthogonalized(self, index: int, whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        self.where = f"orthogonalize of {self.describe[index]}"
        formulas = self.params[index].formulas
        if self.owners[index] != self.rank:
            return whole.new_zeros(whole.shape, dtype=formulas.dtype)
        # A tall matrix comes as a transpose, which some collectives would send in its memory's order.
        return formulas.orthogonalize(local_part(whole)).contiguous()

    def redistribute(self, index: int, update: Tensor | None) -> Tensor:
        owner = self.announce(index, "redistribute_fn")
        piece = self.config.redistribute_fn(update, owner, self.config.state)
        if not isinstance(piece, Tensor):
            raise RuntimeError(
                f"redistribute_fn returned {type(piece).__name__} for {self.describe[index]}; it has to return this "
                "rank's piece of the update"
            )
        piece, local = local_part(piece), self.params[index].local
        if piece.shape != local.shape:
            raise RuntimeError(
                f"redistribute_fn returned a piece of shape {tuple(piece.shape)} for {self.describe[index]}, whose "
                f"local part has shape {tuple(local.shape)}"
            )
        return piece

    def apply(self, index: int, update: Tensor, whole: Tensor | None) -> None:
        self.where = f"apply of {self.describe[index]}"
        param = self.params[index]
        if not param.local.numel():
            # The learning rate of a matrix without columns cannot be scaled.
            return
        update = update.to(param.local.device)
        shape = self.global_shape(index, whole)
        param.formulas.apply([param.local], [update], shape[-2:])

    def global_shape(self, index: int, whole: Tensor | None) -> Sequence[int]:
        """What the learning rate is scaled by: never the shape of a shard, where that is known."""
        if index in self.layouts:
            return self.layouts[index].shape
        tensor = self.params[index].param.tensor
        if whole is not None:
            return whole.shape
        if isinstance(tensor, DTensor):
            return tensor.shape
        known = self.config.state.get("global_shapes", {})
        if index not in known:
            warnings.warn(
                f"gather_fn returned None for {self.describe[index]} on a rank that is not its owner, so the learning "
                f"rate is scaled by the shape of the local tensor. If that is a shard, give the whole shape in "
                f"config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return known.get(index, tensor.shape)

    # For a factory's function beside a user's

    def gather_one(self, index: int, piece: Tensor) -> Tensor | None:
        return self.single(index).gather(piece, self.params[index])

    def redistribute_one(self, index: int, update: Tensor | None) -> Tensor:
        return self.single(index).redistribute(update, self.params[index])
