"""A step through functions that the user replaced.

A user may replace or wrap ``gather_fn`` or ``redistribute_fn``, or write a config from scratch. Each parameter
is then a bucket of its own, whose exchange calls these functions.
"""

import itertools
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._muon_formulas import _adjust_lr
from .._newton_schulz import NS_DTYPE
from .config import DistributedConfig
from .config_functions import LAYOUTS, lent, READER, STEP
from .layouts.layout import Layout, matrix_shape
from .layouts.local import is_dtensor, like_param, local_part, takes_update
from .runtime.executor import Executor, Progress
from .runtime.memory import Memory
from .runtime.params import Param, StepInputs
from .runtime.transport import InFlight
from .schedule.assignments import owners_of
from .schedule.order import local_order, LocalWork, step_order


def check_stacks(params: Sequence[Param], layouts: Sequence[Layout]) -> None:
    """Raises ValueError if ranks may hold different matrices of a parameter, and call functions in different orders."""
    counts = Counter(layout.key.index for layout in layouts)
    for index, param in enumerate(params):
        shape = param.tensor.shape
        expected = math.prod(shape[:-2])
        split, flatten = param.form
        if split.sizes:
            expected *= len(split.sizes)
        if counts[index] != expected and not (flatten and len(shape) > 2):
            raise ValueError(
                f"{param.described} holds {counts[index]} matrices here, which your own functions cannot tell apart; "
                "leave gather_fn and redistribute_fn as the factory made them"
            )


def call_assign_fn(
    config: DistributedConfig,
    params: Sequence[Param],
    layouts: Sequence[Layout],
    ranks: Mapping[str, int],
    world_size: int,
) -> tuple[list[int], dict[int, list[int]]]:
    """What the user's ``assign_fn`` returns, as :func:`choose_owners` returns it. Its ``state`` has ``ranks`` meanwhile."""
    tensors = [param.tensor for param in params]
    with lent(config.state, {LAYOUTS: layouts, **ranks}):
        assignments = config.assign_fn(tensors, config.state)
    described = [param.described for param in params]
    owners = owners_of(assignments, layouts, described, world_size)
    return owners, {rank: list(owned) for rank, owned in assignments.items()}


class FunctionExchange(InFlight):
    """The exchange of one parameter by the functions of a ``step``, in place of a packed bucket. It holds this rank's
    tensors from one operation to the next.
    """

    def __init__(self, step: "FunctionStep", param: Param) -> None:
        super().__init__([param], ())
        self.name = param.described
        self.param = param
        self.owner = step.owners.get(param.key.index, step.rank)
        self._step = step
        self.relays = ()
        # This rank's piece of the tensor to orthogonalize, and then of the update.
        self.piece: Any = None
        # The shape of this rank's part of the parameter.
        self.local_shape: tuple[int, ...] = ()
        # What ``gather_fn`` returned, and the update of this shape.
        self.whole: Any = None
        self.update: Tensor | None = None

    def start_gather(self) -> None:
        self.whole = self._call("gather_fn", self.piece)
        self.piece = None
        if self.whole is not None and not isinstance(self.whole, Tensor):
            kind = type(self.whole).__name__
            raise RuntimeError(
                f"gather_fn returned a {kind} for {self.param.described}: return the whole matrix, or None"
            )
        if self.whole is None and self.owner == self._step.rank:
            raise RuntimeError(
                f"gather_fn returned None for {self.param.described} on its owner, which needs the whole matrix"
            )
        split, flatten = self.param.form
        if self.whole is not None and split.sizes:
            problem = split.problem_with(matrix_shape(self.whole.shape, flatten))
            if problem:
                raise ValueError(f"{self.param.described}, as gathered: {problem}")

    def start_scatter(self) -> None:
        self.piece = self._call("redistribute_fn", self.update)
        # Here, before anything of it or of later parameters moves.
        self.piece = self._step.checked_piece(self)

    def holds_parts(self, shape: Sequence[int]) -> bool:
        """Whether this rank has the whole parameter of this ``shape``, so that a split weight cuts it."""
        split, flatten = self.param.form
        if not split.sizes or self.local_shape != tuple(shape):
            return False
        return not split.problem_with(matrix_shape(shape, flatten))

    def clear(self) -> None:
        self.piece = self.whole = self.update = None

    def _call(self, function: str, tensor: Tensor | None) -> Any:
        self._step.progress.now = function, self.matrices
        config, index = self._step.config, self.param.key.index
        config.state["current_param_idx"] = index
        config.state["current_owner"] = self.owner
        return getattr(config, function)(tensor, self.owner, config.state)


class FunctionStep:
    """Makes steps by calling ``gather_fn`` and ``redistribute_fn`` of ``config`` for every parameter: it is both the
    step of an engine and the ``compute`` of its executor. Each rank
    makes the same calls: a parameter without a gradient brings a zero piece, and its update is not applied.
    Ranks that share parameters go through them in one order: ascending, but experts last and by their ids.
    """

    # There are no statuses to read.
    is_unread = False

    def __init__(self, engine: Any) -> None:
        self.engine, self.config, self.rank = engine, engine.config, engine.rank
        self.device = engine.device if engine.reader is not None else None
        # By parameter index. Without a reader, there are no layouts.
        self.owners = {i: r for r, owned in engine.assignments.items() for i in owned}
        self.layouts: dict[int, list[Layout]] = defaultdict(list)
        for layout in engine.schedule.layouts:
            self.layouts[layout.key.index].append(layout)
        self.progress = Progress()
        # Whether this rank raises its own problem before all calls. It raises that of a gradient after them, because
        # the other ranks wait for them.
        self.awaits_statuses = False
        self._exchanges: list[FunctionExchange] = []
        self._executor = self._make_executor()

    def _make_executor(self) -> Executor:
        """Each parameter is a bucket. Ranks of a group may also hold other parameters, so each group prefetches its
        own.
        """
        groups: list[Any] = []
        work_of: dict[int, LocalWork] = {}
        for param in self.engine.ordered:
            layouts = self.layouts[param.key.index]
            if param.frozen or (not layouts and self.engine.reader is not None):
                continue
            exchange = FunctionExchange(self, param)
            self._exchanges.append(exchange)
            work_of[len(groups)] = LocalWork(exchange, batches=[None])
            groups.append(layouts[0].holders if layouts else None)
        order = step_order(groups, self.config.prefetch_count)
        operations = local_order(order, groups, work_of)
        # The functions have memory of their own.
        memory = Memory(torch.device("cpu"))
        return Executor(operations, self, memory, self.progress)

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""
        return str(self.progress)

    def share_statuses(self, step: int, inputs: StepInputs | None) -> str:
        """Has no side channel, so nobody hears if ranks differ."""
        # Nothing moves with momentum that cannot be used.
        self.awaits_statuses = inputs is not None and inputs.has_unusable_momentum
        return ""

    def mismatch(self) -> str:
        return ""

    def bind(self, formulas: Mapping[int, Any]) -> None:
        """Has no batches, which depend on options."""

    def drain(self) -> None:
        """Has nothing in flight: the functions return when they have finished."""

    def run(self, inputs: StepInputs) -> None:
        """Makes a step. Raises RuntimeError if a function returns something of another shape."""
        reader = self.engine.reader
        inputs.place(self.progress)
        entries = {STEP: self, "current_owner": None, "current_param_idx": None}
        if reader is not None:
            ranks = {"rank": self.rank, "world_size": self.engine.world_size}
            entries = {**entries, **ranks, READER: reader}
        try:
            with lent(self.config.state, entries):
                self._executor.run(inputs)
        finally:
            # After an error, too, nothing here refers to whole matrices.
            for exchange in self._exchanges:
                exchange.clear()
        self.progress.now = "", ()

    def prepare(self, bucket: FunctionExchange, inputs: StepInputs) -> None:
        """Accumulates the gradient, and makes this rank's piece: zeros without a gradient."""
        param, of_param = bucket.param, inputs.params[bucket.param.key.index]
        self.progress.now = "accumulate", [param]
        inputs.accumulate(param.param_group, [param.key.index])
        momentum, gradient = of_param.momentum, of_param.gradient
        if param.is_sum and of_param.user_gradient is not None:
            # The sum was made already. One contribution has it.
            piece = (
                momentum if takes_update(param.tensor) else torch.zeros_like(momentum)
            )
        elif gradient is None:
            piece = torch.zeros_like(momentum)
        else:
            (piece,) = inputs.formulas[param.param_group].blend([momentum], [gradient])
            # A function that writes to its piece must not change the momentum.
            piece = piece.clone() if piece is momentum else piece
        bucket.piece = like_param(param.tensor, piece)
        bucket.local_shape = tuple(of_param.local.shape)

    def compute(
        self, bucket: FunctionExchange, batch: None, inputs: StepInputs
    ) -> None:
        """Makes the update of the gathered shape: on its owner orthogonalized, elsewhere zeros, or None."""
        whole, param = bucket.whole, bucket.param
        if whole is None:
            return
        self.progress.now = "orthogonalize", [param]
        formulas = inputs.formulas[param.param_group]
        if bucket.owner != self.rank:
            bucket.update = whole.new_zeros(whole.shape, dtype=NS_DTYPE)
            return
        # Some versions gather uneven shards into a view of padded memory.
        whole = local_part(whole).contiguous()
        update = torch.empty_like(whole, dtype=NS_DTYPE)
        results = formulas.matrices_in(update)
        for matrix, result in zip(formulas.matrices_in(whole), results):
            result.copy_(formulas.update_of(matrix))
        if not self.layouts[param.key.index] and not bucket.holds_parts(whole.shape):
            # No rank knows which part a line of its piece is from. So the pieces have one learning rate, that of the
            # first part, and the update has what the other parts differ by.
            split, flatten = param.form
            scales = [
                _adjust_lr(1.0, formulas.adjust_lr_fn, shape)
                for shape in split.shapes_of_parts(matrix_shape(whole.shape, flatten))
            ]
            for result, scale in zip(results, itertools.cycle(scales)):
                if scale != scales[0]:
                    result.mul_(scale / scales[0])
        bucket.update = update

    def apply_updates(self, bucket: FunctionExchange, inputs: StepInputs) -> None:
        """Applies this rank's piece of the update."""
        param, of_param = bucket.param, inputs.params[bucket.param.key.index]
        if of_param.user_gradient is not None and not of_param.problem:
            self.progress.now = "apply", [param]
            self._apply(bucket, bucket.piece, inputs)
        # The next parameters need the memory.
        bucket.clear()

    def apply_relayed(
        self, bucket: FunctionExchange, relay: Any, inputs: StepInputs
    ) -> None:
        """There are no relays to apply."""

    def checked_piece(self, bucket: FunctionExchange) -> Tensor:
        """This rank's piece of the update as a plain tensor. Raises RuntimeError if ``redistribute_fn`` returned something
        else.
        """
        piece, update, param = bucket.piece, bucket.update, bucket.param
        # Only once, because reading a value waits for an accelerator.
        is_same = piece is update and self.engine.steps == 1
        if is_same and update is not None and bucket.owner != self.rank:
            if not update.any():
                warnings.warn(
                    f"redistribute_fn returned the zeros that it was given for {param.described} on rank {self.rank}. Only its "
                    f"owner, rank {bucket.owner}, updates it, so replicas diverge: broadcast the update",
                    stacklevel=2,
                )
        kind, shape = type(piece).__name__, bucket.local_shape
        if isinstance(piece, Tensor):
            piece = local_part(piece)
            kind = f"shape {tuple(piece.shape)}"
        if not isinstance(piece, Tensor) or piece.shape != shape:
            raise RuntimeError(
                f"redistribute_fn returned {kind} for {param.described}, but this rank's piece of the update has shape {shape}"
            )
        return piece

    def broadcast(self, index: int, update: Tensor | None, shape: torch.Size) -> Tensor:
        """The owner's ``update`` of ``shape`` on every holder, for a factory's ``redistribute_fn``."""
        owner, param = self.owners[index], self.engine.params[index]
        local = local_part(param.tensor)
        if update is None or update.shape != shape:
            if owner == self.rank:
                given = "None" if update is None else tuple(update.shape)
                text = f"redistribute_fn was given {given} for {param.described}"
                raise RuntimeError(f"{text} on its owner")
            update = local.new_empty(shape, dtype=NS_DTYPE)
        group = self.engine.groups[self.layouts[index][0].holders]
        # A wrapper may have changed the owner's dtype. The other ranks receive this one.
        update = update.to(self.device, NS_DTYPE).contiguous()
        if group is not None:
            dist.broadcast(update, owner, group=group)
        return update

    def _apply(
        self, bucket: FunctionExchange, update: Tensor, inputs: StepInputs
    ) -> None:
        """Applies this rank's piece of the update, of the parameter's local shape."""
        param = bucket.param
        local_param = inputs.params[param.key.index].local
        if not local_param.numel():
            # The learning rate of a matrix without columns cannot be scaled.
            return
        update = update.to(local_param.device).contiguous()
        formulas = inputs.formulas[param.param_group]
        layouts = self.layouts[param.key.index]
        for layout in layouts:
            for region in layout.shards.of(self.rank):
                local, part = region.of_local(local_param), region.of_local(update)
                inputs.apply(param.param_group, layout.shape, [local], [part])
        if not layouts:
            split, flatten = param.form
            shape = self._global_shape(bucket)
            shapes = split.shapes_of_parts(matrix_shape(shape, flatten))
            pieces, updates = [local_param], [update]
            if bucket.holds_parts(shape):
                pieces = formulas.matrices_in(local_param)
                updates = formulas.matrices_in(update)
            for piece, part, of_part in zip(pieces, updates, itertools.cycle(shapes)):
                inputs.apply(param.param_group, of_part, [piece], [part])

    def _global_shape(self, bucket: FunctionExchange) -> Sequence[int]:
        """The shape that scales the learning rate: not the shard's, if another one is known."""
        if bucket.whole is not None:
            return bucket.whole.shape
        param, index = bucket.param, bucket.param.key.index
        shapes = self.config.state.get("global_shapes", {})
        if index not in shapes and not is_dtensor(param.tensor):
            warnings.warn(
                f"gather_fn returned None for {param.described}, so the shape of the local tensor scales the learning "
                f"rate. If that is a shard, put the whole shape into config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return shapes.get(index, param.tensor.shape)
