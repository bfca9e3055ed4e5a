"""Process groups: those of a matrix's rows and columns of ranks; collectives in flight, and their errors."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary


# Global ranks: of a group of matrices in ascending order, of a process group in its order.
Ranks = tuple[int, ...]
# One dict per default group: a new world starts without groups and counts. A group outlives the optimizers
# that asked for it, because backends free their resources only with the default group.
_worlds = WeakIdKeyDictionary()
# Those of this rank's own device, whichever call they surface in.
OWN_ERRORS = torch.OutOfMemoryError, torch.AcceleratorError


def group_ranks(group: ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))


def listed(names: Sequence[Any], most: int = 8) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def process_rank() -> int:
    """This process's global rank; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def of_world(kind: str) -> dict[Any, Any]:
    """A dict that lives as long as the default group."""
    world = dist.group.WORLD
    if world is None:
        return {}
    return _worlds.setdefault(world, {}).setdefault(kind, {})


def spanning_group(
    ranks: Ranks, candidates: Iterable[ProcessGroup], shared: str = "shards"
) -> ProcessGroup:
    """The group of exactly ``ranks``: the framework's if it has one, else one that its members make. All
    members must call this for their groups in the same order. A new group takes its backend and the longest timeout from
    ``candidates``, the framework's groups for these parameters, and is described by what it has ``shared``.
    """
    # Ranks may list parameters, and so their groups, in different orders. A mesh describes its groups.
    candidates = sorted({*candidates}, key=lambda g: (g.group_desc, g.group_name))
    world = distributed_c10d._get_default_group()
    examples = candidates or [world]
    backend = dist.get_backend_config(examples[0])
    existing = list(candidates)
    # The default group may have another backend, for other devices.
    if dist.get_backend_config(world) == backend:
        existing.append(world)
    for group in existing:
        if group_ranks(group) == ranks:
            return group
    made = of_world("groups")
    # A user who recovers from a failure makes new groups, and must not get a broken one from here.
    key = ranks, backend, tuple(sorted(group.group_name for group in candidates))
    if key not in made or made[key] not in distributed_c10d._world.pg_map:
        # Only the members meet, because other pipeline stages may be elsewhere in their program.
        with _by_members_alone(ranks):
            made[key] = dist.new_group(
                list(ranks),
                timeout=_longest_timeout(examples),
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"muon {shared}",
            )
    return made[key]


@contextmanager
def _by_members_alone(ranks: Ranks) -> Iterator[None]:
    """Lets the members of a group make it without the other ranks. While the default group is bound to a
    device, c10d makes groups by ``ncclCommSplit``, which all ranks of the world must join. Older versions name
    a group after the number of groups in this process, in which members may differ.
    """
    world: Any = dist.group.WORLD
    c10d: Any = distributed_c10d
    device, name_of = world.bound_device_id, c10d._process_group_name
    world.bound_device_id = None
    if not hasattr(c10d, "_local_sync_group_name"):
        # It only grows: the store keeps what the members of a destroyed group wrote.
        calls = of_world("calls")
        calls[ranks] = calls.get(ranks, 0) + 1
        name = f"muon_{short_hash(ranks)}_{calls[ranks]}"
        c10d._process_group_name = lambda *args, **kwargs: name
    try:
        yield
    finally:
        world.bound_device_id, c10d._process_group_name = device, name_of


def matrix_counts() -> dict[tuple[Ranks, ...], int]:
    """Grid -> the number of matrices of all optimizers that were built over it. The next optimizer takes this number as its
    name, and its owners start there.
    """
    return of_world("matrices")


def _longest_timeout(groups: Iterable[ProcessGroup]) -> timedelta | None:
    """The longest timeout among ``groups``; None, the default, if they have none."""
    backends = [g._get_backend(device) for g in groups for device in g._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    return max((o._timeout for o in options if hasattr(o, "_timeout")), default=None)


class GridGroups(NamedTuple):
    """The groups of a grid in which this rank is: its row and its column; None for this rank alone. ``serial`` tells an
    optimizer from others over the grid.
    """

    row: ProcessGroup | None
    column: ProcessGroup | None
    serial: int

    @property
    def several(self) -> list[ProcessGroup]:
        """Those that there are. A reduction along both is a reduction over the grid."""
        return [group for group in (self.row, self.column) if group is not None]


def row_and_column(grid: tuple[Ranks, ...], rank: int) -> tuple[Ranks, Ranks]:
    """The row and the column of ``rank`` in a grid, each in ascending order, as in a process group."""
    (row,) = [of_replica for of_replica in grid if rank in of_replica]
    (column,) = [of_shard for of_shard in zip(*grid) if rank in of_shard]
    return tuple(sorted(row)), tuple(sorted(column))


def grid_groups(
    grid: tuple[Ranks, ...], candidates: Sequence[ProcessGroup], serial: int = 0
) -> GridGroups:
    """The groups of this rank's row and column: those of ``candidates`` that have these ranks, or new ones. All ranks of
    the grid must make this call, and in one order of grids.
    """
    all_ranks = {rank for of_replica in grid for rank in of_replica}
    inside = [group for group in candidates if {*group_ranks(group)} <= all_ranks]
    if not inside:
        # Some ranks of a group may share an expert.
        inside = [group for group in candidates if all_ranks <= {*group_ranks(group)}]
    row, column = row_and_column(grid, process_rank())

    def group_of(ranks: Ranks, shared: str) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        return spanning_group(ranks, inside, shared)

    return GridGroups(group_of(row, "shards"), group_of(column, "replicas"), serial)


def current_device(kind: str) -> torch.device:
    if kind == "cpu" or not torch.accelerator.is_available():
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def device_of_group(group: ProcessGroup) -> torch.device:
    """A device whose tensors ``group`` takes: the CPU if possible."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    return current_device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def short_hash(value: Any) -> str:
    """A hash of ``value`` in sixteen digits. Ranks compare it, and it makes names."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class CollectiveError(RuntimeError):
    """A collective failed."""


@contextmanager
def naming(
    name: str, groups: Iterable[ProcessGroup], carried: Iterable[str]
) -> Iterator[None]:
    """Names a collective in ``groups`` in the backend's error, and the matrices or parameters that it ``carried``."""
    try:
        yield
    except OWN_ERRORS:
        raise
    except RuntimeError as error:
        ranks = sorted({rank for group in groups for rank in group_ranks(group)})
        raise CollectiveError(
            f"the {name}, with {listed([*carried])}, among ranks {ranks} failed. One of these ranks ended, failed before it, did "
            "not build its Muon or call step() within the timeout, changed its parameters alone, or waits for a rank that did so: "
            f"{error}"
        ) from error


class InFlight:
    """The collectives in flight that carry some ``matrices``."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        self.matrices = matrices
        # For errors, the name and the group of each; its handle; and what refers to its memory until it is waited for.
        self.works: list[tuple[str, ProcessGroup, Any, Any]] = []

    def launch(
        self, name: str, group: ProcessGroup, start: Callable[..., Any], *tensors: Any
    ) -> None:
        """Starts a collective of ``tensors`` in ``group``. They must not be touched until :meth:`wait`."""
        with self._naming(name, group):
            work = start(*tensors, group=group, async_op=True)
        self.works.append((name, group, work, tensors))

    def wait(self) -> None:
        """Waits for all of them. Raises CollectiveError if one failed."""
        while self.works:
            name, group, work, _ = self.works.pop(0)
            with self._naming(name, group):
                work.wait()

    def drain(self) -> None:
        """After an error, waits for all of them."""
        # A wait forgets a collective even if it failed.
        while self.works:
            # The error that led here is the one to report.
            with suppress(Exception):
                self.wait()

    def _naming(self, name: str, group: ProcessGroup) -> AbstractContextManager:
        return naming(name, [group], (matrix.described for matrix in self.matrices))
