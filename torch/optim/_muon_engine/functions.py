"""A step through functions that the user replaced: ``gather_fn`` or ``redistribute_fn``, or a config from scratch. It goes
from parameter to parameter, without buckets and statuses.
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
from .factory import lent, MATRICES, READER, STEP
from .inputs import StepInputs
from .params import (
    like_param,
    local_part,
    Matrix,
    matrix_shape,
    Param,
    takes_update,
)
from .plan import Owners
from .process_groups import listed, spanning_group


def check_stacks(params: Sequence[Param], matrices: Sequence[Matrix]) -> None:
    """Raises ValueError if ranks may hold different matrices of a parameter, and call functions in different orders."""
    counts = Counter(matrix.index for matrix in matrices)
    for param in params:
        shape = param.tensor.shape
        expected = math.prod(shape[:-2])
        is_whole = counts[param.index] == expected and expected > 0
        if not is_whole and not (param.flatten and len(shape) > 2):
            raise ValueError(
                f"{param.described} holds {counts[param.index]} matrices here, which your own functions cannot tell apart; "
                "leave gather_fn and redistribute_fn as the factory made them"
            )


def call_assign_fn(
    engine: Any, matrices: Sequence[Matrix]
) -> tuple[Owners, dict[int, list[int]]]:
    """The owner of each matrix, and the parameters of each owner, as the user's ``assign_fn`` says. Raises AssertionError
    unless each index has one rank, ValueError if that lacks a piece.
    """
    config, params = engine.config, engine.params
    entries: dict[str, Any] = {MATRICES: matrices}
    if engine.reader is not None:
        entries |= {"rank": engine.rank, "world_size": engine.world_size}
    with lent(config.state, entries):
        assignments = config.assign_fn([p.tensor for p in params], config.state)
    if not isinstance(assignments, Mapping):
        raise TypeError(
            f"assign_fn must return a dict of rank -> indices, not {assignments!r}"
        )
    owner_of: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for rank, indices in assignments.items():
        if not 0 <= rank < engine.world_size:
            raise ValueError(
                f"assign_fn names rank {rank}, but the ranks are 0 to {engine.world_size - 1}"
            )
        counts.update(indices)
        owner_of.update(dict.fromkeys(indices, rank))
    problems: list[str] = []
    for index in sorted(counts.keys() - range(len(params))):
        problems.append(f"parameter {index} does not exist")
    for param in params:
        times = counts[param.index]
        if times != 1:
            verdict = f"assigned {times} times" if times else "missing"
            problems.append(f"{param.described} is {verdict}")
    if problems:
        raise AssertionError(
            f"assign_fn must give each of parameters 0 to {len(params) - 1} one owner, but {listed(problems)}"
        )
    owners: dict[Matrix, int] = {}
    for matrix in matrices:
        owner, ranks = owner_of[matrix.index], matrix.layout.ranks
        if owner not in ranks:
            raise ValueError(
                f"assign_fn gives {matrix.described} to rank {owner}, which holds no piece of it; ranks {list(ranks)} do"
            )
        owners[matrix] = owner
    return owners, {rank: list(owned) for rank, owned in assignments.items()}


class FunctionStep:
    """Makes steps by calling ``gather_fn`` and ``redistribute_fn`` of the config for every parameter. Each rank makes the
    same calls: a parameter without a gradient, or with one that cannot be used, brings a zero piece, and its update is not
    applied. Ranks that share parameters go through them in one order: ascending, but experts last and by their ids. Nobody
    hears if ranks differ.
    """

    def __init__(self, engine: Any) -> None:
        self.progress = engine.progress
        self.engine, self.config, self.rank = engine, engine.config, engine.rank
        # By parameter index. Without a reader, there are no matrices.
        self._owners = engine.owner_of
        self._matrices: dict[int, list[Matrix]] = defaultdict(list)
        for matrix in engine.plan.owners:
            self._matrices[matrix.index].append(matrix)
        self._params = [param for param in engine.ordered if not param.frozen]

    def run(self, inputs: StepInputs) -> None:
        """Makes a step. Raises RuntimeError if a function returns something of another shape."""
        engine = self.engine
        entries = {STEP: self, "current_owner": None, "current_param_idx": None}
        if engine.reader is not None:
            ranks = {"rank": self.rank, "world_size": engine.world_size}
            entries = {**entries, **ranks, READER: engine.reader}
        # Parameter index -> what ``gather_fn`` returned.
        gathered: dict[int, Any] = {}
        with lent(self.config.state, entries):
            for param in self._order():
                if param.index in gathered:
                    whole = gathered.pop(param.index)
                    self._redistribute_and_apply(param, whole, inputs)
                else:
                    gathered[param.index] = self._gather(param, inputs)

    def _order(self) -> list[Param]:
        """Each parameter twice: where it is gathered, and where its update is. Ranks of a group may also hold other
        parameters, so each group of ranks prefetches its own.
        """
        of_ranks: dict[Any, list[Param]] = {}
        for param in self._params:
            of_ranks.setdefault(self._ranks(param), []).append(param)
        following = {ranks: iter(params) for ranks, params in of_ranks.items()}
        order: list[Param] = []
        for params in following.values():
            order += itertools.islice(params, self.config.prefetch_count + 1)
        for param in self._params:
            order += [param, *itertools.islice(following[self._ranks(param)], 1)]
        return order

    def _ranks(self, param: Param) -> Any:
        matrices = self._matrices[param.index]
        return matrices[0].layout.ranks if matrices else None

    def _call(self, function: str, param: Param, tensor: Tensor | None) -> Any:
        self.progress.now = function, [param]
        state, owner = self.config.state, self._owners[param.index]
        state["current_param_idx"], state["current_owner"] = param.index, owner
        return getattr(self.config, function)(tensor, owner, state)

    def _gather(self, param: Param, inputs: StepInputs) -> Any:
        """Accumulates the gradient, and gives ``gather_fn`` this rank's piece: zeros without a gradient."""
        self.progress.now = "accumulate", [param]
        of_param = inputs.params[param.index]
        momentum, gradient = of_param.momentum, of_param.gradient
        # A function may write to its piece, which must not change the momentum.
        piece = torch.zeros_like(momentum)
        # One contribution has the sum that was made already.
        has_sum = param.is_sum and of_param.user_gradient is not None
        if gradient is not None:
            formulas = inputs.formulas[param.param_group]
            formulas.accumulate_and_blend([momentum], [gradient], [piece])
        elif has_sum and takes_update(param.tensor):
            piece.copy_(momentum)
        whole = self._call("gather_fn", param, like_param(param.tensor, piece))
        is_missing = whole is None and self._owners[param.index] == self.rank
        if is_missing or not isinstance(whole, Tensor | None):
            raise RuntimeError(
                f"gather_fn returned a {type(whole).__name__} for {param.described}: return the whole matrix, or None on ranks "
                "that do not own it"
            )
        if whole is not None and param.split.sizes:
            shape = matrix_shape(whole.shape, param.flatten)
            problem = param.split.problem_with(shape)
            if problem:
                raise ValueError(f"{param.described}, as gathered: {problem}")
        return whole

    def _redistribute_and_apply(
        self, param: Param, whole: Tensor | None, inputs: StepInputs
    ) -> None:
        """Gives ``redistribute_fn`` the update, and applies what it returns. Raises RuntimeError before anything moves if that
        is no piece of the update.
        """
        update = None
        if whole is not None:
            self.progress.now = "orthogonalize", [param]
            update = self._update_of(param, whole, inputs)
        piece = self._call("redistribute_fn", param, update)
        owner, of_param = self._owners[param.index], inputs.params[param.index]
        # Only once, because reading a value waits for an accelerator.
        is_same = piece is update and self.engine.steps == 1
        if is_same and update is not None and owner != self.rank and not update.any():
            warnings.warn(
                f"redistribute_fn returned the zeros that it was given for {param.described} on rank {self.rank}. Only its "
                f"owner, rank {owner}, updates it, so replicas diverge: broadcast the update",
                stacklevel=2,
            )
        found, expected = type(piece).__name__, f"shape {tuple(of_param.local.shape)}"
        if isinstance(piece, Tensor):
            piece = local_part(piece)
            found = f"shape {tuple(piece.shape)}"
        if found != expected:
            raise RuntimeError(
                f"redistribute_fn returned {found} for {param.described}, but this rank's piece of the update has {expected}"
            )
        if of_param.user_gradient is not None and not of_param.problem:
            self.progress.now = "apply", [param]
            self._apply(param, whole, piece, inputs)

    def _update_of(self, param: Param, whole: Tensor, inputs: StepInputs) -> Tensor:
        """The update of the gathered shape: on its owner orthogonalized, elsewhere zeros."""
        if self._owners[param.index] != self.rank:
            return whole.new_zeros(whole.shape, dtype=NS_DTYPE)
        formulas = inputs.formulas[param.param_group]
        # Some versions gather uneven shards into a view of padded memory.
        whole = local_part(whole).contiguous()
        update = torch.empty_like(whole, dtype=NS_DTYPE)
        results = formulas.matrices_in(update)
        for matrix, result in zip(formulas.matrices_in(whole), results):
            result.copy_(formulas.update_of(matrix))
        is_shard = whole.shape != inputs.params[param.index].local.shape
        if is_shard and not self._matrices[param.index]:
            # No rank knows which part a line of its piece is from. So the pieces have one learning rate, that of the
            # first part, and the update has what the other parts differ by.
            shapes = formulas.split.shapes_of_parts(
                matrix_shape(whole.shape, formulas.flatten)
            )
            scales = [_adjust_lr(1.0, formulas.adjust_lr_fn, shape) for shape in shapes]
            for result, scale in zip(results, itertools.cycle(scales)):
                if scale != scales[0]:
                    result.mul_(scale / scales[0])
        return update

    def broadcast(self, index: int, update: Any, shape: torch.Size) -> Tensor:
        """The owner's ``update`` of ``shape`` on every rank that shares it, for a factory's ``redistribute_fn``."""
        owner, param = self._owners[index], self.engine.params[index]
        if owner != self.rank:
            update = local_part(param.tensor).new_empty(shape, dtype=NS_DTYPE)
        elif update is None or update.shape != shape:
            raise RuntimeError(
                f"redistribute_fn needs the whole update of {param.described} on its owner"
            )
        ranks = self._matrices[index][0].layout.ranks
        # A wrapper may have changed the owner's dtype. The other ranks receive this one.
        update = update.to(self.engine.device, NS_DTYPE).contiguous()
        if len(ranks) > 1:
            group = spanning_group(ranks, self.engine.reader.candidates)
            dist.broadcast(update, owner, group=group)
        return update

    def _apply(
        self, param: Param, whole: Tensor | None, update: Tensor, inputs: StepInputs
    ) -> None:
        """Applies this rank's piece of the update, of the parameter's local shape."""
        local = inputs.params[param.index].local
        if not local.numel():
            # The learning rate of a matrix without columns cannot be scaled.
            return
        update = update.to(local.device).contiguous()
        formulas = inputs.formulas[param.param_group]
        pieces: list[tuple[Sequence[int], Tensor, Tensor]] = []
        for matrix in self._matrices[param.index]:
            for region in matrix.layout.regions_of(self.rank):
                views = region.of_local(local), region.of_local(update)
                pieces += inputs.pieces(matrix, region[:2], *views)
        if not self._matrices[param.index]:
            shape = self._whole_shape(param, whole)
            shapes = formulas.split.shapes_of_parts(shape)
            if whole is not None and whole.shape == local.shape:
                parts = formulas.matrices_in(local), formulas.matrices_in(update)
                pieces += zip(itertools.cycle(shapes), *parts)
            else:
                pieces.append((shapes[0], local, update))
        for of_part, part, of_update in pieces:
            step_size = formulas.step_size(of_part, part.device)
            formulas.apply([part], [of_update], step_size)

    def _whole_shape(self, param: Param, whole: Tensor | None) -> Sequence[int]:
        """The shape that scales the learning rate: not the shard's, if another one is known."""
        if whole is not None:
            return matrix_shape(whole.shape, param.flatten)
        index = param.index
        shapes = self.config.state.get("global_shapes", {})
        if index not in shapes and not param.is_dtensor:
            warnings.warn(
                f"gather_fn returned None for {param.described}, so the shape of the local tensor scales the learning "
                f"rate. If that is a shard, put the whole shape into config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return matrix_shape(shapes.get(index, param.tensor.shape), param.flatten)
