"""A plan of the property-based tests: a configuration of all ranks and what then happens, as plain data."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


WORLD = 4


class Mesh(NamedTuple):
    """A device mesh of some of the ranks, row-major; with ``kept``, its slices along these dimensions."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    kept: tuple[int, ...] = ()

    def groups(self, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The ranks that differ along ``dims`` only, for each such set."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.places().items():
            fixed = list(place)
            for dim in dims:
                fixed[dim] = 0
            found.setdefault(tuple(fixed), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def places(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each rank in the whole mesh."""
        coordinates = itertools.product(*map(range, self.sizes))
        return dict(zip(self.ranks, coordinates, strict=True))

    @property
    def dims(self) -> tuple[int, ...]:
        return self.kept or tuple(range(len(self.sizes)))

    def place_of(self, rank: int) -> tuple[int, ...]:
        place = self.places()[rank]
        return tuple(place[dim] for dim in self.dims)

    @property
    def in_order(self) -> bool:
        """Whether DTensor's own collectives are right: process groups sort their ranks, meshes do not."""
        for dim in range(len(self.sizes)):
            for group in self.groups((dim,)):
                if group != tuple(sorted(group)):
                    return False
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[dim] for dim in self.dims)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """The ranks of each mesh that a matrix is placed on."""
        return self.groups(self.dims)


class Matrix(NamedTuple):
    """A parameter, by default a DTensor.

    ``placements`` are tensor dimensions for shards, and "R"; "/0" is a shard of dimension 0 that a
    later dimension of the mesh cuts first, as fully_shard leaves after tensor parallelism. Without
    ``mesh`` it is a plain tensor: each rank's own, or the piece of it that the config's groups give the
    rank, where tensor parallelism cuts ``tp_dim`` and ``how`` says into what sizes. ``form`` has the options
    that say which matrices it is.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None = None
    placements: tuple[int | str, ...] = ()
    dtype: str = "float32"
    group: int = 0
    turned: bool = False
    frozen: bool = False
    tp_dim: int | None = None
    how: str = "chunk"
    expert: bool = False
    form: tuple[tuple[str, Any], ...] = ()
    # The gradients' dtype, if it is not the parameter's.
    grad_dtype: str | None = None


class Config(NamedTuple):
    """Arguments for create_dtensor_config, the word "auto", or create_auto_config with groups.

    ``kinds`` says what each dimension of ``mesh`` is given as; None for a dimension that is not given, as
    that of a pipeline. ``functions`` are "built", "assigned" (an assign_fn of the user's) or "wrapped".
    ``tp_dim`` is the dimension that tensor parallelism cuts of all plain matrices; None if each has its own.
    """

    kind: str = "dtensor"
    asynchronous: bool = True
    prefetch: int = 1
    functions: str = "built"
    mesh: Mesh | None = None
    kinds: tuple[str | None, ...] = ()
    tp_dim: int | None = None

    def dims_of(self, *kinds: str) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(self.kinds) if kind in kinds)


# Values of options that groups hardly have.
OTHER = {
    "lr": 0.7,
    "weight_decay": 0.7,
    "momentum": 0.7,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 7,
    "eps": 0.7,
    "ns_algorithm": "symmetric",
}


SHARING = ("fsdp", "tp", "ddp", "cp")


# An action is the name of a method of the Player and its arguments. Those of a step are the kinds of
# gradients that matrices get; "full" where it says nothing.
STEP = ("step", ())


class Plan(NamedTuple):
    """A configuration as plain data: what each rank builds, and what then happens.

    A failing one is printed. So meshes, placements and dtypes are written as numbers and words.
    """

    config: Config
    matrices: tuple[Matrix, ...]
    # Of each group of parameters.
    options: tuple[tuple[tuple[str, Any], ...], ...] = ((),)
    batched: bool = False
    named: bool = False
    # Of the schedule: its limits, smaller than those of real models.
    limits: tuple[tuple[str, int], ...] = ()
    actions: tuple[tuple[Any, ...], ...] = (STEP,)

    def actions_of(self, kind: str) -> list[tuple[Any, ...]]:
        return [given for name, *given in self.actions if name == kind]

    def sharing(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """The sorted ranks that share ``matrix`` with ``rank``; () if it holds none of it."""
        if matrix.mesh is not None:
            sets = matrix.mesh.holders
        elif self.config.mesh is not None:
            sets = self.config.mesh.groups(self.config.dims_of(*SHARING))
        else:
            sets = [(each,) for each in range(WORLD)]
        for ranks in sets:
            if rank in ranks:
                return tuple(sorted(ranks))
        return ()

    def share_all_matrices(self, matrix: Matrix) -> bool:
        """Whether the ranks that share a parameter hold parts of the same matrices of a stack."""
        if dict(matrix.form).get("flatten"):
            return True
        cut = []
        for placement in matrix.placements:
            # A number, or "/" and a number.
            digit = str(placement)[-1]
            if digit.isdigit():
                cut.append(int(digit))
        if matrix.mesh is None:
            if self.config.dims_of("fsdp"):
                cut.append(0)
            if matrix.tp_dim is not None:
                cut.append(matrix.tp_dim % len(matrix.shape))
        # The last two dimensions are those of each matrix.
        return all(dim >= len(matrix.shape) - 2 for dim in cut)

    def shows_tp(self, matrices: Sequence[Matrix]) -> bool:
        """Whether a DTensor is placed on the ranks of tensor parallelism, and so shows what this cut."""
        if self.config.mesh is None:
            return False
        tp_groups = self.config.mesh.groups(self.config.dims_of("tp"))
        cut = {frozenset(ranks) for ranks in tp_groups}
        for matrix in matrices:
            if matrix.mesh is None:
                continue
            for dim in matrix.mesh.dims:
                for ranks in matrix.mesh.groups((dim,)):
                    if len(ranks) > 1 and frozenset(ranks) in cut:
                        return True
        return False

    def hear(
        self, matrix: Matrix, culprit: int, matrices: Sequence[Matrix]
    ) -> set[int]:
        """The ranks that hear at once of a mismatch in ``matrix``: its holders, and those of later groups that have a
        rank which knows.
        """
        own = tuple(sorted(self.sharing(matrix, culprit)))
        groups = {own}
        for other in matrices:
            # The ranks of a stack may share none of its matrices, and so no group.
            has_group = not other.frozen and math.prod(other.shape)
            if has_group and self.share_all_matrices(other):
                for rank in range(WORLD):
                    groups.add(tuple(sorted(self.sharing(other, rank))))
        found: set[int] = set()
        # Fewer ranks first.
        for ranks in sorted(
            groups, key=lambda ranks: (-len(ranks), ranks), reverse=True
        ):
            if ranks == own or found.intersection(ranks):
                found.update(ranks)
        return found

    def links(self, matrices: Sequence[Matrix]) -> list[tuple[int, ...]]:
        """The sets of ranks that compare what they build."""
        found = []
        for matrix in matrices:
            for rank in range(WORLD):
                found.append(self.sharing(matrix, rank))
        if self.config.mesh is not None:
            found += self.config.mesh.groups(self.config.dims_of(*SHARING))
        return [ranks for ranks in found if len(ranks) > 1]

    def linked(self, rank: int, matrices: Sequence[Matrix]) -> set[int]:
        """``rank``, the ranks that share something with it, those that share with these, and so on."""
        found = {rank}
        links = self.links(matrices)
        # A chain of ranks is no longer than the world.
        for _ in range(WORLD):
            for ranks in links:
                if found.intersection(ranks):
                    found.update(ranks)
        return found

    def see(
        self,
        changed: Sequence[Matrix],
        matrices: Sequence[Matrix],
        count: int = 1,
    ) -> bool:
        """Whether each rank linked with a holder of one of ``changed`` holds ``count`` of them."""
        linked: set[int] = set()
        for rank in range(WORLD):
            if self.held_of(changed, rank):
                linked |= self.linked(rank, matrices)
        return all(self.held_of(changed, rank) >= count for rank in linked)

    def held_of(self, matrices: Sequence[Matrix], rank: int) -> int:
        """How many of ``matrices`` a rank holds a part of."""
        return sum(bool(self.sharing(matrix, rank)) for matrix in matrices)
