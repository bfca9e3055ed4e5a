"""Plain text tables."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from text_table import render

from .catalog import IMPLEMENTATIONS, LAYOUTS, WORKLOADS_IN_WORDS


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def title(case: dict[str, Any]) -> str:
    return f"{WORKLOADS_IN_WORDS[case['workload']]}, {LAYOUTS[case['layout']]}, {case['world']} ranks"


def legend(names: Iterable[str]) -> str:
    words = dict.fromkeys(name.partition("-")[0] for name in names)
    return "\n".join(f"  {word}: {IMPLEMENTATIONS[word]}" for word in words)


def step_case(case: dict[str, Any]) -> str:
    """One set of processes: each implementation in multiples of the limits."""
    figures = case["figures"]
    limit = figures["limit_ms"]
    share = min(case["world"], case["cores"])
    first = case["names"][0]
    rows = [
        [
            name,
            f"{one['median_ms']:.1f}",
            spread(one["limit"]),
            f"{one['first']['median']:.2f}",
        ]
        for name, one in figures["implementations"].items()
    ]
    head = ["", "ms", "x limit (quartiles)", f"x {first}"]
    return "\n".join(
        [
            title(case),
            f"limit {limit['limit']:.1f} ms = Newton-Schulz {limit['ns_alone']:.1f} / {share} + exchange "
            f"{limit['exchange']:.1f} in {2 * case['buckets']} collectives + elementwise {limit['elementwise']:.1f}",
            f"other programs had {100 * figures['others']:.0f} % of the {case['cores']} cores; the quietest "
            f"{case['reps']} of {len(case['others'])} repetitions",
            render(head, rows),
        ]
    )


def step_overview(cases: Sequence[dict[str, Any]]) -> str:
    """All sets of processes: median ratios to the limit."""
    names = max((case["names"] for case in cases), key=len)
    rows = []
    for case in cases:
        found = case["figures"]["implementations"]
        rows.append(
            [
                title(case),
                *(
                    f"{found[name]['limit']['median']:.2f}"
                    if name in found
                    else "refuses"
                    for name in names
                ),
            ]
        )
    head = ["x limit", *names]
    return render(head, rows)


def spread(one: dict[str, float]) -> str:
    return f"{one['median']:.2f} ({one['q1']:.2f}-{one['q3']:.2f})"


def profile(case: dict[str, Any], rank: int = 0) -> str:
    """One rank's operations, as torch's profiler has them."""
    head = f"{title(case)}: rank {rank}'s steps of {case['names'][0]}"
    return f"{head}\n{case['profile'][rank]}"


def bytes_case(case: dict[str, Any]) -> str:
    figures = case["figures"]
    rows = []
    for name in case["names"]:
        one = figures[name]
        times = one["times_least"]
        rows.append(
            [
                name,
                f"{one['bytes'] / 1e6:.3f}",
                f"{one['busiest_rank_bytes'] / 1e6:.3f}",
                f"{times:.4f}" if times is not None else "-",
                str(one["collectives"]),
                ", ".join(f"{n} {call}" for call, n in sorted(one["calls"].items())),
            ]
        )
    head = ["", "MB", "MB, busiest rank", "x least", "collectives a rank", "which"]
    return "\n".join(
        [
            title(case),
            f"least {figures['least_bytes'] / 1e6:.3f} MB over all ranks; ours sends "
            f"{figures[case['names'][0]]['bytes'] - figures['least_bytes']} bytes more, and "
            f"{figures[case['names'][0]]['status_bytes']} bytes of statuses of gradients",
            render(head, rows),
        ]
    )
