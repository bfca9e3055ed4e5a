"""The simulation's figures as plain text."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from ..table import render


if TYPE_CHECKING:
    from collections.abc import Sequence


def title(case: dict[str, Any]) -> str:
    return f"{case['model']}, {case['mesh']}, {case['ranks']} ranks"


def progress(case: dict[str, Any]) -> str:
    return f"{title(case)}: {milliseconds(case['step'])} ms"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.2f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


def times(cases: Sequence[dict[str, Any]]) -> str:
    head = [
        "ms",
        "matrices an owner",
        "step",
        "ideal",
        "step / ideal",
        "idle",
        "all-gather",
        "an owner a replica",
        "one matrix at a time",
        "one level",
    ]
    rows = [
        [
            title(case),
            f"{case['matrices'] / case['owners']:.1f}",
            milliseconds(case["step"]),
            milliseconds(case["ideal"]),
            f"{case['ratio']:.2f}",
            f"{100 * case['idle']:.0f} %",
            milliseconds(case["all_gather"]),
            milliseconds(case["each_replica"]),
            milliseconds(case["one_at_a_time"]),
            _one_level(case),
        ]
        for case in cases
    ]
    return render(head, rows)


def _one_level(case: dict[str, Any]) -> str:
    """Its time, and that over the step's."""
    seconds = case["one_level"]
    if seconds is None:
        return "-"
    return f"{milliseconds(seconds)} ({seconds / case['step']:.2f})"


def volumes(cases: Sequence[dict[str, Any]]) -> str:
    head = [
        "GB a rank (mean, busiest)",
        "out",
        "in",
        "peers (mean, most)",
        "in one level",
        "KB a message",
        "buffers",
        "parameters",
        "buckets",
        "broadcasts",
    ]
    rows = [
        [
            title(case),
            f"{case['out_mean'] / 1e9:.2f} {case['out_max'] / 1e9:.2f}",
            f"{case['in_mean'] / 1e9:.2f} {case['in_max'] / 1e9:.2f}",
            f"{case['peers_mean']:.0f} {case['peers_max']}",
            str(case["one_level_peers"] or "-"),
            f"{case['message'] / 1e3:.0f}",
            f"{case['buffers'] / 1e9:.2f}",
            f"{case['parameters'] / 1e9:.2f}",
            str(case["buckets"]),
            str(case["relays"]),
        ]
        for case in cases
    ]
    return render(head, rows)
