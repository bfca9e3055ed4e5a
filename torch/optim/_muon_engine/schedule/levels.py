"""Exchanges in two levels: what a rank passes on."""

from .schedule import between, Bucket, Schedule


def passed_on(
    schedule: Schedule, bucket: Bucket, rank: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Elements that ``rank`` passes on in a gather and in a scatter, from each of its node to each of its rail."""
    (node, rail), owned = bucket.node_and_rail(rank), schedule.owned(bucket)
    gathers = ([between(h, o, owned) for o in rail] for h in node)
    scatters = ([between(h, o, owned) for h in rail] for o in node)
    return (
        [schedule.gather_of(bucket, exchanged).split_sizes for exchanged in gathers],
        [schedule.scatter_of(bucket, exchanged).split_sizes for exchanged in scatters],
    )
