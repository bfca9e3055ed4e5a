"""``splits``: planning and packing of fused weights, by how they are split."""

from collections.abc import Sequence

from .engine_view import planning_and_packing
from .layouts import lay


ROWS = COLUMNS = 1536
SPLITS = []
for dim in (0, 1):
    for sizes in ((512, 512, 512), (64, 64, 64), (1, 1)):
        repeats = ROWS // sum(sizes)
        SPLITS.append({"sizes": sizes, "repeats": repeats, "dim": dim})


def work(rank: int, world: int, repetitions: int) -> list[list[float]]:
    """The least seconds of this rank for no split and each of ``SPLITS``."""
    laid = lay("shard", "fused", world)
    config = laid.make_config(1)
    least: list[list[float]] = []
    for repetition in range(repetitions):
        for index, split in enumerate([None, *SPLITS]):
            group = {"params": laid.params, "split": split}
            seconds = planning_and_packing([group], config)
            if repetition == 0:
                least.append(seconds)
            else:
                least[index] = list(map(min, least[index], seconds))
    return least


def slowest(results: Sequence[list[list[float]]]) -> list[list[float]]:
    """The seconds of the slowest rank, planning and packing apart, for no split and each of ``SPLITS``."""
    seconds = []
    for by_rank in zip(*results, strict=True):
        planning, packing = zip(*by_rank, strict=True)
        seconds.append([max(planning), max(packing)])
    return seconds
