"""The fastest of many combinations of options and layouts, by the number of changes that lead to it."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.optim._muon_engine.layouts.layout import Layout, Shape
from torch.optim._muon_engine.schedule.owners import assign_owners

from .cases import Case
from .costs import least_seconds, Options, passes_of
from .hardware import Hardware
from .plan import make_plan, Plan
from .report import blocks_of, OWNERS, scheduled
from .timeline import simulate


# A change that saves a smaller part of the step is not worth it.
WORTH = 0.05
OTHER_BITS = "whose bits are not those of one process"


class Change(NamedTuple):
    """What a user does; in a word for tables, and in full. With some changes, updates have other bits than in one process."""

    short: str
    full: str
    keeps_bits: bool = True


SHARD_COLUMNS = Change(
    "Shard(1)", "stacks of experts as Shard(1): shard_placement_fn of fully_shard"
)
SPLIT = Change("split", "split_of(model) for fused weights, as training should")
ALL_RANKS = Change(
    "FSDP", "FSDP over all ranks, which changes forward and backward too"
)
GRAM = Change("gram", f'ns_algorithm="gram", {OTHER_BITS}', keeps_bits=False)
FUSED = Change("fused", "fused=True")
Changes = tuple[Change, ...]


class Place(NamedTuple):
    """A model on its ranks, and the changes that lead there."""

    case: Case
    changes: Changes


class Combination(NamedTuple):
    """A simulated combination of ``changes``, with the ``elements`` that the fullest rank stores."""

    seconds: float
    changes: Changes
    elements: float = 0.0

    @property
    def keeps_bits(self) -> bool:
        return all(change.keeps_bits for change in self.changes)


# The fastest combination of each number of changes.
ByChanges = dict[int, Combination]


class Found(NamedTuple):
    """The result of a search.

    Args:
        best, with_same_bits: the fastest combinations; of all, and of those that keep bits.
        tried: how many combinations were simulated, or cannot be better.
        left_out: how many the search had no time for.
    """

    best: ByChanges
    with_same_bits: ByChanges
    tried: int
    left_out: int

    @property
    def steps(self) -> list[Combination]:
        """The fastest combinations with one change, with at most two, and so on, as long as one more is worth it; and
        the fastest one that keeps bits, if it is worth it.
        """
        steps = _worth_it(self.best)
        with_same_bits = _worth_it(self.with_same_bits)
        if with_same_bits and with_same_bits[-1] not in steps:
            steps.append(with_same_bits[-1])
        return sorted(steps, key=lambda combination: -combination.seconds)

    @property
    def fastest(self) -> Combination:
        """The last combination that is worth its changes, or none of them."""
        return [self.best[0], *_worth_it(self.best)][-1]


def _worth_it(best: ByChanges) -> list[Combination]:
    found: list[Combination] = []
    seconds = best[0].seconds
    for count in sorted(best):
        combination = best[count]
        if combination.seconds < (1 - WORTH) * seconds:
            found.append(combination)
            seconds = combination.seconds
    return found


def places_of(case: Case, other_layouts: bool) -> list[Place]:
    """The ways to place the model on its ranks; the first one is ``case`` itself."""
    places = [Place(case, ())]
    if other_layouts and case.kind in ("hsdp", "ddp"):
        fsdp = case._replace(kind="fsdp", outer=case.world, inner=1)
        places.append(Place(fsdp, (ALL_RANKS,)))
    model = case.model
    if model.stacked:
        places += _with_model(places, SHARD_COLUMNS, stacked=False)
    if model.fused and not model.is_split:
        places += _with_model(places, SPLIT, is_split=True)
    return places


def _with_model(places: Sequence[Place], change: Change, **values: bool) -> list[Place]:
    changed = []
    for case, changes in places:
        model = case.model._replace(**values)
        changed.append(Place(case._replace(own=model), (*changes, change)))
    return changed


def algorithms_of(options: Options) -> list[tuple[Options, Changes]]:
    """``options``, and those with other algorithms and passes."""
    found: list[tuple[Options, Changes]] = [(options, ())]
    if options.algorithm == "quintic":
        found.append((options._replace(algorithm="gram"), (GRAM,)))
    if not options.fused:
        for others, changes in list(found):
            found.append((others._replace(fused=True), (*changes, FUSED)))
    return found


class Schedule(NamedTuple):
    """What decides about owners and buckets."""

    place: Place
    owners: int | str
    prefetch: int
    changes: Changes


def _least_with(best: ByChanges, count: int) -> float:
    """The seconds of the fastest combination with at most ``count`` changes."""
    seconds = math.inf
    for number, combination in best.items():
        if number <= count:
            seconds = min(seconds, combination.seconds)
    return seconds


class _Known:
    """What several combinations of a search share."""

    def __init__(self) -> None:
        # By the number of a place.
        self.layouts: dict[int, list[Layout]] = {}
        self.shapes: dict[int, Counter[Shape]] = {}
        self.elements: dict[int, float] = {}
        # By place, owners and algorithm: the number of a division. Several numbers of owners may divide nothing.
        self.divisions: dict[tuple, int] = {}
        # By place, and by the number of blocks of each matrix: the number of the division.
        self.numbers: dict[tuple, int] = {}
        # The blocks of each division, and their owners.
        self.owned: list[tuple[list[Layout], list[int]]] = []
        # By division, prefetch_count and algorithms.
        self.seconds: dict[tuple, float] = {}
        # The last plan, and its division and prefetch_count. Algorithms share it. All plans would take much memory.
        self.plan: tuple[tuple[int, int], Plan] | None = None


class Search:
    """The combinations of one model and layout. :meth:`run` simulates them, and may go on later.

    Args:
        other_layouts: whether FSDP over all ranks is a change.
    """

    def __init__(
        self,
        case: Case,
        options: Options,
        hardware: Hardware,
        other_layouts: bool = True,
    ) -> None:
        self.options = options
        self.hardware = hardware
        self.places = places_of(case, other_layouts)
        self.algorithms = algorithms_of(options)
        self.best: ByChanges = {}
        self.with_same_bits: ByChanges = {}
        self.tried = 0
        self.left = self._schedules()
        self.known = _Known()

    def run(self, deadline: float) -> Found:
        """Simulates combinations until ``deadline`` of ``time.process_time()``, those with few changes first."""
        # Without changes, the step is simulated whatever time it takes.
        while self.left and (time.process_time() < deadline or not self.tried):
            self._try(self.left.pop(0))
        # What they share takes memory.
        self.known = _Known()
        return self.found

    @property
    def found(self) -> Found:
        left_out = len(self.left) * len(self.algorithms)
        return Found(self.best, self.with_same_bits, self.tried, left_out)

    def _schedules(self) -> list[Schedule]:
        """All schedules, in the order in which they are simulated."""
        schedules = []
        for place in self.places:
            for owners, of_owners in self._numbers_of_owners():
                for prefetch, of_prefetch in self._prefetches():
                    changes = (*place.changes, *of_owners, *of_prefetch)
                    schedules.append(Schedule(place, owners, prefetch, changes))

        def likely_first(schedule: Schedule) -> tuple[int, bool, bool]:
            is_likely = schedule.owners in (self.options.owners, "auto")
            has_prefetch = schedule.prefetch > self.options.prefetch
            return len(schedule.changes), has_prefetch, not is_likely

        return sorted(schedules, key=likely_first)

    def _numbers_of_owners(self) -> Iterator[tuple[int | str, Changes]]:
        yield self.options.owners, ()
        for owners in (1, *OWNERS):
            if owners != self.options.owners:
                full = f"owners_per_matrix={owners!r}, {OTHER_BITS}"
                change = Change(f"owners {owners}", full, keeps_bits=owners == 1)
                yield owners, (change,)

    def _prefetches(self) -> Iterator[tuple[int, Changes]]:
        prefetch = self.options.prefetch
        yield prefetch, ()
        more = f"prefetch_count={prefetch + 1}"
        full = f"{more}, with one more bucket of memory"
        yield prefetch + 1, (Change(f"prefetch {prefetch + 1}", full),)

    def _try(self, schedule: Schedule) -> None:
        """Simulates a schedule with each algorithm that may be faster than the combinations with as few changes."""
        for options, of_algorithm in self.algorithms:
            self.tried += 1
            options = options._replace(
                owners=schedule.owners, prefetch=schedule.prefetch
            )
            changes = (*schedule.changes, *of_algorithm)
            combination = Combination(math.inf, changes)
            # The combinations that this one may surpass. Those that keep bits have fewer rivals.
            best = self.with_same_bits if combination.keeps_bits else self.best
            known = _least_with(best, len(changes))
            if self._least(schedule, options) >= known:
                continue
            seconds = self._simulate(schedule, options)
            elements = self._fullest(schedule.place)
            combination = combination._replace(seconds=seconds, elements=elements)
            if seconds < known:
                best[len(changes)] = combination
            if seconds < _least_with(self.best, len(changes)):
                self.best[len(changes)] = combination

    def _least(self, schedule: Schedule, options: Options) -> float:
        """Seconds that no schedule of the place undercuts: the work of all ranks, divided by them; and a matrix that is
        not divided.
        """
        passes = passes_of(options)
        of_element = passes.accumulate + passes.blend
        if schedule.place.case.kind not in ("hsdp", "ddp"):
            # With replicas, updates may be applied during Newton-Schulz.
            of_element += passes.apply
        work, largest = 0.0, 0.0
        for shape, count in self._shapes_of(schedule.place).items():
            rows, columns = shape
            of_matrix = least_seconds(shape, options, self.hardware)
            of_passes = of_element * rows * columns / self.hardware.memory_bandwidth
            work += count * (of_matrix + of_passes)
            largest = max(largest, of_matrix)
        share = work / schedule.place.case.world
        if options.owners == 1:
            return max(share, largest)
        return share

    def _simulate(self, schedule: Schedule, options: Options) -> float:
        division = self._division(schedule.place, options)
        of_plan = division, options.prefetch
        key = of_plan, options.algorithm, options.fused
        if key not in self.known.seconds:
            if self.known.plan is None or self.known.plan[0] != of_plan:
                self.known.plan = of_plan, self._plan(division, schedule)
            _, plan = self.known.plan
            self.known.seconds[key] = simulate(plan, self.hardware, options).seconds
        return self.known.seconds[key]

    def _division(self, place: Place, options: Options) -> int:
        """The number of a division of the matrices of ``place`` among the owners of ``options``."""
        number = self.places.index(place)
        # Only "auto" looks at the algorithm.
        algorithm = options.algorithm if options.owners == "auto" else ""
        key = number, options.owners, algorithm
        if key not in self.known.divisions:
            self.known.divisions[key] = self._divide(number, options)
        return self.known.divisions[key]

    def _divide(self, place_number: int, options: Options) -> int:
        place = self.places[place_number]
        blocks = blocks_of(self._layouts_of(place), self.hardware, options)
        counts = tuple(layout.key.block[1] for layout in blocks)
        key = place_number, counts
        if key not in self.known.numbers:
            self.known.numbers[key] = len(self.known.numbers)
            gpus_per_node = self.hardware.gpus_per_node
            owners = assign_owners(blocks, ranks_per_node=gpus_per_node)
            self.known.owned.append((blocks, owners))
        return self.known.numbers[key]

    def _plan(self, division: int, schedule: Schedule) -> Plan:
        blocks, owners = self.known.owned[division]
        made = scheduled(blocks, owners, self.hardware, schedule.prefetch)
        world = schedule.place.case.world
        return make_plan(made, world, self.hardware.gpus_per_node)

    def _layouts_of(self, place: Place) -> list[Layout]:
        number = self.places.index(place)
        if number not in self.known.layouts:
            self.known.layouts[number] = place.case.layouts()
        return self.known.layouts[number]

    def _shapes_of(self, place: Place) -> Counter[Shape]:
        number = self.places.index(place)
        if number not in self.known.shapes:
            layouts = self._layouts_of(place)
            self.known.shapes[number] = Counter(layout.shape for layout in layouts)
        return self.known.shapes[number]

    def _fullest(self, place: Place) -> float:
        """The elements that the fullest rank stores."""
        number = self.places.index(place)
        if number not in self.known.elements:
            layouts = self._layouts_of(place)
            stored = np.zeros(place.case.world)
            for shards, count in Counter(layout.shards for layout in layouts).items():
                stored[list(shards.ranks)] += count * np.array(shards.numels)
            self.known.elements[number] = float(stored.max())
        return self.known.elements[number]
