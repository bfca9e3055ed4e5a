"""Exchanges in two levels: what a rank passes on."""

from .schedule import between, Bucket, Schedule


# Split sizes of each pack.
SplitSizes = list[tuple[int, ...]]


def passed_on(
    schedule: Schedule, bucket: Bucket, rank: int
) -> tuple[SplitSizes, SplitSizes]:
    """Elements that ``rank`` passes on in a gather and in a scatter, from each of its node to each of its rail."""
    node, rail = bucket.node_and_rail(rank)
    owned = schedule.owned(bucket)
    gathers: SplitSizes = []
    scatters: SplitSizes = []
    for sender in node:
        to_owners = [between(sender, owner, owned) for owner in rail]
        gathers.append(schedule.gather_of(bucket, to_owners).split_sizes)
        to_holders = [between(holder, sender, owned) for holder in rail]
        scatters.append(schedule.scatter_of(bucket, to_holders).split_sizes)
    return gathers, scatters
