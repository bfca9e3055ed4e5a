"""The least that has to travel, and what did."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


BF16_BYTES = 2


def summarize(
    results: Sequence[dict[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Bytes over all ranks and of the busiest one, beside the least that has to be sent."""
    least = lower_bound(results)
    summary: dict[str, Any] = {"least_bytes": least}
    for name in names:
        of_ranks = [result["sent"][name] for result in results]
        total = sum(one["bytes"] for one in of_ranks)
        summary[name] = {
            "bytes": total,
            "status_bytes": sum(one["statuses"] for one in of_ranks),
            "busiest_rank_bytes": max(one["bytes"] for one in of_ranks),
            "times_least": total / least if least else None,
            "collectives": max(sum(one["calls"].values()) for one in of_ranks),
            "calls": of_ranks[0]["calls"],
        }
    return summary


def lower_bound(results: Sequence[dict[str, Any]]) -> int:
    """The bytes that have to be sent over all ranks.

    From where the framework put each element, and who owns each matrix, alone: what an owner lacks
    has to reach it once, and each other rank has to receive its own part of the update, in bf16.
    """
    shapes = results[0]["shapes"]
    owner_of = {
        index: int(rank)
        for rank, owned in results[0]["assignments"].items()
        for index in owned
    }
    elements = 0
    for index, (rows, columns) in enumerate(shapes):
        owner = owner_of[index]
        held = [tuple(result["held"][index]) for result in results]
        sizes = [(r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in held]
        elements += rows * columns - sizes[owner]
        elements += sum(sizes) - sizes[owner]
    return elements * BF16_BYTES
