"""The tables of ``tools.bench promises``."""

from __future__ import annotations

import textwrap
from typing import Any, TYPE_CHECKING

from ..figures import quartiles, ratio
from ..table import render, spread


if TYPE_CHECKING:
    from collections.abc import Sequence


COMPUTE = {
    "asleep": "Newton-Schulz is a sleep, as if each rank had a device of its own",
    "real": "Newton-Schulz of 12 x (256x256 + 256x1024), four processes on the cores",
}


def page(case: dict[str, Any], cpu: str) -> str:
    words = (
        f"{COMPUTE[case['newton_schulz']]}: {case['buckets']} buckets of {1e3 * case['seconds']:.1f} ms; "
        f"{len(case['times'][0][0])} repetitions, on {cpu}. Meanwhile the host gave {100 * case['stolen']:.1f} % of the "
        f"cores to other machines, and other programs here had {100 * max(0, case['others'] - case['stolen']):.1f} %."
    )
    tables = [textwrap.indent(t, "    ") for t in (milliseconds(case), speedups(case))]
    return "\n" + "\n\n".join([textwrap.fill(words, width=110), *tables]) + "\n"


def milliseconds(case: dict[str, Any]) -> str:
    rows = []
    for wire, of_wire in zip(case["wires"], case["times"], strict=True):
        medians = [1e3 * quartiles(times)[1] for times in of_wire]
        rows.append([words(wire), *(f"{ms:.0f}" for ms in medians)])
    names = [
        f"{'all at once' if all else 'one at a time'}, {prefetch}"
        for all, prefetch in case["settings"]
    ]
    return render(["ms by owners, prefetch_count", *names], rows)


def speedups(case: dict[str, Any]) -> str:
    """Medians and quartiles of ratios of one repetition; and what prefetch is ideally worth."""
    rows = []
    for wire, of_wire in zip(case["wires"], case["times"], strict=True):
        by_setting = dict(zip(case["settings"], of_wire, strict=True))

        def faster(slow: tuple[bool, int], fast: tuple[bool, int]) -> str:
            return spread(ratio(by_setting[slow], by_setting[fast]))

        rows.append(
            [
                words(wire),
                faster((False, 0), (True, 0)),
                faster((False, 1), (True, 1)),
                faster((True, 0), (True, 1)),
                faster((True, 0), (True, 2)),
                f"{most(case['buckets'], *wire):.2f}",
                faster((False, 0), (False, 2)),
                faster((False, 0), (True, 2)),
            ]
        )
    head = [
        "speed-up",
        "owners at once, prefetch 0",
        "owners at once, prefetch 1",
        "prefetch 1",
        "prefetch 2",
        "prefetch, ideally",
        "prefetch 2, one owner",
        "both",
    ]
    return render(head, rows)


def most(buckets: int, kind: str, share: float) -> float:
    """How much faster prefetch makes a step of all owners at once that does nothing else.

    In units of Newton-Schulz of a bucket, of which a collective takes ``share``. The first gather and the last
    scatter are never hidden. Without prefetch latencies of a scatter and of the next gather overlap, and
    their bytes do not.
    """
    if kind == "latency":
        return (buckets * (share + 1) + share) / (buckets + 2 * share)
    both = 2 * share * buckets
    return (both + buckets) / max(buckets + 2 * share, both + 1)


def words(wire: Sequence[Any]) -> str:
    kind, share = wire
    if not share:
        return "loopback"
    return f"{kind}, {share:g} of Newton-Schulz each way"
