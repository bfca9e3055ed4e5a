"""A configuration of the property-based tests, as plain data: what each rank builds, and what then happens.

A plan travels from the process that draws it to the ranks that play it, and a failing one is printed. So
meshes, placements and dtypes are written as numbers and words here.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple


WORLD = 4


class Mesh(NamedTuple):
    """A device mesh of some of the ranks, row-major; with ``kept``, its slices along these dimensions."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    kept: tuple[int, ...] = ()

    def groups(self, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The ranks that differ along ``dims`` only, for each such set."""
        found: dict[tuple[int, ...], list[int]] = {}
        places = itertools.product(*map(range, self.sizes))
        for rank, place in zip(self.ranks, places, strict=True):
            fixed = tuple(0 if dim in dims else at for dim, at in enumerate(place))
            found.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def place_of(self, rank: int) -> tuple[int, ...]:
        places = itertools.product(*map(range, self.sizes))
        return dict(zip(self.ranks, places, strict=True))[rank]

    @property
    def in_order(self) -> bool:
        """Whether DTensor's own collectives are right: process groups sort their ranks, meshes do not."""
        groups = [g for dim in range(len(self.sizes)) for g in self.groups((dim,))]
        return all(group == tuple(sorted(group)) for group in groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh that a matrix is placed on."""
        dims = self.kept or range(len(self.sizes))
        return tuple(self.sizes[dim] for dim in dims)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """The ranks of each mesh that a matrix is placed on."""
        return self.groups(self.kept or tuple(range(len(self.sizes))))


class Matrix(NamedTuple):
    """A parameter, by default a DTensor.

    ``placements`` are tensor dimensions for shards, and "R"; "/0" is a shard of dimension 0 that a
    later dimension of the mesh cuts first, as fully_shard leaves after tensor parallelism. Without
    ``mesh`` it is a plain tensor: each rank's own, or the piece of it that the config's groups give the
    rank, where tensor parallelism cuts ``tp_dim`` and ``how`` says into what sizes.
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


class Config(NamedTuple):
    """Arguments for create_dtensor_config, the word "auto", or create_auto_config with groups.

    ``kinds`` says what each dimension of ``mesh`` is given as; None for a dimension that is not given, as
    that of a pipeline. ``functions`` are "built", "assigned" (an assign_fn of the user's) or "wrapped".
    """

    kind: str = "dtensor"
    asynchronous: bool = True
    prefetch: int = 1
    functions: str = "built"
    mesh: Mesh | None = None
    kinds: tuple[str | None, ...] = ()

    def dims_of(self, *kinds: str) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if kind in kinds)


SHARING = ("fsdp", "tp", "ddp", "cp")


# An action is the name of a method of the Player and its arguments. Those of a step are the kinds of
# gradients that matrices get; "full" where it says nothing.
STEP = ("step", ())


class Plan(NamedTuple):
    config: Config
    matrices: tuple[Matrix, ...]
    # Of each group of parameters.
    options: tuple[tuple[tuple[str, Any], ...], ...] = ((),)
    batched: bool = False
    # Of the schedule: its limits, smaller than those of real models.
    limits: tuple[tuple[str, int], ...] = ()
    actions: tuple[tuple[Any, ...], ...] = (STEP,)

    def all_matrices(self) -> tuple[Matrix, ...]:
        """Those that come later, too."""
        added = (action[1] for action in self.actions if action[0] == "add")
        return (*self.matrices, *itertools.chain.from_iterable(added))

    def all_options(self) -> tuple[tuple[tuple[str, Any], ...], ...]:
        added = (action[2] for action in self.actions if action[0] == "add")
        return (*self.options, *added)

    def sharing(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """The sorted ranks that share ``matrix`` with ``rank``; () if it holds none of it."""
        if matrix.mesh is not None:
            sets = matrix.mesh.holders
        elif self.config.mesh is not None:
            sets = self.config.mesh.groups(self.config.dims_of(*SHARING))
        else:
            sets = [(r,) for r in range(WORLD)]
        return next((tuple(sorted(s)) for s in sets if rank in s), ())

    def links(self, matrices) -> list[tuple[int, ...]]:
        """The sets of ranks that compare what they build."""
        found = [self.sharing(m, r) for m in matrices for r in range(WORLD)]
        if self.config.mesh is not None:
            found += self.config.mesh.groups(self.config.dims_of(*SHARING))
        return [ranks for ranks in found if len(ranks) > 1]

    def linked(self, rank: int, matrices) -> set[int]:
        """``rank``, the ranks that share something with it, those that share with these, and so on."""
        found = {rank}
        for _ in range(WORLD):
            found.update(*(r for r in self.links(matrices) if found & set(r)))
        return found

    def spans(self, matrix: Matrix, matrices) -> bool:
        """Whether each rank linked with a holder of ``matrix`` holds it, too, and sees it change."""
        holders = [rank for rank in range(WORLD) if self.sharing(matrix, rank)]
        linked = set().union(*(self.linked(rank, matrices) for rank in holders))
        return linked == set(holders)


def strided_order(placements: tuple[int | str, ...]) -> list[tuple[int, int]]:
    """(Mesh dimension, tensor dimension) of each shard, in the order in which they cut."""
    plain = [(i, p) for i, p in enumerate(placements) if isinstance(p, int)]
    late = [
        (i, int(p[1:]))
        for i, p in enumerate(placements)
        if isinstance(p, str) and p.startswith("/")
    ]
    return plain + late
