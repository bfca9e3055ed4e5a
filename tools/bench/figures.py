"""From all ranks' times to ratios."""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


PARTS = ("ns_alone", "exchange", "elementwise")


def over_ranks(
    results: Sequence[dict[str, Any]],
    key: str,
    combine: Callable[[Iterable[float]], float],
    chosen: Sequence[int],
) -> dict[str, list[float]]:
    """``combine`` of all ranks' times, by name and ``chosen`` repetition."""
    return {
        name: [combine([r[key][name][rep] for r in results]) for rep in chosen]
        for name in results[0][key]
    }


def quietest(others: Sequence[float], reps: int) -> list[int]:
    """The ``reps`` repetitions in which others had the least of the machine, in their order."""
    return sorted(sorted(range(len(others)), key=others.__getitem__)[:reps])


def limits(seconds: dict[str, list[float]], world: int, cores: int) -> list[float]:
    """The limit of each repetition."""
    share = min(world, cores)
    parts = zip(*(seconds[part] for part in PARTS), strict=True)
    return [alone / share + exchange + passes for alone, exchange, passes in parts]


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """How many times ``below`` is ``above``.

    The figure is the median over repetitions.
    """
    each = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quartiles(each)
    return {
        "median": middle,
        "q1": low,
        "q3": high,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarize(
    results: Sequence[dict[str, Any]], names: Sequence[str], cores: int, reps: int
) -> dict[str, Any]:
    """Ratios of every implementation to each limit, and to the first implementation."""
    others = results[0]["others"]
    chosen = quietest(others, reps)
    seconds = over_ranks(results, "seconds", max, chosen)
    bounds = limits(seconds, len(results), cores)
    median = statistics.median
    return {
        "repetitions": chosen,
        "others": median([others[rep] for rep in chosen]),
        "limit_ms": {
            "limit": median(bounds) * 1e3,
            **{part: median(seconds[part]) * 1e3 for part in PARTS},
        },
        "implementations": {
            name: {
                "median_ms": median(seconds[name]) * 1e3,
                "limit": ratio(seconds[name], bounds),
                "first": ratio(seconds[name], seconds[names[0]]),
            }
            for name in names
        },
    }
