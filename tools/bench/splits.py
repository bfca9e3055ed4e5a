"""``splits``: planning and packing of fused weights, by how they are split."""

from .engine_view import planning_and_packing
from .layouts import lay


PARTS = [(sizes, 1536 // sum(sizes)) for sizes in ((512,) * 3, (64,) * 3, (1, 1))]
SPLITS = [{"sizes": s, "repeats": n, "dim": dim} for dim in (0, 1) for s, n in PARTS]


def work(rank: int, world: int, reps: int) -> list[list[float]]:
    """The least seconds of this rank for no split and each of ``SPLITS``."""
    laid = lay("shard", "fused", world)
    groups = [[{"params": laid.params, "split": split}] for split in [None, *SPLITS]]
    config = laid.make_config(1)
    runs = [[planning_and_packing(g, config) for g in groups] for _ in range(reps)]
    return [list(map(min, zip(*times))) for times in zip(*runs)]
