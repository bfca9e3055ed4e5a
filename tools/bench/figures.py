"""From all ranks' times to ratios."""

from __future__ import annotations

import statistics
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


PARTS = ("ns_alone", "ns_shares", "exchange", "exchange_fused", "elementwise")


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


def limits(
    seconds: dict[str, list[float]], world: int, cores: int
) -> dict[str, list[float]]:
    """The limits of each repetition."""
    share = min(world, cores)
    first = [
        alone / share + exchange
        for alone, exchange in zip(
            seconds["ns_alone"], seconds["exchange"], strict=True
        )
    ]
    second = [a + b for a, b in zip(first, seconds["elementwise"], strict=True)]
    third = [
        sum(parts)
        for parts in zip(
            *(seconds[part] for part in ("ns_shares", "exchange", "elementwise")),
            strict=True,
        )
    ]
    return {"limit": first, "second": second, "third": third}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """How many times ``below`` is ``above``.

    The figure is the median over repetitions; ``best`` compares the two shortest times, which is
    what is left to look at on a machine that does other things as well.
    """
    each = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quartiles(each)
    return {
        "median": middle,
        "q1": low,
        "q3": high,
        "best": min(above) / min(below),
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
    # Processor time of all ranks together has no waiting in it and nothing of other programs.
    cpu = over_ranks(results, "cpu_seconds", sum, chosen)
    cpu_bounds = limits(cpu, 1, 1)
    median = statistics.median
    return {
        "repetitions": chosen,
        "others": median([others[rep] for rep in chosen]),
        "limit_ms": {
            "limit": median(bounds["limit"]) * 1e3,
            "second": median(bounds["second"]) * 1e3,
            "third": median(bounds["third"]) * 1e3,
            **{part: median(seconds[part]) * 1e3 for part in PARTS},
        },
        # Above 1: Newton-Schulz on all cores at once is slower than one at a time says.
        "ns_at_once": ratio(
            seconds["ns_shares"],
            [s / min(len(results), cores) for s in seconds["ns_alone"]],
        ),
        "implementations": {
            name: {
                "median_ms": median(seconds[name]) * 1e3,
                "limit": ratio(seconds[name], bounds["limit"]),
                "second": ratio(seconds[name], bounds["second"]),
                "third": ratio(seconds[name], bounds["third"]),
                "first": ratio(seconds[name], seconds[names[0]]),
                "cpu": ratio(cpu[name], cpu_bounds["second"]),
            }
            for name in names
        },
    }
